"""Parser of Qwen3's output: text, piece by piece, to reasoning, content and tool calls."""

import json
import re
from enum import Enum, auto

from app.text.parsers import Parsed, ToolCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKS = (THINK, END_THINK, CALL, END_CALL)
_SPACE = " \t\r\n"  # JSON's white space. An ideographic space is an indent, and so text.
_LEXEME = re.compile(r"</?(?:think|tool_call)>|[ \t\r\n]+|[^< \t\r\n](?:[^<]*[^< \t\r\n])?|<")
_MAX_CLOSING_TAGS = 64  # of one block, because each costs a parse of the whole block


class _Stage(Enum):
    OPENING = auto()  # only white space so far
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class OutputParser:
    """Parser of one output into reasoning, content and tool calls.

    The concatenated results depend on the text alone, and not on the pieces. Only tags and the white space beside them
    are dropped. A block that is no call is content, unchanged. With both switches off, everything is content.
    `starts_in_reasoning` is for a prompt that has opened the reasoning. Without `reasoning` it is ignored.
    """

    def __init__(self, reasoning: bool, tools: bool, starts_in_reasoning: bool = False) -> None:
        self._tools = tools
        self._stage = _Stage.OPENING if reasoning else _Stage.CONTENT
        self._tags = (THINK, END_THINK) * reasoning + (CALL, END_CALL) * tools
        self._tail = ""  # maybe the beginning of a tag
        self._space: list[str] = []  # white space that is shown only if text follows
        self._drop_space = reasoning and starts_in_reasoning
        self._after_call = False
        self._block: list[str] = []
        self._finished = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> Parsed:
        """Return what this piece makes certain, often nothing."""
        assert not self._finished, "pushed to output that has finished"
        text = self._tail + text
        if self._stage is _Stage.CONTENT and not self._tools and not self._drop_space:
            self._tail = ""
            return Parsed(text)
        cut = self._end_of_certain(text)
        self._tail = text[cut:]
        self._read(text[:cut])
        return self._release()

    def finish(self) -> Parsed:
        """Return the held text at the end of the output. No push may follow."""
        assert not self._finished, "finished twice"
        self._finished = True
        if self._stage is _Stage.CALL:
            # An output that ends within the closing tag has the whole call.
            call = _read_call("".join(self._block[1:])) if END_CALL.startswith(self._tail) else None
            self._block.append(self._tail)
            self._end_block(call)
        else:
            self._read(self._tail)
        if self._stage is not _Stage.REASONING and not self._after_call:
            self._content += self._space
        return self._release()

    def _end_of_certain(self, text: str) -> int:
        start = text.rfind("<")
        if start >= 0 and any(tag != text[start:] and tag.startswith(text[start:]) for tag in self._tags):
            return start
        return len(text)

    def _read(self, text: str) -> None:
        for lexeme in _LEXEME.findall(text):
            if self._stage is _Stage.OPENING and lexeme[0] not in _SPACE:
                self._open(lexeme)
            elif self._stage is _Stage.CALL:
                self._extend_block(lexeme)
            elif lexeme[0] in _SPACE and self._drop_space:
                pass
            elif lexeme[0] in _SPACE and (self._tools or self._stage is not _Stage.CONTENT):
                self._space.append(lexeme)
            else:
                self._read_word(lexeme)

    def _open(self, lexeme: str) -> None:
        """Decide by the first lexeme that is not white space if the output begins with reasoning."""
        if lexeme == THINK:
            self._enter_dropping_space(_Stage.REASONING)
        else:
            self._stage = _Stage.REASONING if self._drop_space else _Stage.CONTENT
            self._read_word(lexeme)

    def _read_word(self, lexeme: str) -> None:
        if self._stage is _Stage.REASONING and lexeme == END_THINK:
            self._enter_dropping_space(_Stage.CONTENT)
        elif self._stage is _Stage.CONTENT and self._tools and lexeme == CALL:
            self._stage = _Stage.CALL
            self._block = [lexeme]
            self._drop_space = False
        else:
            self._show(lexeme)

    def _enter_dropping_space(self, stage: _Stage) -> None:
        self._stage = stage
        self._space.clear()
        self._drop_space = True

    def _show(self, text: str) -> None:
        shown = self._reasoning if self._stage is _Stage.REASONING else self._content
        shown += self._space
        shown.append(text)
        self._space.clear()
        self._drop_space = self._after_call = False

    def _extend_block(self, lexeme: str) -> None:
        self._block.append(lexeme)
        if lexeme != END_CALL:
            return
        call = _read_call("".join(self._block[1:-1]))
        if call or not _is_inside_string("".join(self._block[1:])) or self._block.count(END_CALL) > _MAX_CLOSING_TAGS:
            self._end_block(call)

    def _end_block(self, call: ToolCall | None) -> None:
        self._stage = _Stage.CONTENT
        if call is None:
            self._show("".join(self._block))
        else:
            self._calls.append(call)
            self._space.clear()
            self._after_call = True
        self._block = []

    def _release(self) -> Parsed:
        parsed = Parsed("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return parsed


def _read_call(text: str) -> ToolCall | None:
    """Return the call in a block, or None if there is none. Some models write "parameters" instead of "arguments"."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return None
        written = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(written) if isinstance(written, str) else written
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        parsed = ToolCall(name, written if isinstance(written, str) else dumped)
        (parsed.name + parsed.arguments).encode()  # Raises UnicodeEncodeError for half a surrogate pair.
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(arguments, dict) else None


def _is_inside_string(text: str) -> bool:
    """Return True for a JSON object that is cut inside a string. Only there a closing tag can be part of the JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.lstrip(_SPACE).startswith("{") and error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False
