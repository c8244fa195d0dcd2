"""The calls of rank 0 that all ranks of a model make. Only rank 0 decides, and sends each step before it runs.

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
"""Time without a message after which rank 0 waits or is idle, so a read holds up no step that is launched ahead."""


class Message(NamedTuple):
    """Call that all ranks make: the launch of a step, or the scrub of slots. Numbers count from 0, without gaps."""

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
"""Return the message of some bytes."""


def teller(send: Callable[[bytes], None]) -> Tell:
    """Return what a runner of rank 0 calls before each step and each scrub."""
    num_sent = 0

    def tell(argument: StepInputs | list[list[int]]) -> None:
        nonlocal num_sent
        if isinstance(argument, StepInputs) and argument.sampling:  # rank 0 draws, so only it counts tokens
            argument = replace(argument, sampling=[replace(rows, penalties=None) for rows in argument.sampling])
        send(encode(Message(num_sent, argument)))
        num_sent += 1

    return tell


def follow(runner: ModelRunner, receive: Callable[[int | None], bytes | None]) -> None:
    """Make the calls of rank 0, until `receive` or a step raises an error.

    `receive` waits some milliseconds for a message, or for ever if that is None, and returns None if none has come.
    Then the last step is read, because a device may report its error only there, while rank 0 waits for this rank.
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
                raise RuntimeError(f"message {number} of rank 0 came in the place of message {expected}")
            expected += 1
            if isinstance(argument, StepInputs):
                unread = runner.launch(argument)
            else:
                runner.scrub(argument)
    except Exception as error:
        runner.backend.annotate(error)
        raise
