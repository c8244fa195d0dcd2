"""Nouns of the parsers: what an output is parsed into, and what a family of models must say of its tool calls."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

Json = dict[str, Any]
SPACE = " \t\r\n"
"""JSON's white space. An ideographic space is an indent, and so text."""
TEXT = r"[ \t\r\n]+|[^< \t\r\n](?:[^<]*[^< \t\r\n])?|<"
"""Pattern of the lexemes of text, which a `<` begins or ends."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """The certain part of one piece of output. Only `OutputParser.push_in_order` has its content before its calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence["Parsed"]) -> "Parsed":
        return cls(
            "".join(part.content for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.tool_calls),
        )

    @classmethod
    def in_order(cls, parts: Sequence["Parsed"]) -> list["Parsed"]:
        """Return the parts, joined to as few as keep the order of their texts and calls."""
        groups: list[list[Parsed]] = [[]]
        for part in parts:
            groups[-1].append(part)
            if part.tool_calls:
                groups.append([])
        return [cls.joined(group) for group in groups if group]


class Reasoning(Protocol):
    """Parser of one output into reasoning and content. `has_reasoned` if there was reasoning."""

    has_reasoned: bool

    def push(self, text: str) -> tuple[str, str]:
        """Return the certain reasoning and the certain content of this piece."""

    @property
    def is_before_content(self) -> bool:
        """True until the content has begun."""

    def finish(self) -> tuple[str, str]:
        """Return the held reasoning and content at the end of the output."""


class CallParser(ABC):
    """Parser of one output without its reasoning. The concatenated results depend only on the text.

    Calls are blocks of lexemes. White space around them is dropped. Other text is content, unchanged.
    `tags` are the lexemes that may come in pieces, and the first opens a block. `tools` have the schemas of arguments.
    """

    tags: ClassVar[tuple[str, ...]]
    lexeme: ClassVar[re.Pattern[str]]

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        self._schemas: Json = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._tail = ""  # maybe the beginning of a tag
        self._space: list[str] = []  # white space that is shown only if text follows
        self._after_call = False
        self._block: list[str] = []  # of a call that is being written, its opening tag included
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> Parsed:
        """Return what this piece makes certain, often nothing."""
        text = self._tail + text
        cut = len(text) - self._num_held(text)
        self._tail = text[cut:]
        self._read(text[:cut])
        return self._release()

    def finish(self) -> Parsed:
        """Return the held text at the end of the output. No push may follow."""
        if self._block:
            self._finish_block()
        else:
            self._read(self._tail)
        if not self._after_call:
            self._content += self._space
        return self._release()

    @abstractmethod
    def _extend_block(self, lexeme: str) -> None:
        """Add a lexeme to the block, and end the block if it is whole."""

    @abstractmethod
    def _finish_block(self) -> None:
        """End the block, with the tail, at the end of the output."""

    def _num_held(self, text: str) -> int:
        return num_held(text, *self.tags)

    def _is_space(self, lexeme: str) -> bool:
        return lexeme[0] in SPACE

    def _opens(self, lexeme: str) -> bool:
        return lexeme == self.tags[0]

    def _read(self, text: str) -> None:
        for lexeme in self.lexeme.findall(text):
            if self._block:
                self._extend_block(lexeme)
            elif self._is_space(lexeme):
                self._space.append(lexeme)
            elif self._opens(lexeme):
                self._block = [lexeme]
            else:
                self._show(lexeme)

    def _show(self, text: str) -> None:
        self._content += [*self._space, text]
        self._space.clear()
        self._after_call = False

    def _end_block(self, call: ToolCall | None) -> None:
        """End the block with its call, or show it as text."""
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
    # Returns messages and tools as the family's chat templates read them, or raises ValueError. None: as they are.
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


def read_call(text: str) -> ToolCall | None:
    """Return the call in a JSON text, or None if there is none. Models mix up the keys "arguments" and "parameters"."""
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


def num_held(text: str, *tags: str) -> int:
    """Return the length of the end of `text` that may be the beginning of a tag."""
    start = text.rfind("<")
    is_held = start >= 0 and any(tag != text[start:] and tag.startswith(text[start:]) for tag in tags)
    return len(text) - start if is_held else 0
