"""Numbers of a config.json, checked."""

import math
from collections.abc import Mapping
from typing import Any

from app.engine.errors import UnsupportedError


def number(raw: Mapping[str, Any], field: str, default: float, where: str) -> float:
    """Return a positive number, or the default if the field is missing or null. Raises UnsupportedError."""
    value = raw.get(field)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UnsupportedError(f"{where}: {field} must be a positive number, found {value!r}")
    return float(value)


def positive(raw: Mapping[str, Any], field: str, where: str, default: int | None = None) -> int:
    """Return a whole number of at least 1, or the default if the field is missing or null. Raises UnsupportedError."""
    value = raw.get(field)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise UnsupportedError(f"{where}: {field} must be a positive number, found {value!r}")
    return value
