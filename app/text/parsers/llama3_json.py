"""Tool calls of Llama 3: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before them."""

import re

from app.text.parsers.base import CallFormat, Json
from app.text.parsers.json_calls import JsonObjectCalls

PYTHON_TAG = "<|python_tag|>"


class Llama3Calls(JsonObjectCalls):
    """Parser of text into content and calls. Calls open the content or follow PYTHON_TAG, with `;` between them.

    White space and `;` around calls are dropped.
    """

    tags = (PYTHON_TAG,)
    lexeme = re.compile(rf"{re.escape(PYTHON_TAG)}|[ \t\r\n]+|[^ \t\r\n{{;<]+|[{{;<]")

    def _is_space(self, lexeme: str) -> bool:
        return super()._is_space(lexeme) or lexeme == PYTHON_TAG or (lexeme == ";" and self._after_call)

    def _space_before(self) -> str:
        return super()._space_before().partition(PYTHON_TAG)[0]

    def _opens(self, lexeme: str) -> bool:
        return lexeme == "{" and (self._after_call or PYTHON_TAG in self._space or self.reasoning.begins_content)


def _fits(source: str) -> bool:
    return "<|start_header_id|>" in source and '"parameters": ' in source


def for_template(messages: list[Json], tools: list[Json] | None) -> tuple[list[Json], list[Json] | None]:
    """Return messages and tools as Llama 3's chat template reads them, which writes no text of a message with calls.

    The text is then a separate message before the calls.
    """
    read: list[Json] = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            read.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = message | {"content": ""}
        read.append(message)
    return read, tools


FORMAT = CallFormat(
    "llama3_json", Llama3Calls, (PYTHON_TAG,), _fits, opening='{"name": "', key="parameters", for_template=for_template
)
