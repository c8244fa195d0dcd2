"""Reasoning between <think> and </think>, taken out of an output piece by piece."""

import re
from enum import Enum, auto

from app.text.parsers.base import SPACE, num_held

THINK, END_THINK = "<think>", "</think>"
_QUOTATION_MARKS = "\"'\u201c\u2018\u00ab\u300c"


class _Stage(Enum):
    OPENING = auto()  # only white space so far
    REASONING = auto()
    CONTENT = auto()


class ReasoningParser:
    """Parser of one output into reasoning and content.

    Reasoning opens the output, or the prompt has opened it (`starts_in_reasoning`). Only tags and the white space
    around them are dropped. `has_reasoned` if there was reasoning. A call ends it too, and a closing tag that comes
    later is dropped.
    """

    def __init__(self, starts_in_reasoning: bool = False) -> None:
        self._starts_in_reasoning = starts_in_reasoning
        self._stage = _Stage.OPENING
        self._tail = ""  # maybe the beginning of a tag
        self._space: list[str] = []  # white space that is shown only if text follows
        self._drop_space = starts_in_reasoning
        self._quotation = _Quotation()
        self._may_close = False  # a closing tag may follow a call
        self._has_content = False
        self.has_reasoned = False

    @property
    def is_before_content(self) -> bool:
        """True until the content has begun."""
        return self._stage is not _Stage.CONTENT

    @property
    def begins_content(self) -> bool:
        if self._stage is _Stage.OPENING:
            return not (self._starts_in_reasoning or self._tail)
        return self._stage is _Stage.CONTENT and not self._has_content

    def quotes(self, space: str) -> bool:
        """Return True behind a quotation mark of the reasoning, in a fence, or in a span of code on its last line."""
        self._quotation.read(space)
        return self._stage is _Stage.REASONING and self._quotation.is_open

    def push(self, text: str) -> tuple[str, str]:
        """Return the certain reasoning and the certain content of this piece."""
        self._quotation.read(text if self._stage is not _Stage.CONTENT else "")
        text = self._tail + text
        has_tags = self._may_close or self._stage is not _Stage.CONTENT
        cut = len(text) - num_held(text, *((THINK, END_THINK) if has_tags else ()))
        text, self._tail = text[:cut], text[cut:]
        if self._stage is _Stage.OPENING:
            text = self._open(text)
        if self._stage is _Stage.REASONING:
            before, end, text = text.partition(END_THINK)
            reasoning = self._show(before)
            if not end:
                return reasoning, ""
            self._enter(_Stage.CONTENT)
            return reasoning, self._show_content(text)
        return "", self._show_content(text) if self._stage is _Stage.CONTENT else ""

    def end(self) -> tuple[str, str]:
        """Return the held reasoning and content before a call, which ends the reasoning."""
        held = self.finish()
        self._tail = ""
        self._space.clear()
        if self._stage is _Stage.REASONING or (self._stage is _Stage.OPENING and self._starts_in_reasoning):
            self._may_close = self._drop_space = True
        self._stage, self._has_content = _Stage.CONTENT, True
        return held

    def finish(self) -> tuple[str, str]:
        """Return the held reasoning and content at the end of the output."""
        if self._stage is _Stage.CONTENT:
            return "", self._tail
        if self._stage is _Stage.OPENING and not self._starts_in_reasoning:
            return "", "".join(self._space) + self._tail
        return self._show(self._tail), ""

    def _open(self, text: str) -> str:
        """Decide by the first text that is not white space if reasoning opens the output. Return the text after it."""
        first = text.lstrip(SPACE)
        if not first:
            if not self._drop_space:
                self._space.append(text)
            return ""
        if first.startswith(THINK):
            self._enter(_Stage.REASONING)
            return first.removeprefix(THINK)
        if self._starts_in_reasoning:
            self._enter(_Stage.REASONING)
            return first
        self._stage = _Stage.CONTENT
        return "".join(self._space) + text

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        self.has_reasoned = True
        self._space.clear()
        self._drop_space = True

    def _show(self, text: str) -> str:
        """Return reasoning without the white space at its ends."""
        if self._drop_space:
            text = text.lstrip(SPACE)
        shown = text.rstrip(SPACE)
        if not shown:
            self._space.append(text)
            return ""
        self._drop_space = False
        shown = "".join(self._space) + shown
        self._space = [text[len(text.rstrip(SPACE)) :]]
        return shown

    def _show_content(self, text: str) -> str:
        if not self._may_close:
            text, self._tail = text + self._tail, ""
        before, end, after = text.partition(END_THINK) if self._may_close else (text, "", "")
        shown = self._without_space(before)
        if end:
            self._may_close, self._drop_space = False, True
            shown += self._without_space(after + self._tail)
            self._tail = ""
        return shown

    def _without_space(self, text: str) -> str:
        if self._drop_space:
            text = text.lstrip(SPACE)
            self._drop_space = not text
        self._has_content |= bool(text.strip(SPACE))
        return text


class _Quotation:
    """Quotations in a text that comes in pieces: Markdown's fences, spans of code in a line, and quotation marks."""

    def __init__(self) -> None:
        self._in_fence = self._in_span = False
        self._num_ticks = 0  # at the end of the text
        self._last = " "

    @property
    def is_open(self) -> bool:
        """True if what follows the text is quoted."""
        self._close_ticks()
        return self._in_fence or self._in_span or self._last in _QUOTATION_MARKS

    def read(self, text: str) -> None:
        self._last = text[-1:] or self._last
        for lexeme in re.findall("`+|[^`]+", text):
            if lexeme[0] == "`":
                self._num_ticks += len(lexeme)
            else:
                self._close_ticks()
                self._in_span = self._in_span and "\n" not in lexeme

    def _close_ticks(self) -> None:
        if self._num_ticks >= 3:
            self._in_fence = not self._in_fence
        elif self._num_ticks:
            self._in_span = not self._in_span
        self._num_ticks = 0
