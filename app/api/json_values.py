"""Strict JSON, with a bound on its values.

A parser in C holds the interpreter, and with it the event loop, until it has read all of a text. The bound keeps that
short, whatever the text.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_VALUES = 2**18
MAX_ITEMS = 2**20 + 2**14
"""Of a prompt of 2**20 token ids, and of what stands beside it."""

sys.set_int_max_str_digits(640)  # A number takes a time that grows with its square. Python allows no less.
_NOT_COUNTED = bytes(set(range(256)) - set(b"[{.eEn"))  # `true` and `false` have one e, and `null` an n.


class TooManyValues(ValueError):
    """A JSON text with more values than are read. The argument says which."""


@dataclass
class ValueCount:
    """Count of the values in a JSON text that comes in chunks, or of several texts one after another.

    Strings, keys, objects, lists, literals and fractions are `num_values`. Whatever follows a comma is in `num_items`
    too, whose limit is higher, because prompts of token ids are long and cheap.
    """

    num_values: int = 0
    num_items: int = 0
    _num_quotes: int = 0
    _rest: bytes = b""

    def add(self, chunk: bytes) -> None:
        """Count the values of the next chunk. Raises TooManyValues."""
        chunk = self._rest + chunk
        num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
        self._rest = b"\\" * (num_backslashes % 2)  # It escapes the first letter of the next chunk.
        parts = chunk.removesuffix(self._rest).replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._num_quotes % 2 :: 2])
        self.num_values += len(outside.translate(None, _NOT_COUNTED)) + (len(parts) - 1 + self._num_quotes % 2) // 2
        self.num_items += outside.count(b",")
        self._num_quotes += len(parts) - 1
        if self.num_values > MAX_VALUES:
            raise TooManyValues(f"more than {MAX_VALUES:,} keys, strings, objects, lists and other values")
        if self.num_items > MAX_ITEMS:
            raise TooManyValues(f"more than {MAX_ITEMS:,} items")


def loads(text: str, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the objects of strict JSON (RFC 8259).

    Raises RecursionError, json.JSONDecodeError, UnicodeEncodeError for half a surrogate pair, and another ValueError
    for a number that is too large, NaN or Infinity.
    """
    value = json.loads(text, object_pairs_hook=object_pairs_hook, parse_float=_finite, parse_constant=_finite)
    if re.search(r"\\u[dD][89a-fA-F]", text):
        _check_characters(value)
    return value


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError
    return value


def _check_characters(value: Any) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            one.encode()
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
