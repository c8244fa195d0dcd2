"""Tool calls of Qwen3, which are those of Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import json
import re

from app.text.parsers.base import SPACE, CallFormat, Parsed, ToolCall, num_held, read_call

CALL, END_CALL = "<tool_call>", "</tool_call>"
_LEXEME = re.compile(r"</?tool_call>|[ \t\r\n]+|[^< \t\r\n](?:[^<]*[^< \t\r\n])?|<")
_MAX_CLOSING_TAGS = 64  # of one block, because each costs a parse of the whole block


class Qwen3Calls:
    """Parser of content into text and calls. White space around calls is dropped."""

    def __init__(self) -> None:
        self._tail = ""  # maybe the beginning of a tag
        self._space: list[str] = []  # white space that is shown only if text follows
        self._after_call = False
        self._block: list[str] = []  # of a call that is being written, its opening tag included
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> Parsed:
        text = self._tail + text
        cut = len(text) - num_held(text, CALL, END_CALL)
        self._tail = text[cut:]
        self._read(text[:cut])
        return self._release()

    def finish(self) -> Parsed:
        if self._block:
            # An output that ends within the closing tag has the whole call.
            call = read_call("".join(self._block[1:])) if END_CALL.startswith(self._tail) else None
            self._block.append(self._tail)
            self._end_block(call)
        else:
            self._read(self._tail)
        if not self._after_call:
            self._content += self._space
        return self._release()

    def _read(self, text: str) -> None:
        for lexeme in _LEXEME.findall(text):
            if self._block:
                self._extend_block(lexeme)
            elif lexeme[0] in SPACE:
                self._space.append(lexeme)
            elif lexeme == CALL:
                self._block = [lexeme]
            else:
                self._show(lexeme)

    def _show(self, text: str) -> None:
        self._content += [*self._space, text]
        self._space.clear()
        self._after_call = False

    def _extend_block(self, lexeme: str) -> None:
        self._block.append(lexeme)
        if lexeme != END_CALL:
            return
        call = read_call("".join(self._block[1:-1]))
        if call or not _is_inside_string("".join(self._block[1:])) or self._block.count(END_CALL) > _MAX_CLOSING_TAGS:
            self._end_block(call)

    def _end_block(self, call: ToolCall | None) -> None:
        if call is None:
            self._show("".join(self._block))
        else:
            self._calls.append(call)
            self._space.clear()
            self._after_call = True
        self._block = []

    def _release(self) -> Parsed:
        parsed = Parsed("".join(self._content), "", tuple(self._calls))
        self._content, self._calls = [], []
        return parsed


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
