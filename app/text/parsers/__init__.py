"""Parsers of output: reasoning, and the tool calls of each family of models.

A parser gets text, never tokens (`app.text.detokenizer`), and knows nothing of HTTP: answers are made in `app.api`.
"""

from collections.abc import Callable

from app.text.parsers import harmony, llama3_json, qwen3, qwen3_coder
from app.text.parsers.base import CallFormat, CallParser, NoReasoning, Part, Reasoning, joined
from app.text.parsers.harmony import HarmonyReasoning
from app.text.parsers.reasoning import END_THINK, THINK, ReasoningParser

FORMATS = (qwen3.FORMAT, llama3_json.FORMAT, harmony.FORMAT, qwen3_coder.FORMAT)
MARKS = (THINK, END_THINK, *(mark for form in FORMATS for mark in form.marks))


def format_for(name: str, template: str) -> CallFormat | None:
    """Return the format that is called `name`. With "auto" it is the one whose calls the chat template teaches."""
    suits = (lambda each: each.fits(template)) if name == "auto" else (lambda each: each.name == name)
    return next(filter(suits, FORMATS), None)


def reasoning_for(name: str, template: str) -> Callable[[bool], Reasoning] | None:
    """Return the maker of reasoning parsers that is called `name`, or None. With "auto" the chat template decides."""
    if name == "harmony" or (name == "auto" and harmony.fits(template)):
        return HarmonyReasoning
    return ReasoningParser if name == "qwen3" or (name == "auto" and THINK in template) else None


class OutputParser:
    """Parser of one output into reasoning, content and tool calls, each if there is a parser of it.

    The joined parts depend only on the text, and not on its pieces. Without `shows_reasoning` the reasoning is
    dropped. `max_calls` is the number of calls after which nothing more is read. `begun_call` opens the output: the
    prompt ends with it. `num_calls` have begun so far, and `num_whole_calls` of them have all their arguments.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        calls: CallParser | None = None,
        shows_reasoning: bool = True,
        max_calls: int | None = None,
        begun_call: str = "",
    ) -> None:
        self.reasoning = reasoning or NoReasoning()
        self.shows_reasoning = shows_reasoning
        self.max_calls = max_calls
        self.num_calls = self.num_whole_calls = 0
        self._num_broken_calls = 0
        self._calls = calls
        self._parts: list[Part] = []
        self._finished = False
        if calls is not None:
            calls.reasoning, calls.emit = self.reasoning, self._take
        if calls is not None and begun_call:
            calls.push(begun_call)

    @property
    def is_before_content(self) -> bool:
        """True while the output may still be reasoning."""
        return self.reasoning.is_before_content

    @property
    def has_all_calls(self) -> bool:
        return self.max_calls is not None and self.num_whole_calls + self._num_broken_calls >= self.max_calls

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and each is whole."""
        return self.num_calls == self.num_whole_calls > 0

    def push(self, text: str) -> list[Part]:
        """Return what this piece makes certain, often nothing."""
        assert not self._finished, "pushed to output that has finished"
        if self._calls is not None:
            self._calls.push(text)
        elif text:
            self._take(Part("content", text))
        return self._release()

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return the held text at the end of the output, where a limit may have cut it. No push may follow."""
        assert not self._finished, "finished twice"
        self._finished = True
        if self._calls is not None:
            self._calls.finish(is_cut)
        if not self.has_all_calls:
            self._show(*self.reasoning.finish())
        return self._release()

    def _take(self, part: Part) -> None:
        """Take a part whose content may have reasoning in it."""
        if self.has_all_calls:
            return
        if part.kind == "content":
            self._show(*self.reasoning.push(part.text))
            return
        if part.kind == "call":
            self._show(*self.reasoning.end())
        self.num_calls += part.kind == "call"
        self.num_whole_calls += part.kind == "whole"
        self._num_broken_calls += part.kind == "broken"
        self._parts.append(part)

    def _show(self, reasoning: str, content: str) -> None:
        if reasoning and self.shows_reasoning:
            self._parts.append(Part("reasoning", reasoning))
        if content:
            self._parts.append(Part("content", content))

    def _release(self) -> list[Part]:
        parts, self._parts = joined(self._parts), []
        return parts
