"""Runners of the ranks that share one model. Rank 0 alone decides, and sends each step before it runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.engine.ranks.messages import Message, decode, encode
from app.engine.step.graph_runner import GraphRunner
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep

_QUIET_MS = 100
"""Time without a message. Then rank 0 waits for a step or is idle, and a read does not hold up a step that is launched
ahead."""


class Sender:
    """Calls of rank 0 on their way to the other ranks."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._num_sent = 0

    def launch(self, inputs: StepInputs) -> None:
        sampling = [replace(rows, counted=[]) for rows in inputs.sampling]  # rank 0 draws, so it alone counts tokens
        self._tell("launch", replace(inputs, sampling=sampling))

    def scrub(self, slot_mapping: list[int]) -> None:
        self._tell("scrub", slot_mapping)

    def _tell(self, call: str, argument: StepInputs | list[int]) -> None:
        self._send(encode(Message(self._num_sent, call, argument)))
        self._num_sent += 1


class LeadingRunner(ModelRunner):
    """Runner of rank 0, which sends every call to the other ranks."""

    def __init__(self, send: Callable[[bytes], None], *of_runner: Any) -> None:
        super().__init__(*of_runner)
        self._others = Sender(send)

    def launch(self, inputs: StepInputs) -> PendingStep:
        self._others.launch(inputs)
        return super().launch(inputs)

    def scrub(self, slot_mapping: list[int]) -> None:
        self._others.scrub(slot_mapping)
        super().scrub(slot_mapping)

    def is_fatal(self, error: BaseException) -> bool:
        """Return True, because a step that other ranks have begun cannot run again in parts."""
        return True


class LeadingGraphRunner(LeadingRunner, GraphRunner):
    """LeadingRunner whose decode steps come from graphs, on all ranks alike."""


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
        number, _, argument = decode(message)
        if number != expected:
            raise RuntimeError(f"message {number} of rank 0 came in the place of message {expected}")
        expected += 1
        if isinstance(argument, StepInputs):
            unread = runner.launch(argument)
        else:
            runner.scrub(argument)
