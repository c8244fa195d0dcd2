"""The engine process: `python -m app.engine.process COMMANDS REPLIES`, started by the API process.

The two addresses are ZeroMQ sockets that the parent has bound. The first line of stdin is an EngineConfig. After it
stdin stays open, and its end means that the parent is gone. In the engine, only this module and the ranks
know `app.wire`.
"""

import gc
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zmq

from app import log, wire
from app.config.engine import EngineConfig
from app.engine import heartbeat
from app.engine.checkpoint.gguf_folder import weights_of
from app.engine.dflash.report import AcceptanceWarning, report
from app.engine.errors import UnsupportedError, last_words
from app.engine.host_cores import use_own_cores
from app.engine.load.engine import Engine, build_engine
from app.engine.load.models import Progress
from app.engine.ranks.leader import Followers, leave_with_parent
from app.messages import EngineInfo, Request, StepOutput, TokenDelta

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_SECONDS = 0.1
_FOLLOWER_END_SECONDS = 1.0
"""Time until a process that has ended is noticed. Its end makes collectives of this one fail within 25 ms."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A command about one request that cannot be read, and the reason."""

    request_id: str
    reason: str


class Link:
    """The sockets to the parent."""

    def __init__(self, commands: str, replies: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._commands = context.socket(zmq.PULL)
        self._replies = context.socket(zmq.PUSH)
        for socket, address in ((self._commands, commands), (self._replies, replies)):
            socket.set_hwm(0)
            socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[wire.Command] = msgspec.msgpack.Decoder(wire.Command)

    def send(self, reply: wire.Reply) -> None:
        self._replies.send(self._encoder.encode(reply))

    def receive(self, wait_ms: int | None) -> list[wire.Command | Unreadable]:
        """Return all commands that have come. Wait up to `wait_ms` for the first one, or with None without limit.

        Raises msgspec.DecodeError for a command that cannot be read and names no request.
        """
        commands: list[wire.Command | Unreadable] = []
        while self._commands.poll(0 if commands else wait_ms):
            message = self._commands.recv()
            try:
                commands.append(self._decoder.decode(message))
            except msgspec.DecodeError as error:
                commands.append(_unreadable(message, error))
        return commands

    def close(self) -> None:
        """Deliver what was sent, then close the sockets."""
        zmq.Context.instance().destroy(linger=1000)


def main() -> int:
    commands, replies = sys.argv[1:]
    config = wire.decode_config(sys.stdin.readline())
    log.set_up(config.log_level, config.log_format)
    leave_with_parent()
    use_own_cores()
    folder = Path(commands.removeprefix("ipc://")).parent
    heartbeat.share(folder / wire.HEARTBEAT)
    link = Link(commands, replies)
    tempfile.tempdir = str(folder)  # the parent removes it, also if this process is killed
    followers = Followers(
        wire.encode_config(config) + "\n",
        config.tensor_parallel_size,
        folder,
        partial(_end, replies),
        timeout_seconds=config.distributed_timeout_seconds,
    )
    try:
        engine = build_engine(config, _progress(link), join=followers.join)
        gc.freeze()  # what was loaded stays, so no collection needs to walk it
        link.send(wire.Ready(_info(engine, config)))
        serve(link, engine)
        return 0
    except UnsupportedError as error:
        link.send(wire.Fatal(str(error), user_error=True))
        return 2
    except Exception as error:
        followers.wait_for_end(_FOLLOWER_END_SECONDS)
        link.send(wire.Fatal(last_words(error)))
        raise
    finally:
        followers.close()
        link.close()


def _end(replies: str, reason: str) -> None:
    """End this process because another rank has ended. The main thread may wait for that one, and has the sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(replies)
    socket.send(msgspec.msgpack.encode(wire.Fatal(f"{reason}, so the engine ends")))
    context.destroy(linger=1000)
    os._exit(1)


def serve(link: Link, engine: Engine) -> None:
    """Take commands, and step while there is work with one reply a step, until Shutdown.

    With `--log-level debug` the invariants of sequences, pages and states are checked whenever the engine is idle.
    """
    core, acceptance = engine.core, AcceptanceWarning()
    while True:
        if not core.has_work and logger.isEnabledFor(logging.DEBUG):
            core.scheduler.check()
        for command in link.receive(0 if core.has_work else None):
            match command:
                case wire.Submit():
                    if refusal := _add(engine, command.request):
                        link.send(_idle(link, engine, refusal))
                case Unreadable():
                    core.abort(command.request_id)
                    refusal = _refusal(command.request_id, command.reason)
                    link.send(_idle(link, engine, refusal))
                case wire.Abort():
                    core.abort(command.request_id)
                    if not core.has_work:  # no step will report that the pages are free
                        link.send(_idle(link, engine))
                case wire.FlushCache():
                    core.flush_cache()
                    link.send(_idle(link, engine))
                case wire.Shutdown():
                    return
        if core.has_work:
            output = core.step()
            link.send(wire.Stepped(output))
            acceptance.add(output.deltas)


def _idle(link: Link, engine: Engine, *deltas: TokenDelta) -> wire.Stepped:
    """Return the reply to a command that no step follows."""
    scheduler = engine.core.scheduler
    return wire.Stepped(StepOutput(list(deltas), scheduler.stats(), scheduler.take_cache_events()))


def _add(engine: Engine, request: Request) -> TokenDelta | None:
    """Add a request. Return its last delta if it cannot run: other requests must go on."""
    try:
        engine.core.add(request)
    except ValueError as error:
        return _refusal(request.request_id, str(error))
    except Exception as error:
        logger.error("request %s cannot be taken", request.request_id, exc_info=error)
        return _refusal(request.request_id, f"the request cannot be taken: {type(error).__name__}: {error}")
    return None


def _refusal(request_id: str, reason: str) -> TokenDelta:
    return TokenDelta(request_id, [], [], finish_reason="error", error=reason)


def _unreadable(message: bytes, error: msgspec.DecodeError) -> Unreadable:
    """Return the request of a message. Raises `error` if not even that can be read, or its client waits for ever."""
    try:
        fields = msgspec.msgpack.decode(message)
        request_id = fields.get("request", fields)["request_id"]
    except (msgspec.DecodeError, AttributeError, LookupError, TypeError):
        request_id = None
    if not isinstance(request_id, str):
        raise error
    return Unreadable(request_id, f"the engine cannot read the request: {error}")


def _info(engine: Engine, config: EngineConfig) -> EngineInfo:
    sizes, draft = engine.sizes, engine.draft
    return EngineInfo(
        target=str(weights_of(config.target)),
        draft=None if config.draft is None else str(config.draft),
        device=engine.device,
        dtype=engine.dtype,
        block_size=sizes.block_size,
        taps=list(draft.target_layer_ids) if draft else [],
        page_size=sizes.page_size,
        num_pages=engine.core.scheduler.pool.num_usable,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        vocab_size=engine.target.vocab_size,
        draft_config=report(draft) if draft else {},
        quantised_bytes=engine.core.runner.backend.quantised_bytes,
        state_bytes=engine.states.nbytes - engine.states.checkpoint_bytes if engine.states else 0,
        state_cache_bytes=engine.states.checkpoint_bytes if engine.states else 0,
        num_state_checkpoints=engine.states.num_checkpoints if engine.states else 0,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def _progress(link: Link) -> Progress:
    """Return a callback that sends progress, a few times a second and at the beginning and the end of each stage."""
    sent_at, started = 0.0, dict[str, float]()

    def send(stage: str, done: int, total: int) -> None:
        nonlocal sent_at
        now = time.monotonic()
        is_new = stage not in started
        if is_new or done == total or now - sent_at > _PROGRESS_INTERVAL_SECONDS:
            sent_at = now
            link.send(wire.LoadProgress(stage, done, total, started.setdefault(stage, now)))

    return send


if __name__ == "__main__":
    sys.exit(main())
