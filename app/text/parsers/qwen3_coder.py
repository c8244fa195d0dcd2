"""Tool calls of Qwen3-Coder and Qwen3.5: Qwen3's tags around <function=NAME>, with text for each <parameter=KEY>.

The text has no escapes, and a line break at either end is not part of it. The types are in the tools' schemas. A text
may hold calls and tags of its own, and models leave end tags out, so a tag counts by its surroundings:

- </parameter> ends a text if a parameter, a call or an end tag follows.
- </function> and </tool_call> end a text, and the call, unless </parameter> follows.
- <parameter=KEY> ends a text if KEY is a parameter of the function that is still missing, or, for a function
  without parameters in its schema, if it begins a line.
- Tags that begin a line of the text open a block inside it, as does all in such a function. Its end tags are text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from app.text.parsers.base import SPACE, TEXT, CallFormat, CallParser, Json
from app.text.parsers.json_text import VALUE, JsonReader
from app.text.parsers.qwen3 import CALL, END_CALL

FUNCTION, PARAMETER, END_FUNCTION, END_PARAMETER = "<function=", "<parameter=", "</function>", "</parameter>"
_NAMED = r"<(?:function|parameter)=[^<>\n]{1,256}"
_BEGUN = re.compile(rf"(?:{FUNCTION}|{PARAMETER}|{_NAMED})\Z")
_ENDS = {CALL: END_CALL, FUNCTION: END_FUNCTION, PARAMETER: END_PARAMETER}
_MOST_PARTS = 1000  # of a schema that are looked at for its types
_MAX_INNER = 64  # blocks in each other in a text; more are text
_KINDS = {bool: "boolean", int: "integer number", float: "number", str: "", list: "array", dict: "object"}


class Qwen3CoderCalls(CallParser):
    """Parser of text into content and calls. The head of a call goes up to its first parameter, or its end.

    Models leave CALL out at times, so a function that is offered opens a call as well. Strings stream as they are
    written; other values come when they end, because their type decides what they are.
    """

    tags = (CALL, END_CALL, FUNCTION, PARAMETER, END_FUNCTION, END_PARAMETER)
    lexeme = re.compile(rf"{_NAMED}>|</?tool_call>|{END_FUNCTION}|{END_PARAMETER}|{TEXT}")

    def __init__(self, tools: Sequence[Json] = ()) -> None:
        super().__init__(tools)
        self._name = ""
        self._others: list[str] = []  # end tags to come of a call of a function that is not offered

    def _num_held(self, text: str) -> int:
        start = max(text.rfind("<"), 0)
        return len(text) - start if _BEGUN.match(text, start) else super()._num_held(text)

    def _show(self, text: str) -> None:
        if text == END_CALL and self._after_call:
            self._space.clear()
        else:
            super()._show(text)

    def _offered(self, lexeme: str) -> str:
        """Return the name of the offered function that the lexeme opens, or ""."""
        name = _name_in(lexeme, FUNCTION)
        return name if name in self._schemas else ""

    def _opens(self, lexeme: str) -> bool:
        self._name = _name_in(lexeme, FUNCTION)
        if self._others:
            self._follow_other(lexeme)
            return False
        return lexeme == CALL or self._name != ""

    def _follow_other(self, lexeme: str) -> None:
        """Follow the calls in the text of a call of a function that is not offered, up to its own end."""
        if (lexeme == CALL or self._name) and len(self._others) < _MAX_INNER:
            self._others.append(END_CALL if lexeme == CALL else END_FUNCTION)
        elif lexeme in self._others:
            del self._others[len(self._others) - 1 - self._others[::-1].index(lexeme) :]
        elif lexeme in (END_FUNCTION, END_CALL):
            self._others.clear()

    def _extend_head(self, lexeme: str) -> str:
        key = _name_in(lexeme, PARAMETER)
        is_head = self._name and (key or lexeme in (END_FUNCTION, END_CALL))
        if is_head and self._name in self._schemas:
            self._begin_call(self._name)
            self._schema = _object(self._schemas[self._name])
            self._keys: set[str] = set()  # of the parameters so far
            self._argue("{")
            self._begin_parameter(key)
        elif lexeme[0] in SPACE or (not self._name and _name_in(lexeme, FUNCTION)):
            self._name = self._name or _name_in(lexeme, FUNCTION)
            self._head.append(lexeme)
        else:
            self._others = [END_FUNCTION] if is_head else []
            self._give_back()
            return lexeme
        return ""

    def _begin_parameter(self, key: str) -> None:
        """Begin a parameter, or without one end the call."""
        if not key:
            self._argue("}")
            self._end_call(is_whole=True)
            return
        self._types = types_of(self._schema, key)
        self._is_string = self._types <= {"string"}
        self._argue((", " if self._keys else "") + json.dumps(key) + (': "' if self._is_string else ": "))
        self._keys.add(key)
        self._value: list[str] = []  # of other types
        self._is_empty = True
        self._line_break = ""  # maybe the last one
        self._begins_line = True
        self._inner: list[str] = []  # end tags of the blocks that are open in the text
        self._end = ""  # the last tag of those that may end the text
        self._held: list[str] = []  # these tags and the white space behind them

    def _extend_call(self, lexeme: str) -> str:
        """Read a lexeme of a parameter's text."""
        key = _name_in(lexeme, PARAMETER)
        if self._end:
            if lexeme[0] in SPACE or (self._end == END_FUNCTION and lexeme == END_CALL):
                self._hold(lexeme)
                return ""
            if self._end != END_PARAMETER and lexeme != END_PARAMETER:
                self._end_parameter("")
                self._space = ["".join(self._held).rpartition(">")[2]]
                return lexeme
            if self._end == END_PARAMETER and (key or lexeme in (END_FUNCTION, END_CALL)):
                self._end_parameter(key)
                return ""
            if self._end == END_PARAMETER and (lexeme == CALL or self._offered(lexeme)):
                self._end_parameter("")
                return lexeme
            held = "".join(self._held)
            self._held, self._end = [], ""
            self._begins_line = "\n" in held.rpartition(">")[2]
            self._write(held)
        if key and self._is_next(key):
            self._end_parameter(key)
        elif lexeme in _ENDS.values() and lexeme not in self._inner:
            self._hold(lexeme)
        else:
            self._follow(lexeme)
            self._write(lexeme)
        return ""

    def _hold(self, lexeme: str) -> None:
        self._held.append(lexeme)
        self._end = lexeme if lexeme[0] == "<" else self._end

    def _is_next(self, key: str) -> bool:
        """Return True if a tag in the text is the next parameter, although no end tag came before it."""
        if END_FUNCTION in self._inner:
            return False
        known = _object(self._schema.get("properties"))
        return key not in self._keys and (key in known if known else self._begins_line)

    def _follow(self, lexeme: str) -> None:
        """Follow the blocks in the text."""
        if lexeme[0] in SPACE:
            self._begins_line = self._begins_line or "\n" in lexeme
            return
        end = next((end for tag, end in _ENDS.items() if lexeme.startswith(tag)), "")
        is_tag = (end and (self._begins_line or END_FUNCTION in self._inner)) or lexeme in self._inner
        if is_tag and end and len(self._inner) < _MAX_INNER:
            self._inner.append(end)
        elif is_tag and not end:
            del self._inner[len(self._inner) - 1 - self._inner[::-1].index(lexeme) :]
        self._begins_line = bool(is_tag)

    def _write(self, text: str) -> None:
        """Add to the parameter's text, without a line break at either end."""
        if self._is_empty:
            text, self._is_empty = text.removeprefix("\n"), not text
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._is_string:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _end_parameter(self, next_key: str) -> None:
        self._end_value()
        self._begin_parameter(next_key)

    def _end_value(self) -> None:
        self._argue('"' if self._is_string else json_of("".join(self._value), self._types))

    def _finish_call(self, tail: str, is_cut: bool) -> None:
        # An output may end within the closing tag.
        is_tag = len(tail) > 2 - bool(self._end) and any(end.startswith(tail) for end in (END_FUNCTION, END_CALL))
        if is_tag or self._end in (END_FUNCTION, END_CALL) or (self._end and not is_cut):
            self._end_parameter("")
            return
        if self._end:
            self._end_value()
        else:
            self._write(tail)
            self._argue("".join(self._value))
        self._end_call(is_whole=False)


def json_of(text: str, types: set[str]) -> str:
    """Return a parameter's value as JSON: a string, unless the schema has other types and the text is JSON, or Python.

    In a union with strings, a value is a string unless it is JSON of one of the other types.
    """
    reader = JsonReader(VALUE)
    written, rest = reader.read(f"{text} ")  # The blank ends a number.
    if types - {"string"} and reader.is_whole and not rest.strip(SPACE):
        try:
            value = json.loads(written)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for half a surrogate pair
            if "string" not in types or types & {*_KINDS.get(type(value), "null").split()}:
                return written
        except ValueError:
            pass
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Json, key: str) -> set[str]:
    """Return the names of the types that a function's schema has for a parameter."""
    return _types(_object(schema.get("properties")).get(key), schema)


def _types(schema: Any, root: Json) -> set[str]:
    """Return the names of the types in all alternatives of a schema, whose definitions are in `root`."""
    definitions = [_object(root.get(name)) for name in ("definitions", "$defs")]
    types: set[str] = set()
    followed: set[str] = set()
    waiting = [schema]
    for _ in range(_MOST_PARTS):
        one = _object(waiting.pop())
        types |= {name for name in _list(one.get("type"))[:_MOST_PARTS] if isinstance(name, str)}
        for alternatives in ("anyOf", "oneOf", "allOf"):
            waiting += _list(one.get(alternatives, []))[: max(0, _MOST_PARTS - len(waiting))]
        ref = one.get("$ref")
        # A definition is followed once, because it may name itself.
        if isinstance(ref, str) and (name := ref.rpartition("/")[2]) not in followed:
            followed.add(name)
            waiting += [some[name] for some in definitions if name in some]
        if not waiting:
            break
    return types


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _name_in(lexeme: str, tag: str) -> str:
    """Return the name in a tag, or "" if the lexeme is not that tag."""
    return lexeme[len(tag) : -1] if lexeme.startswith(tag) else ""


def _fits(source: str) -> bool:
    return all(tag in source for tag in (CALL, FUNCTION, PARAMETER))


FORMAT = CallFormat(
    "qwen3_coder", Qwen3CoderCalls, (CALL, END_CALL), _fits, opening=f"{CALL}\n<function", around_name="={}>\n"
)
