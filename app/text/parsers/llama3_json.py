"""Tool calls of Llama 3: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before them."""

import re
from collections.abc import Sequence

from app.text.parsers.base import CallFormat, CallParser, Json, read_call

PYTHON_TAG = "<|python_tag|>"


class Llama3Calls(CallParser):
    """Parser of content into text and calls. Calls open the output or follow PYTHON_TAG, with `;` between them.

    White space and `;` around calls are dropped.
    """

    tags = (PYTHON_TAG,)
    lexeme = re.compile(rf'{re.escape(PYTHON_TAG)}|[ \t\r\n]+|[^ \t\r\n{{}};"<\\]+|[{{}};"<\\]')

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        super().__init__(tools)
        self._is_first = True
        self._depth = 0
        self._in_string = self._is_escaped = False

    def _is_space(self, lexeme: str) -> bool:
        return super()._is_space(lexeme) or lexeme == PYTHON_TAG or (lexeme == ";" and self._after_call)

    def _opens(self, lexeme: str) -> bool:
        opens = lexeme == "{" and (self._is_first or self._after_call or PYTHON_TAG in self._space)
        self._is_first = False
        self._depth = int(opens)
        self._in_string = self._is_escaped = False
        return opens

    def _extend_block(self, lexeme: str) -> None:
        self._block.append(lexeme)
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = lexeme == "\\"
            self._in_string = lexeme != '"'
        elif lexeme == '"':
            self._in_string = True
        elif lexeme in ("{", "}"):
            self._depth += 1 if lexeme == "{" else -1
            if self._depth == 0:
                self._end_block(read_call("".join(self._block)))

    def _finish_block(self) -> None:
        self._block.append(self._tail)
        self._end_block(None)


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
