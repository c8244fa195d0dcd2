"""Every message that crosses the border between the API process and the engine process.

The border carries msgspec messages over ZeroMQ. The API process sends `Request` messages, the engine process
answers with `Reply` messages. Every message has the epoch of the engine it is meant for or comes from: a restarted
engine gets the next epoch, and whatever a dead one left behind in a socket is dropped by that number.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Sampling(msgspec.Struct, frozen=True):
    """How the target chooses a token. Temperature 0 is argmax; `seed` is an unsigned 64-bit number.

    Names and meanings are vLLM's; the defaults change nothing. `top_k` 0 is off. `logit_bias` is (token, bias) pairs.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []
    min_tokens: int = 0


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One request. `token_ids` is the whole prompt, never empty; the engine knows no text. Requests share cached KV
    only where they have the same `cache_salt`."""

    request_id: str
    epoch: int
    token_ids: list[int]
    sampling: Sampling
    stop_token_ids: list[int]
    max_tokens: int
    speculate: bool = True
    cache_salt: str = ""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client has gone, or a stop string has matched: free the request's pages. No reply is sent."""

    request_id: str
    epoch: int


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes. Answered by a StepOutput without deltas."""

    epoch: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave the step loop and exit 0."""


Command = Submit | Abort | FlushCache | Shutdown


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """How far the start is: `stage` is "target", "draft" (in bytes), "graphs", "compile" or "warm-up" (in steps)."""

    epoch: int
    stage: str
    done: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True):
    """What was loaded, for the start-up table, /v1/models and the checks at the door.

    `draft` is None for a target alone, and then `block_size` is 1 and `taps` is empty.
    """

    target: str
    draft: str | None
    device: str
    dtype: str
    block_size: int
    taps: list[int]
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and the engine is warm: requests may come."""

    epoch: int
    info: EngineInfo


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on. `user_error`: the configuration is at fault, so a restart is pointless."""

    epoch: int
    reason: str
    user_error: bool = False


class SpecStep(msgspec.Struct, frozen=True, array_like=True):
    """One engine step of one request: tokens emitted, drafts verified, and drafts accepted (without the bonus)."""

    n_tokens: int
    n_verified: int
    n_accepted: int


class TokenDelta(msgspec.Struct, frozen=True):
    """New tokens of one request, in order; `steps` says how they were come by, one entry per engine step.

    `cached_tokens` of the prompt were found in the prefix cache: every delta of a request says the same.
    The last delta of a request has a `finish_reason`. With "stop" its last token is the stop token itself: it
    counts as a token and is not text. With "error" `error` says what happened.
    """

    request_id: str
    token_ids: list[int]
    steps: list[SpecStep]
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


class StepStats(msgspec.Struct, frozen=True):
    """The engine after a step: `kind` is "prefill", "decode" or "mixed", or "idle" where there was no step; preemptions
    count since the start, and pages leave out the scratch pages. In this step so many sequences decoded, and so many of
    these verified drafts. Prefix cache queries and hits are in tokens, since the
    start: prompt tokens of requests that were let in, and how many of them were found. `num_not_finite` and
    `num_faults` are requests since the start that ended for logits that were not finite, and for exceptions."""

    kind: str
    seconds: float
    num_running: int
    num_waiting: int
    used_pages: int
    num_pages: int
    num_preemptions: int
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_decoding: int = 0
    num_drafting: int = 0
    num_not_finite: int = 0
    num_faults: int = 0


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """One message per engine step for the whole batch."""

    epoch: int
    deltas: list[TokenDelta]
    stats: StepStats


Reply = LoadProgress | Ready | Fatal | StepOutput
