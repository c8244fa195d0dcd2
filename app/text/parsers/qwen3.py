"""Text of one request, piece by piece, to reasoning, content and tool calls as Qwen3 writes them."""

import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MARKS = (THINK, END_THINK, CALL, END_CALL)
_SPACE = " \t\r\n"  # JSON's own. An ideographic space is an indent, so it is text.
_LEXEME = re.compile(r"</?(?:think|tool_call)>|[ \t\r\n]+|[^< \t\r\n](?:[^<]*[^< \t\r\n])?|<")  # words with their gaps
_MAX_CLOSING_TAGS = 64  # in the strings of one call: each costs a parse of the whole block


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """What one piece of output made certain; in what order content and calls came within the piece is not told."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class _Stage(Enum):
    OPENING = auto()  # nothing but whitespace so far
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class OutputParser:
    """Splits output into what a client shows as reasoning, as content, and what it runs as calls.

    The concatenated results depend on the text alone, not on how it is cut. Nothing is lost but tags that did their
    work and whitespace beside them: a block that is no call is content as it was written. With both switches off all
    is content. `starts_in_reasoning` says that the prompt has opened the reasoning; without `reasoning` it is ignored.
    """

    def __init__(self, reasoning: bool, tools: bool, starts_in_reasoning: bool = False) -> None:
        self._tools = tools
        self._stage = _Stage.OPENING if reasoning else _Stage.CONTENT
        self._tags = (THINK, END_THINK) * reasoning + (CALL, END_CALL) * tools
        self._tail = ""  # the beginning of what may become a tag
        self._space: list[str] = []  # whitespace that is shown only if text follows
        self._drop_space = reasoning and starts_in_reasoning
        self._after_call = False
        self._block: list[str] = []
        self._finished = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> Parsed:
        """What has become certain by this piece, often nothing."""
        assert not self._finished, "pushed to output that has finished"
        text = self._tail + text
        if self._stage is _Stage.CONTENT and not self._tools and not self._drop_space:
            # Nothing is looked for any more.
            self._tail = ""
            return Parsed(text)
        cut = self._end_of_certain(text)
        self._tail = text[cut:]
        self._read(text[:cut])
        return self._release()

    def finish(self) -> Parsed:
        """What was held back, now that the output has ended. Nothing may be pushed afterwards."""
        assert not self._finished, "finished twice"
        self._finished = True
        if self._stage is _Stage.CALL:
            # Output that ran out in the middle of the closing tag has the whole call.
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
        """The first lexeme that is not whitespace tells whether the output begins with reasoning."""
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
    """The call that a block's text is, or None. "parameters" is what some models write for "arguments"."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
            return None
        written = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(written) if isinstance(written, str) else written
        dumped = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        found = ToolCall(name, written if isinstance(written, str) else dumped)
        (found.name + found.arguments).encode()  # A lone surrogate could not be sent.
    except (ValueError, RecursionError):
        return None
    return found if isinstance(arguments, dict) else None


def _is_inside_string(text: str) -> bool:
    """True if the text is a JSON object cut inside a string: there alone a closing tag can be part of JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.lstrip(_SPACE).startswith("{") and error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False
