"""Parsers of output: reasoning, and the tool calls of each family of models.

A parser gets text, never tokens (`app.text.detokenizer`), and knows nothing of HTTP: answers are made in `app.api`.
"""

import re
from collections.abc import Callable

from app.text.parsers import harmony, llama3_json, qwen3, qwen3_coder
from app.text.parsers.base import CallFormat, CallParser, Parsed, Reasoning, ToolCall
from app.text.parsers.harmony import HarmonyReasoning
from app.text.parsers.reasoning import END_THINK, THINK, ReasoningParser

FORMATS = (qwen3.FORMAT, llama3_json.FORMAT, harmony.FORMAT, qwen3_coder.FORMAT)
_AFTER_CALL = re.compile(r"(?<=[>}])")  # a call ends there
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

    The concatenated results depend only on the text, and not on the pieces. Without `shows_reasoning` the reasoning is
    dropped. `calls` are those that were read so far, and `max_calls` is the number after which nothing more is read.
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        calls: CallParser | None = None,
        shows_reasoning: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self.reasoning = reasoning
        self.shows_reasoning = shows_reasoning
        self.max_calls = max_calls
        self.calls: list[ToolCall] = []
        self._parser = calls
        self._finished = False

    @property
    def is_before_content(self) -> bool:
        """True while the output may still be reasoning."""
        return self.reasoning is not None and self.reasoning.is_before_content

    @property
    def has_all_calls(self) -> bool:
        return self.max_calls is not None and len(self.calls) >= self.max_calls

    def push(self, text: str) -> Parsed:
        """Return what this piece makes certain, often nothing."""
        assert not self._finished, "pushed to output that has finished"
        return self._parsed(*(self.reasoning.push(text) if self.reasoning else ("", text)))

    def push_in_order(self, text: str) -> list[Parsed]:
        """Push the text in parts, up to the last call. Each part has its content before its calls."""
        parsed: list[Parsed] = []
        for part in _AFTER_CALL.split(text) if self._parser is not None else [text]:
            if part and not self.has_all_calls:
                parsed.append(self.push(part))
        return parsed

    def finish(self) -> Parsed:
        """Return the held text at the end of the output. No push may follow."""
        assert not self._finished, "finished twice"
        self._finished = True
        parsed = self._parsed(*(self.reasoning.finish() if self.reasoning else ("", "")))
        if self._parser is None:
            return parsed
        held = self._parser.finish()
        self.calls += held.tool_calls
        return Parsed.joined((parsed, held))

    def _parsed(self, reasoning: str, content: str) -> Parsed:
        reasoning = reasoning if self.shows_reasoning else ""
        if self._parser is None or not content:
            return Parsed(content, reasoning)
        parsed = self._parser.push(content)._replace(reasoning=reasoning)
        self.calls += parsed.tool_calls
        return parsed
