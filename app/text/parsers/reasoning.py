"""Reasoning between <think> and </think>, taken out of an output piece by piece."""

from enum import Enum, auto

from app.text.parsers.base import SPACE, num_held

THINK, END_THINK = "<think>", "</think>"


class _Stage(Enum):
    OPENING = auto()  # only white space so far
    REASONING = auto()
    CONTENT = auto()


class ReasoningParser:
    """Parser of one output into reasoning and content.

    Reasoning opens the output, or the prompt has opened it (`starts_in_reasoning`). Only tags and the white space
    around them are dropped. `has_reasoned` if there was reasoning.
    """

    def __init__(self, starts_in_reasoning: bool = False) -> None:
        self._starts_in_reasoning = starts_in_reasoning
        self._stage = _Stage.OPENING
        self._tail = ""  # maybe the beginning of a tag
        self._space: list[str] = []  # white space that is shown only if text follows
        self._drop_space = starts_in_reasoning
        self.has_reasoned = False

    @property
    def is_before_content(self) -> bool:
        """True until the content has begun."""
        return self._stage is not _Stage.CONTENT

    def push(self, text: str) -> tuple[str, str]:
        """Return the certain reasoning and the certain content of this piece."""
        text = self._tail + text
        cut = len(text) - num_held(text, *((THINK, END_THINK) if self._stage is not _Stage.CONTENT else ()))
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

    def finish(self) -> tuple[str, str]:
        """Return the held reasoning and content at the end of the output."""
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
        text, self._tail = text + self._tail, ""
        if self._drop_space:
            text = text.lstrip(SPACE)
            self._drop_space = not text
        return text
