"""Values of a config.json, checked. Messages name the field, and `naming` puts the checkpoint before it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.engine.errors import UnsupportedError

Raw = Mapping[str, Any]

MOST = 1 << 24
"""Largest whole number of a field, also of a context: positions and token ids are int32. A file that says more is
damaged or hostile, and is refused before something of that size is made."""
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "num_target_layers", "block_size", "selector_top_k"), 1024),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1024),
    **{f"linear_num_{kind}_heads": 1024 for kind in ("key", "value")},
    **{f"linear_{kind}_head_dim": 1024 for kind in ("key", "value")},
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "num_experts_per_tok", "selector_rank", "markov_rank"), 1 << 16
    ),
    "sliding_window": 1 << 30,  # some files say so of a layer without one
}
_MAX_MESSAGE = 2000
_LEAST, _LARGEST = 1e-12, 1e12  # float32 holds products and powers of these


@contextmanager
def naming(checkpoint: str) -> Iterator[None]:
    """Put a checkpoint's role before the message of an UnsupportedError, and leave out the middle of a long one."""
    try:
        yield
    except UnsupportedError as error:
        text = str(error)
        if len(text) > _MAX_MESSAGE:
            text = f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
        raise UnsupportedError(f"{checkpoint}: {text}") from None


def number(raw: Raw, field: str, default: float | None = None) -> float:
    """Return a positive number, or the default if the field is missing or null. Raises UnsupportedError."""
    value = default if raw.get(field) is None else raw[field]
    if value is None or type(value) not in (int, float) or not _LEAST <= value <= _LARGEST:
        raise _wrong(field, value, f"a positive number, from {_LEAST:g} to {_LARGEST:g}")
    return float(value)


def positive(raw: Raw, field: str, default: int | None = None) -> int:
    """Return a whole number of at least 1, or the default if the field is missing or null. Raises UnsupportedError,
    also for one that no model has."""
    value, most = default if raw.get(field) is None else raw[field], _MOST_OF.get(field, MOST)
    if type(value) is not int or not 1 <= value <= most:
        raise _wrong(field, value, f"a positive whole number, at most {most}")
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


def file_below(folder: Path, name: Any) -> Path | None:
    """Return the file that a JSON file names below `folder`, or None if it is missing or elsewhere."""
    if isinstance(name, str) and ".." not in Path(name).parts and not Path(name).is_absolute():
        with suppress(OSError):  # for a name that is too long
            if (file := folder / name).is_file():
                return file
    return None


def _wrong(field: str, value: Any, wanted: str) -> UnsupportedError:
    return UnsupportedError(f"{field} is missing" if value is None else f"{field} must be {wanted}, found {value!r}")
