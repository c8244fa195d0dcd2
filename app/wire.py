"""Messages between the API process and the engine process: msgspec over ZeroMQ.

The API process sends commands, and the engine process answers with replies. Every message has the epoch of the engine
that it is meant for or comes from. A restarted engine gets the next epoch, so both sides drop what a dead engine left
behind in a socket.
"""

import msgspec

from app.engine_config import EngineConfig, EngineInfo
from app.messages import Request, StepOutput


class _OfEpoch(msgspec.Struct, frozen=True, tag=True):
    """Message to or from the engine of an epoch."""

    epoch: int


class Submit(_OfEpoch, frozen=True):
    """Run this request."""

    request: Request


class Abort(_OfEpoch, frozen=True):
    """Free the request's pages, because its client has gone or a stop string has matched. No delta is sent."""

    request_id: str


class FlushCache(_OfEpoch, frozen=True):
    """Forget all cached prefixes. The reply has no deltas."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the step loop and exit 0."""


Command = Submit | Abort | FlushCache | Shutdown


class LoadProgress(_OfEpoch, frozen=True):
    """Progress of the start: `stage` is "target", "draft" (in bytes), "graphs", "compile", "warm-up" (in steps), or
    "timing steps" (in seconds, at most `total`)."""

    stage: str
    done: int
    total: int


class Ready(_OfEpoch, frozen=True):
    """Weights are loaded and the engine is warm: requests may come."""

    info: EngineInfo


class Fatal(_OfEpoch, frozen=True):
    """The engine cannot start or go on. `user_error`: the configuration is at fault, so a restart is pointless."""

    reason: str
    user_error: bool = False


class Stepped(_OfEpoch, frozen=True):
    """One engine step is done, or a command that needs no step."""

    output: StepOutput


Reply = LoadProgress | Ready | Fatal | Stepped


def encode_config(config: EngineConfig) -> str:
    """Return one line of JSON for the stdin of an engine process."""
    return msgspec.json.encode(config, enc_hook=str).decode()


def decode_config(line: str) -> EngineConfig:
    """Return the EngineConfig of such a line. Raises msgspec.DecodeError if it is none."""
    return msgspec.json.decode(line, type=EngineConfig, dec_hook=lambda kind, text: kind(text))
