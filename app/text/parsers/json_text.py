"""JSON as models write it, read in pieces."""

import json
import re

from app.text.parsers.base import SPACE

VALUE = '{["w'
"""Tokens that begin a value. A w is a number or a literal."""
MAX_DEPTH = 64  # of objects and lists, as in the arguments that a conversation may have
_OUTSIDE = re.compile(r"[ \t\r\n]+|[{}\[\],:\"']|[-+.\w]+", re.ASCII)
_INSIDE = re.compile(r"[^\"'\\\x00-\x1f]+|[\"'\x00-\x1f]|\\(?:[\"'\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})")
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?\Z")
_WORD = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class JsonReader:
    """Reader of one JSON value, which begins with one of the tokens `first`.

    Models mix in Python: single quotes, True, False, None, a comma behind the last item, and line breaks in strings.
    These are read as the JSON that is meant. All else is strict, and nothing is evaluated. With `stops` the reading
    stops once, behind the bracket of the first object inside.
    """

    def __init__(self, first: str = "{", *, stops: bool = False) -> None:
        self._next = first  # tokens that may follow
        self._open: list[str] = []  # brackets
        self._quote = ""  # of the string that is being read
        self._word: list[str] = []  # pieces of a number or a literal
        self._comma = ""  # with the white space behind it, until it is known to be needed
        self._tail = ""  # an escape that may go on
        self._stops = stops
        self.has_stopped = self.is_whole = self.is_broken = False

    @property
    def has_begun(self) -> bool:
        return bool(self._open) or self.is_whole or self.is_broken

    @property
    def in_string(self) -> bool:
        return self._quote != ""

    @property
    def pending(self) -> str:
        """The text that was read and not returned yet."""
        return self._comma + "".join(self._word) + self._tail

    def read(self, text: str) -> tuple[str, str]:
        """Return what is certain of the value, as JSON, and the rest: what follows the value, or is no JSON."""
        text, self._tail = self._tail + text, ""
        read: list[str] = []
        at = 0
        while at < len(text) and not (self.is_whole or self.is_broken):
            found = (_INSIDE if self._quote else _OUTSIDE).match(text, at)
            if found is None and self._quote and _CUT_ESCAPE.match(text, at):
                self._tail = text[at:]
                return "".join(read), ""
            lexeme = found[0] if found else ""
            if not self._quote and lexeme[:1] not in "{}[],:\"'" + SPACE and (self._word or "w" in self._next):
                read.append(self._take_comma())
                self._word.append(lexeme)
                at += len(lexeme)
                continue
            if self._word:
                read.append(self._end_word())
                continue
            taken = self._take(lexeme) if lexeme else None
            if taken is None:
                self.is_broken, self._quote = True, ""
                read.append(self._take_comma())
                break
            read.append(taken)
            at += len(lexeme)
            if self._stops and lexeme == "{" and len(self._open) == 2:
                self._stops, self.has_stopped = False, True
                break
        return "".join(read), text[at:]

    def _take(self, lexeme: str) -> str | None:
        """Return a lexeme as JSON, or None if it cannot follow."""
        if self._quote:
            return self._take_in_string(lexeme)
        if lexeme[0] in SPACE and self._comma:
            self._comma += lexeme
            return ""
        if lexeme[0] in SPACE:
            return lexeme if self._open else ""
        token = '"' if lexeme == "'" else lexeme
        if token not in self._next or (token in "{[" and len(self._open) == MAX_DEPTH):
            return None
        match token:
            case "{" | "[":
                self._open.append(token)
                self._next = '"}' if token == "{" else f"{VALUE}]"
            case "}" | "]":
                self._open.pop()
                self._end_value()
                return self._take_comma()[1:] + token
            case ":":
                self._next = VALUE
            case ",":
                self._comma = ","
                self._next = '"}' if self._open[-1] == "{" else f"{VALUE}]"
                return ""
            case _:
                self._quote = lexeme
        return self._take_comma() + token

    def _take_comma(self) -> str:
        comma, self._comma = self._comma, ""
        return comma

    def _take_in_string(self, lexeme: str) -> str:
        if lexeme == self._quote:
            self._quote = ""
            if "w" in self._next:
                self._end_value()
            else:
                self._next = ":"  # It was a key.
            return '"'
        if lexeme == '"' or lexeme < " ":
            return json.dumps(lexeme)[1:-1]
        if lexeme == "\\'":
            return "'"
        return f"\\u00{lexeme[2:]}" if lexeme.startswith("\\x") else lexeme

    def _end_word(self) -> str:
        written = "".join(self._word)
        word = _PYTHON.get(written, written)
        self._word.clear()
        self.is_broken = not _WORD.fullmatch(word)
        self._end_value()
        return word

    def _end_value(self) -> None:
        self.is_whole = not self._open and not self.is_broken
        self._next = "" if not self._open else ",}" if self._open[-1] == "{" else ",]"
