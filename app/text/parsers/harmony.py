"""Harmony, the format of gpt-oss: messages on channels. Analysis is reasoning, commentary to a function a call."""

import re
from enum import Enum, auto

from app.text.parsers.base import TEXT, CallFormat, Json, num_held
from app.text.parsers.json_calls import JsonCalls

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
_ENDS = END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_OPENING = f"{CHANNEL}commentary to=functions."
_TO = "to="
_HEADERS = (CHANNEL, START, MESSAGE, _TO)
_END = re.compile("|".join(map(re.escape, (*_ENDS, START))))
_MAX_HEADER = 512
"""Characters before MESSAGE. More are no header: they are shown, and each piece is not searched with all before it."""


class _Kind(Enum):
    HEADER = auto()
    REASONING = auto()
    CALL = auto()
    CONTENT = auto()


class HarmonyReasoning:
    """ReasoningParser of harmony: splits messages into reasoning and content.

    Marks and headers are dropped, except for a call's, which the content keeps. An empty line separates messages of
    one kind. An output without a header is content: it continues a message that the prompt has begun. So is text that
    is too long for a header.
    """

    def __init__(self, starts_in_reasoning: bool = False) -> None:
        self._kind = _Kind.HEADER
        self._tail = ""  # a header, or maybe the beginning of a mark
        self._space: list[str] = []  # before the first header, or the beginning of an output without one
        self._is_first = True
        self._said: set[_Kind] = set()
        self._gap = ""  # comes before the next text of this message
        self.has_reasoned = False
        self._has_content = False

    @property
    def is_before_content(self) -> bool:
        """True until content or a call has begun."""
        return not self._has_content

    @property
    def begins_content(self) -> bool:
        return not self._has_content

    def quotes(self, space: str) -> bool:
        """Return False: a mark is a token of its own, which no text spells."""
        return False

    def push(self, text: str) -> tuple[str, str]:
        """Return the certain reasoning and the certain content of this piece."""
        text, self._tail = self._tail + text, ""
        shown: dict[_Kind, list[str]] = {_Kind.REASONING: [], _Kind.CONTENT: []}
        while text:
            if self._kind is _Kind.HEADER:
                text = self._read_header(text, shown[_Kind.CONTENT])
            else:
                text = self._read_body(text, shown)
        return "".join(shown[_Kind.REASONING]), "".join(shown[_Kind.CONTENT])

    def end(self) -> tuple[str, str]:
        """Return the held text before a call, whose message HarmonyCalls has read. A header comes next."""
        held = self.finish()
        self._space.clear()
        self._kind, self._is_first, self._has_content = _Kind.HEADER, False, True
        return held

    def finish(self) -> tuple[str, str]:
        """Return the held reasoning and content at the end of the output. A header without a message is dropped."""
        text, self._tail = self._tail, ""
        if self._kind is _Kind.HEADER:
            return "", "" if text.startswith((CHANNEL, START)) else "".join(self._space) + text
        text = self._parted(text)
        return (text, "") if self._kind is _Kind.REASONING else ("", text)

    def _read_header(self, text: str, content: list[str]) -> str:
        """Read up to the message. Return the rest of the text."""
        first = text.lstrip()
        if self._is_first:
            self._space.append(text[: len(text) - len(first)])
        end = first.find(MESSAGE, 0, _MAX_HEADER + len(MESSAGE))
        is_header = not self._is_first or any(first.startswith(h) or h.startswith(first) for h in _HEADERS)
        if not is_header or (end < 0 and len(first) >= _MAX_HEADER + len(MESSAGE)):
            self._begin(_Kind.CONTENT)
            space = "".join(self._space)
            self._space.clear()
            return space + first
        if end < 0:
            self._tail = first
            return ""
        self._space.clear()
        header, rest = first[:end], first[end + len(MESSAGE) :]
        recipient = _RECIPIENT.search(header)
        if recipient:
            self._begin(_Kind.CALL)
            content.append(f"{_OPENING}{recipient[1]}{MESSAGE}")
        else:
            channel = header.partition(CHANNEL)[2].lstrip()
            self._begin(_Kind.REASONING if channel.startswith("analysis") else _Kind.CONTENT)
        return rest

    def _begin(self, kind: _Kind) -> None:
        self._kind, self._is_first = kind, False
        self.has_reasoned |= kind is _Kind.REASONING
        self._has_content |= kind is not _Kind.REASONING
        self._gap = "\n\n" if kind in self._said else ""

    def _parted(self, text: str) -> str:
        """Return text of this message, after an empty line if another of its kind came before."""
        if not text or self._kind is _Kind.CALL:
            return text
        gap, self._gap = self._gap, ""
        self._said.add(self._kind)
        return gap + text

    def _read_body(self, text: str, shown: dict[_Kind, list[str]]) -> str:
        """Read up to the end of the message, or to what may become one. Return the rest of the text."""
        to = shown[_Kind.REASONING if self._kind is _Kind.REASONING else _Kind.CONTENT]
        end = _END.search(text)
        if end is None:
            cut = len(text) - num_held(text, *_ENDS, START)
            to.append(self._parted(text[:cut]))
            self._tail = text[cut:]
            return ""
        to.append(self._parted(text[: end.start()]))
        if self._kind is _Kind.CALL:
            to.append(CALL)
        self._kind = _Kind.HEADER
        return text[end.end() :]


class HarmonyCalls(JsonCalls):
    """Parser of an output into calls and the messages around them, which HarmonyReasoning reads.

    A call is a message whose header names a function. The prompt ends with the beginning of the first header.
    """

    tags = (CHANNEL, MESSAGE, START, CONSTRAIN, *_ENDS)
    ends = _ENDS
    lexeme = re.compile(f"{'|'.join(map(re.escape, tags))}|{TEXT}")

    def _opens(self, lexeme: str) -> bool:
        return lexeme in (START, CHANNEL) or (self._is_first and _TO.startswith(lexeme[: len(_TO)]))

    def _extend_head(self, lexeme: str) -> str:
        header = "".join(self._head)
        is_header = header.startswith((START, CHANNEL)) or _TO.startswith((header + lexeme)[: len(_TO)])
        is_over = lexeme in (START, *_ENDS) or (lexeme == CHANNEL and CHANNEL in header)
        if is_over or not is_header or len(header) > _MAX_HEADER:
            self._give_back()
            return lexeme
        self._head.append(lexeme)
        if lexeme == MESSAGE:
            recipient = _RECIPIENT.search(header)
            if recipient and recipient[1] in self._schemas:
                self._begin_call(recipient[1])
            else:
                self._give_back()
        return ""

    def _is_end(self, lexeme: str) -> bool:
        return lexeme in (START, CHANNEL, *_ENDS)

    def _end_unfinished(self, is_cut: bool) -> None:
        """End a call without any arguments, which is whole, or in the middle of them."""
        is_whole = not self._arguments.has_begun and not is_cut
        self._argue("{}" if is_whole else "")
        self._end_call(is_whole)


def for_template(messages: list[Json], tools: list[Json] | None) -> tuple[list[Json], list[Json] | None]:
    """Return messages and tools as gpt-oss's chat template reads them, because it would drop some of what they say.

    Reasoning is `thinking`. A message with calls has only that, with its content in it. Each function has a
    description.
    """
    read: list[Json] = []
    for message in messages:
        thinking = [message[key] for key in ("reasoning_content", "content") if message.get(key)]
        if message.get("tool_calls"):
            read.append(message | {"thinking": "\n\n".join(thinking), "content": ""})
        elif "reasoning_content" in message:
            read.append(message | {"thinking": message["reasoning_content"]})
        else:
            read.append(message)
    return read, tools and [tool | {"function": {"description": ""} | tool["function"]} for tool in tools]


def fits(source: str) -> bool:
    """Return True for a chat template that writes messages on channels."""
    return CHANNEL in source and START in source and MESSAGE in source


FORMAT = CallFormat(
    "harmony",
    HarmonyCalls,
    (CHANNEL, MESSAGE, START, CONSTRAIN, *_ENDS),
    fits,
    opening=_OPENING,
    key="arguments",
    around_name=f"{{}} {CONSTRAIN}json{MESSAGE}",
    for_template=for_template,
)
