"""Messages between the API process and the engine process: msgspec over ZeroMQ.

Each engine process gets new sockets, so no message outlives the engine that sends or receives it.
"""

import time
from typing import Final

import msgspec

from app.config.engine import EngineConfig
from app.messages import EngineInfo, Request, StepOutput

HEARTBEAT: Final = "heartbeat"
"""File of 8 bytes beside the sockets: an integer that the engine process counts up while it computes."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Free the request's pages, because its client has gone or a stop string has matched. No delta is sent."""

    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes. The reply has no deltas."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the step loop and exit 0."""


Command = Submit | Abort | FlushCache | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Stage of `app.engine.load.engine.Progress`, and the time.monotonic() of this host when it began."""

    stage: str
    done: int
    total: int
    started: float = msgspec.field(default_factory=time.monotonic)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and the engine is warm: requests may come."""

    info: EngineInfo


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on. `user_error`: the configuration is at fault, so a restart is pointless."""

    reason: str
    user_error: bool = False


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """One engine step is done, or a command that needs no step."""

    output: StepOutput


Reply = LoadProgress | Ready | Fatal | Stepped


def encode_config(config: EngineConfig) -> str:
    """Return one line of JSON for the stdin of an engine process."""
    return msgspec.json.encode(config, enc_hook=str).decode()


def decode_config(line: str) -> EngineConfig:
    """Return the EngineConfig of such a line. Raises msgspec.DecodeError if it is not one."""
    return msgspec.json.decode(line, type=EngineConfig, dec_hook=lambda kind, text: kind(text))
