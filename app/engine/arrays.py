"""Records of arrays: NumPy's on the host, and tensors on the device under the same names. No torch."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

A = TypeVar("A")
R = TypeVar("R")
Ints = NDArray[np.int32]
Array = NDArray[Any]


def arrays(record: Any) -> dict[str, Array]:
    """Return the arrays of a record, or of a list of records, by name. Arrays of nested records have dotted names."""
    by_name: dict[str, Array] = {}
    with_arrays(record, by_name.setdefault)
    return by_name


def with_arrays(record: R, other: Callable[[str, Any], Any], prefix: str = "") -> R:
    """Return the record with each array replaced by `other(name, array)`, with names as in `arrays`.

    Records are dataclasses with slots, and other fields are kept.
    """
    if isinstance(record, list):
        return [with_arrays(item, other, f"{prefix}{number}.") for number, item in enumerate(record)]  # type: ignore
    fields: dict[str, Any] = {}
    for name in record.__slots__:  # type: ignore[attr-defined]
        value = getattr(record, name)
        if hasattr(value, "dtype"):
            value = other(prefix + name, value)
        elif hasattr(value[0] if isinstance(value, list) and value else value, "__dataclass_fields__"):
            value = with_arrays(value, other, f"{prefix}{name}.")
        fields[name] = value
    return type(record)(**fields)
