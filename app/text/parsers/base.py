"""Nouns of the parsers: what an output is parsed into, and what a family of models must say of its tool calls."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

Json = dict[str, Any]
SPACE = " \t\r\n"
"""JSON's white space. An ideographic space is an indent, and so text."""
TEXT = r"[ \t\r\n]+|[^< \t\r\n](?:[^<]*[^< \t\r\n])?|<"
"""Pattern of the lexemes of text, which a `<` begins or ends."""


class Part(NamedTuple):
    """A certain part of an output.

    A "call" begins a call of the function `text`. Its "arguments" follow as they are written, and then it is "whole",
    or "broken": the output was cut there, or its arguments are no JSON.
    """

    kind: Literal["reasoning", "content", "call", "arguments", "whole", "broken"]
    text: str = ""


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts in their order, neighbours of one kind as one."""
    return [Part(kind, "".join(part.text for part in group)) for kind, group in groupby(parts, lambda part: part.kind)]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. If it `is_whole`, `arguments` is the JSON text of an object, else maybe the beginning of one."""

    name: str
    arguments: str
    is_whole: bool = True


class Parsed(NamedTuple):
    """A whole output, without the order of its parts."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Parsed":
        """Return what the parts say together. A call among them has its end there."""
        texts: dict[str, list[str]] = {"content": [], "reasoning": [], "arguments": []}
        calls: list[ToolCall] = []
        name = ""
        for kind, text in parts:
            if kind == "call":
                name = text
            elif kind in texts:
                texts[kind].append(text)
            else:
                calls.append(ToolCall(name, "".join(texts["arguments"]), kind == "whole"))
                texts["arguments"].clear()
        return cls("".join(texts["content"]), "".join(texts["reasoning"]), tuple(calls))


class Reasoning(Protocol):
    """Parser of the text around calls into reasoning and content. `has_reasoned` if there was reasoning."""

    has_reasoned: bool

    def push(self, text: str) -> tuple[str, str]:
        """Return the certain reasoning and the certain content of this piece."""

    @property
    def is_before_content(self) -> bool:
        """True until the content has begun."""

    @property
    def begins_content(self) -> bool:
        """True if a text that came now would be the first of the content."""

    def quotes(self, space: str) -> bool:
        """Return True if a tag behind this white space would be an example, quoted in the reasoning."""

    def end(self) -> tuple[str, str]:
        """Return the held reasoning and content before a call, which ends the reasoning."""

    def finish(self) -> tuple[str, str]:
        """Return the held reasoning and content at the end of the output."""


class NoReasoning:
    """Reasoning of an output that has none: all is content."""

    has_reasoned = is_before_content = False
    begins_content = True

    def push(self, text: str) -> tuple[str, str]:
        self.begins_content = self.begins_content and not text.strip(SPACE)
        return "", text

    def quotes(self, space: str) -> bool:
        return False

    def end(self) -> tuple[str, str]:
        return "", ""

    def finish(self) -> tuple[str, str]:
        return "", ""


class CallParser(ABC):
    """Reader of one output in lexemes, which finds the calls of the functions that `tools` offer.

    Some lexemes may open a call. What follows is held until it is the head of a call of an offered function: then the
    call is certain, whatever comes. Held text that turns out to be no head is content, like all other text. White space
    around calls is dropped. What is found goes to `emit` at once, and `reasoning` reads the content. The concatenated
    parts depend only on the text, and not on its pieces. `tags` are the lexemes that may come in pieces.
    """

    tags: ClassVar[tuple[str, ...]]
    lexeme: ClassVar[re.Pattern[str]]

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        self.emit: Callable[[Part], None] = lambda part: None
        self.reasoning: Reasoning = NoReasoning()
        self._schemas: Json = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._tail = ""  # maybe the beginning of a tag
        self._space: list[str] = []  # white space that is shown only if text follows
        self._head: list[str] = []  # of what may become a call
        self._in_call = self._after_call = self._is_quoted = False
        self._is_first = True  # neither text nor a call so far

    def push(self, text: str) -> None:
        """Read a piece."""
        text = self._tail + text
        cut = len(text) - self._num_held(text)
        self._tail = text[cut:]
        self._read(text[:cut])

    def finish(self, is_cut: bool) -> None:
        """Read the held text at the end of the output, where a limit may have cut it. No push may follow."""
        tail, self._tail = self._tail, ""
        if self._in_call:
            self._finish_call(tail, is_cut)
        elif self._head:
            self._head.append(tail)
            self._give_back()
        else:
            self._read(tail)
        if self._space and not self._after_call:
            self.emit(Part("content", "".join(self._space)))

    @abstractmethod
    def _opens(self, lexeme: str) -> bool:
        """Return True if the lexeme may open a call."""

    @abstractmethod
    def _extend_head(self, lexeme: str) -> str:
        """Read a lexeme behind the head. Return the end of it that is to be read again."""

    @abstractmethod
    def _extend_call(self, lexeme: str) -> str:
        """Read a lexeme of a call. Return the end of it that is to be read again."""

    @abstractmethod
    def _finish_call(self, tail: str, is_cut: bool) -> None:
        """End the call at the end of the output."""

    def _num_held(self, text: str) -> int:
        return num_held(text, *self.tags)

    def _is_space(self, lexeme: str) -> bool:
        return lexeme[0] in SPACE

    def _space_before(self) -> str:
        """Return the white space before the tag that may open a call."""
        return "".join(self._space)

    def _read(self, text: str) -> None:
        at = 0
        while found := self.lexeme.match(text, at):
            at = found.end() - len(self._take(found[0]))

    def _take(self, lexeme: str) -> str:
        if self._in_call:
            return self._extend_call(lexeme)
        if self._head:
            return self._extend_head(lexeme)
        if self._is_space(lexeme):
            self._space.append(lexeme)
        elif self._opens(lexeme):
            # With a quoted tag the one right behind it is quoted.
            self._is_quoted = self._is_quoted or self.reasoning.quotes(self._space_before())
            (self._show if self._is_quoted else self._begin_head)(lexeme)
        else:
            self._is_quoted = False
            self._show(lexeme)
        return ""

    def _show(self, text: str) -> None:
        self.emit(Part("content", "".join((*self._space, text))))
        self._space.clear()
        self._after_call = self._is_first = False

    def _begin_head(self, lexeme: str) -> None:
        self._head = [lexeme]

    def _give_back(self) -> None:
        """Show the held text, which is no head of a call."""
        text = "".join(self._head)
        self._head = []
        self._show(text)

    def _begin_call(self, name: str) -> None:
        self.emit(Part("call", name))
        self._head = []
        self._space.clear()
        self._in_call, self._is_first = True, False

    def _argue(self, text: str) -> None:
        if text:
            self.emit(Part("arguments", text))

    def _end_call(self, is_whole: bool) -> None:
        self.emit(Part("whole" if is_whole else "broken"))
        self._space.clear()
        self._in_call, self._after_call = False, True


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format in which a family of models writes tool calls."""

    name: str
    parser: Callable[[Sequence[Json]], CallParser]  # takes the tools that are offered
    marks: tuple[str, ...]  # tags that must stay in the text, even if they are special tokens
    fits: Callable[[str], bool]  # true for the source of a chat template that teaches this format
    opening: str  # of a call, up to the function's name
    key: str = ""  # name of the arguments in a call that is a JSON object
    around_name: str = ""  # in other formats, the text around a name, which is {} in it
    # Returns messages and tools as the family's chat templates read them. None: as they are.
    for_template: Callable[[list[Json], list[Json] | None], tuple[list[Json], list[Json] | None]] | None = None

    def prefix(self, function: str | None) -> str:
        """Return the beginning of a call of `function`, or of any function.

        It ends where a token ends in text that the model writes itself: the blank before a value belongs to the value.
        """
        if function is None:
            return self.opening
        if self.around_name:
            return self.opening + self.around_name.format(function)
        return f'{self.opening}{json.dumps(function, ensure_ascii=False)[1:-1]}", "{self.key}":'


def num_held(text: str, *tags: str) -> int:
    """Return the length of the end of `text` that may be the beginning of a tag."""
    start = text.rfind("<")
    is_held = start >= 0 and any(tag != text[start:] and tag.startswith(text[start:]) for tag in tags)
    return len(text) - start if is_held else 0
