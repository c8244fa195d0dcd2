"""Calls whose arguments are a JSON object, which streams as it is written."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from app.text.parsers.base import SPACE, CallParser, Json
from app.text.parsers.json_text import JsonReader


class JsonCalls(CallParser):
    """Parser of calls with arguments in JSON. Text that is no JSON is passed on in the arguments, up to a tag.

    `ends` are the tags that end a call. Without any it ends with its object.
    """

    ends: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        super().__init__(tools)
        self._arguments = JsonReader()

    def _begin_call(self, name: str) -> None:
        super()._begin_call(name)
        self._arguments = JsonReader()

    def _is_end(self, lexeme: str) -> bool:
        return lexeme in self.tags and not self._arguments.in_string

    def _extend_call(self, lexeme: str) -> str:
        if self._arguments.is_whole:
            return self._extend_rest(lexeme)
        if self._is_end(lexeme):
            self._argue(self._arguments.pending)
            self._end_unfinished(is_cut=False)
            return "" if lexeme in self.ends else lexeme
        read, rest = self._arguments.read(lexeme)
        self._argue(read)
        if not self._arguments.is_broken:
            return rest
        self._space.append(rest)
        if rest.strip(SPACE):
            self._argue("".join(self._space))
            self._space.clear()
        return ""

    def _extend_rest(self, lexeme: str) -> str:
        """Read a lexeme behind the arguments."""
        if lexeme[0] in SPACE:
            return ""
        self._end_call(is_whole=True)
        return "" if lexeme in self.ends else lexeme

    def _end_unfinished(self, is_cut: bool) -> None:
        """End a call before the end of its arguments."""
        self._end_call(is_whole=False)

    def _finish_call(self, tail: str, is_cut: bool) -> None:
        if not self._arguments.in_string and any(end.startswith(tail) for end in self.ends):
            tail = ""  # An output may end within the closing tag.
        if self._arguments.is_whole:
            self._end_call(is_whole=True)
            self._read(tail)
        else:
            self._argue(self._arguments.pending + tail)
            self._end_unfinished(is_cut or tail != "")


class JsonObjectCalls(JsonCalls):
    """Parser of calls that are JSON objects with a "name" and "arguments". Models mix these up with "parameters"."""

    _is_other = False  # within the object of a call of a function that is not offered

    def _take(self, lexeme: str) -> str:
        if self._is_other and not self._is_space(lexeme):
            rest = self._object.read(lexeme)[1]
            self._is_other = not (self._object.is_whole or self._object.is_broken)
            if not self._object.is_broken:
                self._show(lexeme.removesuffix(rest))
                return rest
        return super()._take(lexeme)

    def _begin_head(self, lexeme: str) -> None:
        super()._begin_head(lexeme)
        self._object = JsonReader(stops=True)
        self._object_text = [self._object.read(lexeme)[0]] if lexeme == "{" else []
        self._is_open = True  # until its first object inside

    def _is_end(self, lexeme: str) -> bool:
        return super()._is_end(lexeme) and not self._object.in_string

    def _extend_head(self, lexeme: str) -> str:
        read, rest = self._object.read(lexeme)
        self._object_text.append(read)
        if self._object.is_broken:
            self._give_back()
            return lexeme
        self._head.append(lexeme.removesuffix(rest))
        if self._object.is_whole:
            self._read_object()
        elif self._object.has_stopped and self._is_open:
            self._is_open = False
            name = self._name_before_arguments()
            if name in self._schemas:
                self._begin_call(name)
                self._object.read("}")  # The arguments have a reader of their own.
                return "{" + rest
            if name:
                self._give_back()
                self._is_other = True
        return rest

    def _name_before_arguments(self) -> str:
        """Return the name of the call if its object ends where the arguments begin, or ""."""
        begun = _object("".join(self._object_text) + "}}")
        name = begun.get("name")
        return name if isinstance(name, str) and next(reversed(begun)) in ("arguments", "parameters") else ""

    def _read_object(self) -> None:
        """Read an object that has all of a call, in another order or without arguments."""
        call = _object("".join(self._object_text))
        arguments = call.get("arguments", call.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        reader = JsonReader()
        written, rest = reader.read(text)
        name = call.get("name")
        if not (isinstance(name, str) and name in self._schemas and reader.is_whole and not rest.strip(SPACE)):
            self._give_back()
            return
        self._begin_call(name)
        self._arguments = reader
        self._argue(written)
        if not self.ends:
            self._end_call(is_whole=True)

    def _extend_rest(self, lexeme: str) -> str:
        rest = lexeme if self._is_end(lexeme) else self._object.read(lexeme)[1]
        if rest == lexeme:
            return super()._extend_rest(lexeme)
        if self._object.is_whole and not self.ends:
            self._end_call(is_whole=True)
        return rest


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
