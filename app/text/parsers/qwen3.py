"""Tool calls of Qwen3, in the format of Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import json
import re

from app.text.parsers.base import SPACE, TEXT, CallFormat, CallParser, read_call

CALL, END_CALL = "<tool_call>", "</tool_call>"
_MAX_CLOSING_TAGS = 64  # of one block, because each costs a parse of the whole block


class Qwen3Calls(CallParser):
    """Parser of content into text and calls. White space around calls is dropped."""

    tags = (CALL, END_CALL)
    lexeme = re.compile(rf"</?tool_call>|{TEXT}")

    def _extend_block(self, lexeme: str) -> None:
        self._block.append(lexeme)
        if lexeme != END_CALL:
            return
        call = read_call("".join(self._block[1:-1]))
        if call or not _is_inside_string("".join(self._block[1:])) or self._block.count(END_CALL) > _MAX_CLOSING_TAGS:
            self._end_block(call)

    def _finish_block(self) -> None:
        # An output that ends within the closing tag has the whole call.
        call = read_call("".join(self._block[1:])) if END_CALL.startswith(self._tail) else None
        self._block.append(self._tail)
        self._end_block(call)


def _is_inside_string(text: str) -> bool:
    """Return True for a JSON object that is cut inside a string. Only there a closing tag can be part of the JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.lstrip(SPACE).startswith("{") and error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _fits(source: str) -> bool:
    """Return True unless the same tags hold XML, like in the templates of Qwen3-Coder and GLM."""
    return CALL in source and "<function=" not in source and "<arg_key>" not in source


FORMAT = CallFormat("qwen3", Qwen3Calls, (CALL, END_CALL), _fits, opening=f'{CALL}\n{{"name": "', key="arguments")
