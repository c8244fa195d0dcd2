"""Calls of rank 0 that every rank repeats. Only rank 0 decides, and it sends each step before running it.

Messages are msgspec, with NumPy arrays as their bytes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep, Tell

_ARRAY = 1
"""Code of an array among msgpack's extensions."""
_QUIET_MS = 100
"""Silence after which rank 0 waits or is idle, so reading a step delays no step that is launched ahead."""


class Message(NamedTuple):
    """A call that all ranks make: launch a step, or scrub slots. `number` counts from 0 without gaps."""

    number: int
    argument: StepInputs | list[list[int]]


def encode(message: Message) -> bytes:
    def extension(array: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes())))

    return msgspec.msgpack.encode(message, enc_hook=extension)


def _array(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)  # writable, as tensors are


decode = msgspec.msgpack.Decoder(Message, ext_hook=_array).decode
"""Return the Message that was encoded."""


def teller(send: Callable[[bytes], None]) -> Tell:
    """Return the function that rank 0 calls before each step and each scrub."""
    num_sent = 0

    def tell(argument: StepInputs | list[list[int]]) -> None:
        nonlocal num_sent
        if isinstance(argument, StepInputs) and argument.sampling:  # rank 0 draws, so only it counts tokens
            argument = replace(argument, sampling=[replace(rows, penalties=None) for rows in argument.sampling])
        send(encode(Message(num_sent, argument)))
        num_sent += 1

    return tell


def follow(runner: ModelRunner, receive: Callable[[int | None], bytes | None]) -> None:
    """Repeat the calls of rank 0 until `receive` or a step raises an error.

    `receive` waits that many milliseconds for a message, forever if None, and returns None on a timeout. Then the last
    step is read: a device may report its error only there, and rank 0 would wait for this rank in vain.
    """
    expected = 0
    unread: PendingStep | None = None
    try:
        while True:
            message = receive(_QUIET_MS if unread else None)
            if message is None:
                assert unread
                unread.read()
                unread = None
                continue
            number, argument = decode(message)
            if number != expected:
                raise RuntimeError(f"message {number} of rank 0 came instead of message {expected}")
            expected += 1
            if isinstance(argument, StepInputs):
                unread = runner.launch(argument)
            else:
                runner.scrub(argument)
    except Exception as error:
        runner.backend.annotate(error)
        raise
