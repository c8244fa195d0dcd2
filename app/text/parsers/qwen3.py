"""Tool calls of Qwen3, in the format of Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import re

from app.text.parsers.base import TEXT, CallFormat
from app.text.parsers.json_calls import JsonObjectCalls

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Qwen3Calls(JsonObjectCalls):
    """Parser of text into content and calls. White space around calls is dropped."""

    tags = (CALL, END_CALL)
    ends = (END_CALL,)
    lexeme = re.compile(rf"</?tool_call>|{TEXT}")

    def _opens(self, lexeme: str) -> bool:
        return lexeme == CALL


def _fits(source: str) -> bool:
    """Return True unless the same tags hold XML, like in the templates of Qwen3-Coder and GLM."""
    return CALL in source and "<function=" not in source and "<arg_key>" not in source


FORMAT = CallFormat("qwen3", Qwen3Calls, (CALL, END_CALL), _fits, opening=f'{CALL}\n{{"name": "', key="arguments")
