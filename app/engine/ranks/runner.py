"""The calls of rank 0 that all ranks of a model make. Rank 0 decides alone, and sends each step before it runs."""

from collections.abc import Callable
from dataclasses import replace

from app.engine.ranks.messages import Message, decode, encode
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep, Tell

_QUIET_MS = 100
"""Time without a message. Then rank 0 waits for a step or is idle, and a read does not hold up a step that is launched
ahead."""


def teller(send: Callable[[bytes], None]) -> Tell:
    """Return what a runner of rank 0 calls before each step and each scrub."""
    num_sent = 0

    def tell(argument: StepInputs | list[int]) -> None:
        nonlocal num_sent
        if isinstance(argument, StepInputs) and argument.sampling:  # rank 0 draws, so only it counts tokens
            argument = replace(argument, sampling=[replace(rows, counted=[]) for rows in argument.sampling])
        send(encode(Message(num_sent, argument)))
        num_sent += 1

    return tell


def follow(runner: ModelRunner, receive: Callable[[int | None], bytes | None]) -> None:
    """Make the calls of rank 0, until `receive` or a step raises an error.

    `receive` waits some milliseconds for a message, or for ever if that is None. It returns None if none has come. Then
    the last step is read, because a device may tell its error there alone, while rank 0 waits for this rank.
    """
    try:
        _follow(runner, receive)
    except Exception as error:
        runner.backend.annotate(error)
        raise


def _follow(runner: ModelRunner, receive: Callable[[int | None], bytes | None]) -> None:
    expected = 0
    unread: PendingStep | None = None
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
