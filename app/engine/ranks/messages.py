"""Messages of rank 0 to the other ranks: msgspec, with NumPy arrays as their bytes."""

from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.engine.step.inputs import StepInputs

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
    return _DECODER.decode(data)


def _extension(array: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes())))


def _array(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, dtype=dtype).reshape(shape)


_DECODER = msgspec.msgpack.Decoder(Message, ext_hook=_array)
