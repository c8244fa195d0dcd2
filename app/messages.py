"""Data shared by the API process and the engine process, in the standard library's types. `app.wire` sends it."""

import math
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]
MIN_TEMPERATURE = 1e-5
"""A request below it is greedy, because the noise is lost in the rounding of logits / T."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the target's choice of a token. Temperature 0 is argmax; `seed` is an unsigned 64-bit number.

    Names and meanings are vLLM's; the defaults change nothing. `logit_bias` is (token, bias) pairs.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def is_argmax(self) -> bool:
        """True if the target's choice is the argmax of its unmodified logits."""
        return self.is_greedy and not (self.is_penalised or self.logit_bias or self.min_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """One request for tokens. `token_ids` is the whole prompt, never empty, because the engine knows no text.

    `max_tokens` >= 1 fits the context with the prompt. Requests share cached KV only if their `cache_salt` is the same.
    `speculate` may be the most drafts of a step.
    """

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: Collection[int] = ()
    speculate: bool | int = True
    cache_salt: str = ""

    @property
    def max_drafts(self) -> float:
        """Limit of drafts a step, which may exceed the draft's block."""
        return math.inf if self.speculate is True else self.speculate


class SpecStep(NamedTuple):
    """One engine step of one request: tokens emitted, drafts verified and accepted (without the bonus), its time."""

    n_tokens: int
    n_verified: int
    n_accepted: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one request, in order, and the steps that they come from.

    The last delta has a `finish_reason`. With "stop" its last token is the stop token, which counts as a token and is
    not text. With "error", `error` is the reason.
    """

    request_id: str
    token_ids: list[int]
    steps: list[SpecStep]
    cached_tokens: int = 0  # of the prompt, hits of the prefix cache; the same in every delta
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """State of the engine after a step."""

    kind: str  # "prefill", "decode" or "mixed", or "idle" if there was no step
    seconds: float  # wall-clock time, from the end of the previous step if this one was in flight by then
    num_running: int
    num_waiting: int
    used_pages: int
    num_pages: int  # without the scratch pages
    num_preemptions: int  # since the start, like the three other totals below
    prefix_cache_queries: int = 0  # total of prompt tokens looked up
    prefix_cache_hits: int = 0  # total of prompt tokens found
    num_decoding: int = 0  # sequences that decoded in the step
    num_drafting: int = 0  # of these, the sequences that verified drafts
    num_not_finite: int = 0  # total of requests ended by logits that were not finite
    num_faults: int = 0  # total of requests ended by exceptions
    used_state_slots: int = 0  # state slots and checkpoints: of a hybrid target only
    num_state_slots: int = 0
    used_state_checkpoints: int = 0
    num_state_checkpoints: int = 0
    not_ahead: str = ""  # why the next step was not launched before this one was read, on engines that overlap


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Change of the prefix cache: pages were stored or evicted, or all were cleared.

    `digests` identify pages. Stored pages are consecutive: `parent` is the page before them and `token_ids` are their
    tokens. `cache_salt` comes with the first page of a salted prompt only.
    """

    kind: Literal["stored", "removed", "cleared"]
    digests: list[bytes] = field(default_factory=list)
    parent: bytes | None = None
    token_ids: list[int] = field(default_factory=list)
    page_size: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Result of one engine step for the whole batch. `cache_events` are empty unless they were asked for.

    `scheduled` are the ids of requests whose prompts began in the step, or began again after a preemption.
    """

    deltas: list[TokenDelta]
    stats: StepStats
    cache_events: list[CacheEvent] = field(default_factory=list)
    scheduled: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded engine, for the startup table, /v1/models, /server_info and the checks before admission."""

    target: str
    draft: str | None
    device: str
    dtype: str
    block_size: int  # 1 without a draft
    taps: list[int]  # empty without a draft
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    draft_config: dict[str, str] = field(default_factory=dict)  # what the draft's config.json says
    quantised_bytes: int = 0  # of weights in 8 bits
    state_bytes: int = 0  # state is of a hybrid target only
    state_cache_bytes: int = 0  # for these checkpoints of the prefix cache:
    num_state_checkpoints: int = 0
    tensor_parallel_size: int = 1


def how_ended(code: int) -> str:
    """Return in words how a process ended, by its return code: "was killed by SIGKILL", "ended with exit code 1"."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
