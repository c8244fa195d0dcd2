"""The engine process: `python -m app.engine.process COMMANDS REPLIES EPOCH`, started by the API process.

The two addresses are ZeroMQ sockets that the parent has bound. The first line of stdin is a JSON object `{"engine":
..., "target": folder, "draft": folder or null}`; after it stdin stays open, and its end means that the parent is gone.
This is the only module of the engine that knows messages. Below it there are plain dataclasses.
"""

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from app.engine.build.config import EngineConfig
from app.engine.build.engine import Engine, Progress, build_engine
from app.engine.core import IDLE, Step
from app.engine.errors import UnsupportedError
from app.engine.schedule.batch import Delta
from app.engine.sequence import Request
from app.messages import (
    Abort,
    Command,
    EngineInfo,
    Fatal,
    FlushCache,
    LoadProgress,
    Ready,
    Reply,
    Shutdown,
    SpecStep,
    StepOutput,
    StepStats,
    Submit,
    TokenDelta,
)

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A command about one request that is no message of this border, and why."""

    request_id: str
    reason: str


class Link:
    """The sockets to the parent. Commands for another epoch are dropped."""

    def __init__(self, commands: str, replies: str, epoch: int) -> None:
        self.epoch = epoch
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._commands = context.socket(zmq.PULL)
        self._replies = context.socket(zmq.PUSH)
        for socket, address in ((self._commands, commands), (self._replies, replies)):
            socket.set_hwm(0)
            socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def send(self, reply: Reply) -> None:
        self._replies.send(self._encoder.encode(reply))

    def receive(self, *, wait: bool) -> list[Command | Unreadable]:
        """All commands that have come; with `wait`, at least one. Raises msgspec.DecodeError for one that cannot be
        read and names no request."""
        commands: list[Command | Unreadable] = []
        while self._commands.poll(None if wait and not commands else 0):
            message = self._commands.recv()
            try:
                command = self._decoder.decode(message)
            except msgspec.DecodeError as error:
                commands.append(_unreadable(message, error))
                continue
            if isinstance(command, Shutdown) or command.epoch == self.epoch:
                commands.append(command)
        return commands

    def close(self) -> None:
        """Deliver what was sent, then let go."""
        zmq.Context.instance().destroy(linger=1000)


def main() -> int:
    commands, replies, epoch = sys.argv[1:]
    settings = msgspec.json.decode(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    link = Link(commands, replies, int(epoch))
    try:
        engine = build_engine(_engine_config(settings), _progress(link))
        link.send(Ready(link.epoch, _info(engine, settings)))
        serve(link, engine)
        return 0
    except UnsupportedError as error:
        link.send(Fatal(link.epoch, str(error), user_error=True))
        return 2
    except Exception as error:
        link.send(Fatal(link.epoch, _last_words(error)))
        raise
    finally:
        link.close()


def serve(link: Link, engine: Engine) -> None:
    """Take commands, step while there is work, one reply a step; until Shutdown."""
    core = engine.core
    while True:
        for command in link.receive(wait=not core.has_work):
            match command:
                case Submit():
                    if refusal := _add(engine, command):
                        link.send(StepOutput(link.epoch, [refusal], _stats(engine)))
                case Unreadable():
                    core.abort(command.request_id)
                    refusal = _refusal(command.request_id, command.reason)
                    link.send(StepOutput(link.epoch, [refusal], _stats(engine)))
                case Abort():
                    core.abort(command.request_id)
                    if not core.has_work:  # no step will tell that the pages are free
                        link.send(StepOutput(link.epoch, [], _stats(engine)))
                case FlushCache():
                    core.flush_cache()
                    link.send(StepOutput(link.epoch, [], _stats(engine)))
                case Shutdown():
                    return
        if core.has_work:
            step = core.step()
            deltas = [_token_delta(delta) for delta in step.deltas]
            link.send(StepOutput(link.epoch, deltas, _stats(engine, step)))


def _last_words(error: Exception) -> str:
    """Return why the engine ends. If the backend knew the device's error code, its meaning follows the first line."""
    said = f"{type(error).__name__}: {error}"
    notes = getattr(error, "__notes__", [])
    return f"{said.splitlines()[0]} ({notes[0]})" if notes else said


def _add(engine: Engine, submit: Submit) -> TokenDelta | None:
    """None, or why this request cannot run: the door should have known, and nobody else may suffer from it."""
    try:
        engine.core.add(_request(submit))
    except ValueError as error:
        return _refusal(submit.request_id, str(error))
    except Exception as error:
        logger.error("request %s cannot be taken", submit.request_id, exc_info=error)
        return _refusal(submit.request_id, f"the request cannot be taken: {type(error).__name__}: {error}")
    return None


def _refusal(request_id: str, reason: str) -> TokenDelta:
    return TokenDelta(request_id, [], [], finish_reason="error", error=reason)


def _unreadable(message: bytes, error: msgspec.DecodeError) -> Unreadable:
    """Raises `error` where not even the request can be told: someone would wait for its answer for ever."""
    try:
        request_id = msgspec.msgpack.decode(message)["request_id"]
    except (msgspec.DecodeError, LookupError, TypeError):
        request_id = None
    if not isinstance(request_id, str):
        raise error
    return Unreadable(request_id, f"the engine cannot read the request: {error}")


def _engine_config(settings: dict[str, Any]) -> EngineConfig:
    target, draft = settings["target"], settings["draft"]
    return EngineConfig(target=Path(target), draft=Path(draft) if draft else None, **settings["engine"])


def _request(submit: Submit) -> Request:
    return Request(
        request_id=submit.request_id,
        token_ids=tuple(submit.token_ids),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        speculate=submit.speculate,
        cache_salt=submit.cache_salt,
        **{**msgspec.structs.asdict(submit.sampling), "logit_bias": tuple(submit.sampling.logit_bias)},
    )


def _info(engine: Engine, settings: dict[str, Any]) -> EngineInfo:
    sizes, draft = engine.sizes, engine.draft
    return EngineInfo(
        target=settings["target"],
        draft=settings["draft"],
        device=engine.device,
        dtype=engine.dtype,
        block_size=sizes.block_size,
        taps=list(draft.taps) if draft else [],
        page_size=sizes.page_size,
        num_pages=engine.core.scheduler.pool.num_usable,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        vocab_size=engine.target.vocab_size,
    )


def _stats(engine: Engine, step: Step = IDLE) -> StepStats:
    scheduler = engine.core.scheduler
    return StepStats(
        kind=step.kind,
        seconds=step.seconds,
        num_decoding=step.num_decoding,
        num_drafting=step.num_drafting,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        used_pages=scheduler.pool.num_used,
        num_pages=scheduler.pool.num_usable,
        num_preemptions=scheduler.num_preemptions,
        prefix_cache_queries=scheduler.prefix_cache_queries,
        prefix_cache_hits=scheduler.prefix_cache_hits,
        num_not_finite=scheduler.num_not_finite,
        num_faults=scheduler.num_faults,
    )


def _token_delta(delta: Delta) -> TokenDelta:
    steps = [SpecStep(len(delta.token_ids), delta.num_verified, delta.num_accepted)]
    return TokenDelta(delta.request_id, delta.token_ids, steps, delta.cached_tokens, delta.finish_reason, delta.error)


def _progress(link: Link) -> Progress:
    """Progress replies, a few a second, and always the last of a stage."""
    sent_at = 0.0

    def send(stage: str, done: int, total: int) -> None:
        nonlocal sent_at
        now = time.monotonic()
        if done == total or now - sent_at > _PROGRESS_INTERVAL_SECONDS:
            sent_at = now
            link.send(LoadProgress(link.epoch, stage, done, total))

    return send


def _leave_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
