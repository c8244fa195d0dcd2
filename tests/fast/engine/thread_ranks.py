"""Ranks that are threads of one process. The rest is as in processes: messages are bytes, and only rank 0 schedules."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.comm.comm import Comm
from app.engine.load.engine import Engine, Rank, build_engine, build_runner
from app.engine.ranks.runner import follow, teller
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep

T = TypeVar("T")
PATIENCE = 600.0


class Meeting:
    """Place where the ranks meet. A rank that fails breaks it, so no other one waits."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)


class ThreadComm(Comm):
    """Rank that is a thread."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.parts))
        self.meeting = meeting

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange(x)[0].clone()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.meeting.parts[self.rank] = x.clone()
        self.meeting.barrier.wait()
        parts = list(self.meeting.parts)
        self.meeting.barrier.wait()
        assert {(part.shape, part.dtype) for part in parts} == {(x.shape, x.dtype)}, "the ranks make different calls"
        return parts


def on_ranks(size: int, work: Callable[[Comm], T]) -> list[T]:
    """Return the result of `work` on each of `size` ranks."""
    meeting, results, errors = Meeting(size), dict[int, T](), list[BaseException]()

    @torch.inference_mode()
    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise _cause(errors)
    return [results[rank] for rank in range(size)]


class Ended(Exception):
    """Rank 0 has no more messages."""


class ThreadRanks:
    """Engine whose ranks are threads; close it. `verified[rank]` are the results of a rank's steps,
    of followers those of the warm-up too.
    """

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        size = config.tensor_parallel_size
        self.messages: list[bytes] = []
        self.verified: list[list[Any]] = [[] for _ in range(size)]
        self._options = options
        self._errors: list[BaseException] = []
        self.meeting = Meeting(size)
        self._queues: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in range(1, size)]
        followers = range(1, size)
        self._threads = [threading.Thread(target=self._follow, args=(config, rank), daemon=True) for rank in followers]
        for thread in self._threads:
            thread.start()
        try:
            self.engine: Engine = build_engine(config, join=lambda backend: self._leader(), **options)
            _note(self.engine.core.runner, self.verified[0])
        except BaseException as error:
            self._errors.append(error)
            self.meeting.barrier.abort()
            self.close()

    def check_alike(self) -> None:
        """Assert that all ranks verified alike in every step since the engine was built."""
        first = self.verified[0]
        assert first and all(verified[-len(first) :] == first for verified in self.verified)

    def close(self) -> None:
        """End the followers. Raises the first error of a rank."""
        for messages in self._queues:
            messages.put(None)
        for thread in self._threads:
            thread.join(PATIENCE)
        if self._errors:
            raise _cause(self._errors)

    def _rank(self, rank: int) -> Rank:
        return Rank(self.comm(rank))

    def _leader(self) -> Rank:
        return Rank(self.comm(0), teller(self._send))

    def comm(self, rank: int) -> Comm:
        return ThreadComm(rank, self.meeting)

    def _send(self, message: bytes) -> None:
        self.messages.append(message)
        for messages in self._queues:
            messages.put(message)

    def _follow(self, config: EngineConfig, rank: int) -> None:
        def receive(milliseconds: int | None) -> bytes | None:
            try:
                message = self._queues[rank - 1].get(timeout=None if milliseconds is None else milliseconds / 1000)
            except queue.Empty:
                return None
            if message is None:
                raise Ended
            return message

        try:
            runner = build_runner(config, rank, lambda backend: self._rank(rank), **self._options)
            _note(runner, self.verified[rank])
            follow(runner, receive)
        except Ended:
            return
        except BaseException as error:
            self._errors.append(error)
            self.meeting.barrier.abort()


def _note(runner: ModelRunner, verified: list[Any]) -> None:
    """Note the results of all steps of a runner from now on."""
    launch = runner.launch

    def noted(inputs: StepInputs) -> PendingStep:
        pending = launch(inputs)
        verified.append(pending.read())
        return pending

    runner.launch = noted  # type: ignore[method-assign]


def _cause(errors: list[BaseException]) -> BaseException:
    """Return the error of the rank that failed, and not of those that it no longer met."""
    return next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
