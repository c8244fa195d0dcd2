"""Messages of rank 0 to the other ranks: msgspec, with NumPy arrays as their bytes."""

from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.engine.sampling.columns import SamplingRows
from app.engine.step.inputs import DraftInputs, RecurrentInputs, RowGroup, StepInputs, TargetInputs

_ARRAY = 1
"""Code of an array among msgpack's extensions."""


class Message(NamedTuple):
    """Call that all ranks make: the launch of a step, or the scrub of slots. Numbers count from 0, without gaps."""

    number: int
    argument: StepInputs | list[int]


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_extension)


def decode(data: bytes) -> Message:
    """Return a message. Its arrays cannot be written to."""
    number, argument = msgspec.msgpack.decode(data, ext_hook=_array)
    return Message(number, _step(argument) if isinstance(argument, dict) else argument)


def _step(fields: dict[str, Any]) -> StepInputs:
    target, draft = fields["target"], fields["draft"]
    groups = [RowGroup(**group) for group in target.pop("groups")]
    recurrent = target.pop("recurrent")
    return StepInputs(
        target=TargetInputs(**target, groups=groups, recurrent=recurrent and RecurrentInputs(**recurrent)),
        draft=draft and DraftInputs(group=RowGroup(**draft.pop("group")), **draft),
        sampling=[SamplingRows(**rows) for rows in fields["sampling"]],
        sequence_keys=[tuple(key) for key in fields["sequence_keys"]],
        has_prefill=fields["has_prefill"],
    )


def _extension(array: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes())))


def _array(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, dtype=dtype).reshape(shape)
