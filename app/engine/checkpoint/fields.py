"""Values of a config.json, checked. Messages name the field, and `naming` puts the checkpoint before it."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app.engine.errors import UnsupportedError

Raw = Mapping[str, Any]


@contextmanager
def naming(checkpoint: str) -> Iterator[None]:
    """Put a checkpoint's role before the message of an UnsupportedError."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{checkpoint}: {error}") from None


def number(raw: Raw, field: str, default: float | None = None) -> float:
    """Return a positive number, or the default if the field is missing or null. Raises UnsupportedError."""
    value = default if raw.get(field) is None else raw[field]
    if value is None or type(value) not in (int, float) or not 0 < value < math.inf:
        raise _wrong(field, value, "a positive number")
    return float(value)


def positive(raw: Raw, field: str, default: int | None = None) -> int:
    """Return a whole number of at least 1, or the default if the field is missing or null. Raises UnsupportedError."""
    value = default if raw.get(field) is None else raw[field]
    if type(value) is not int or value < 1:
        raise _wrong(field, value, "a positive whole number")
    return value


def flag(raw: Raw, field: str) -> bool | None:
    """Return true or false, or None if the field is missing or null. Raises UnsupportedError."""
    value = raw.get(field)
    if value is not None and type(value) is not bool:
        raise _wrong(field, value, "true or false")
    return value


def fields(raw: Raw, field: str) -> dict[str, Any]:
    """Return the object of a field, empty if the field is missing or null. Raises UnsupportedError."""
    if not isinstance(value := raw.get(field) or {}, Mapping):
        raise _wrong(field, value, "an object")
    return dict(value)


def without(raw: Raw, names: Collection[str]) -> dict[str, Any]:
    """Return the fields whose names are not among these."""
    return {name: value for name, value in raw.items() if name not in names}


def only(raw: Raw, **supported: tuple[Any, ...]) -> None:
    """Raise UnsupportedError for a field whose value is not among the supported ones. Missing and null pass."""
    for field, values in supported.items():
        if raw.get(field) is not None and raw[field] not in values:
            choice = f"; supported: {', '.join(map(repr, values))}" if values else ""
            raise UnsupportedError(f"{field} = {raw[field]!r} is not supported yet{choice}")


def _wrong(field: str, value: Any, wanted: str) -> UnsupportedError:
    return UnsupportedError(f"{field} is missing" if value is None else f"{field} must be {wanted}, found {value!r}")
