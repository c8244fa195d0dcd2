"""Tool calls of Qwen3-Coder and Qwen3.5: Qwen3's tags around <function=NAME>, with text for each <parameter=KEY>.

The text has no escapes, and a line break at either end is not part of it. It ends at the </parameter> that is followed
by another parameter or the end of the function. A <parameter=KEY> that begins a line of the text takes the next
</parameter>, so that a text may hold whole calls. The types are in the tools' schemas.
"""

import json
import re
from typing import Any

from app.text.parsers.base import SPACE, TEXT, CallFormat, CallParser, Json, ToolCall
from app.text.parsers.qwen3 import CALL, END_CALL

FUNCTION, PARAMETER, END_FUNCTION, END_PARAMETER = "<function=", "<parameter=", "</function>", "</parameter>"
_NAMED = r"<(?:function|parameter)=[^<>\n]{1,256}"
_BEGUN = re.compile(rf"(?:{FUNCTION}|{PARAMETER}|{_NAMED})\Z")
_PYTHON: Json = {"True": True, "False": False, "None": None}
"""Values as some templates write them, and models after them."""
_MOST_PARTS = 1000  # of a schema that are looked at for its types
_KINDS = {bool: "boolean", int: "integer number", float: "number", str: "", list: "array", dict: "object"}


class Qwen3CoderCalls(CallParser):
    """Parser of content into text and calls. A call ends with its function.

    Models leave CALL out at times, so a function that is offered opens a block as well.
    """

    tags = (CALL, END_CALL, FUNCTION, PARAMETER, END_FUNCTION, END_PARAMETER)
    lexeme = re.compile(rf"{_NAMED}>|</?tool_call>|{END_FUNCTION}|{END_PARAMETER}|{TEXT}")

    def _num_held(self, text: str) -> int:
        start = max(text.rfind("<"), 0)
        return len(text) - start if _BEGUN.match(text, start) else super()._num_held(text)

    def _show(self, text: str) -> None:
        if text == END_CALL and self._after_call:
            self._space.clear()
        else:
            super()._show(text)

    def _opens(self, lexeme: str) -> bool:
        name = _name_in(lexeme, FUNCTION)
        self._name = name if name in self._schemas else ""
        self._key = ""
        self._start = self._end = 0  # of the key's text in the block, 0 before they are known
        self._depth = 0  # of parameters in the text
        self._arguments: dict[str, str] = {}
        return lexeme == CALL or self._name != ""

    def _extend_block(self, lexeme: str) -> None:
        key = _name_in(lexeme, PARAMETER)
        if lexeme[0] in SPACE:
            self._block.append(lexeme)
        elif self._name and (self._end or not self._start) and (key or lexeme in (END_FUNCTION, END_CALL)):
            self._end_parameter(lexeme, key)
        elif self._start:
            self._extend_text(lexeme, key)
        elif not self._name and (name := _name_in(lexeme, FUNCTION)):
            self._name = name
            self._block.append(lexeme)
        else:
            self._end_block(None)
            self._read(lexeme)

    def _end_parameter(self, lexeme: str, next_key: str) -> None:
        """End the parameter before this lexeme, and without a next one the call."""
        if self._start:
            text = "".join(self._block[self._start : self._end]).removeprefix("\n").removesuffix("\n")
            self._arguments[self._key] = json_of(text, self._schemas.get(self._name), self._key)
        self._block.append(lexeme)
        self._key, self._start, self._end = next_key, len(self._block), 0
        if not next_key:
            written = ", ".join(f"{json.dumps(key)}: {value}" for key, value in self._arguments.items())
            self._end_block(ToolCall(self._name, f"{{{written}}}"))

    def _extend_text(self, lexeme: str, key: str) -> None:
        self._end = 0  # A closing tag before this was text.
        if lexeme == END_PARAMETER and self._depth:
            self._depth -= 1
        elif lexeme == END_PARAMETER:
            self._end = len(self._block)
        elif key and self._block[-1].endswith("\n"):
            self._depth += 1
        self._block.append(lexeme)

    def _finish_block(self) -> None:
        may_end = self._name and (self._end or not self._start)
        if may_end and len(self._tail) > 1 and END_FUNCTION.startswith(self._tail):
            self._end_parameter(self._tail, "")  # An output that ends within the closing tag has the whole call.
        else:
            self._block.append(self._tail)
            self._end_block(None)


def json_of(text: str, schema: Any, key: str) -> str:
    """Return a parameter's value as JSON: a string, unless the function's schema has other types and the text is JSON.

    In a union with strings, a value is a string unless it is JSON of one of the other types.
    """
    types = _types(_object(_object(schema).get("properties")).get(key), _object(schema))
    if types - {"string"}:
        try:
            value = _PYTHON[text] if text in _PYTHON else json.loads(text)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()  # Raises UnicodeEncodeError for half a surrogate pair.
            if "string" not in types or types & {*_KINDS.get(type(value), "null").split()}:
                return written if text in _PYTHON else text.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


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
