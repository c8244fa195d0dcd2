"""The demo pair as an engine without a server: what it is asked, what it answers, and where two answers part."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from app.config.checkpoint import DEMO
from app.doctor.report.npu.part import Prompts
from app.engine.build import engine as build
from app.engine.core import EngineCore
from app.engine.step import inputs as step_inputs
from app.engine.step.forward import Packed
from app.messages import EngineConfig, Request, SamplingParams, StepOutput


def engine(device: str, dtype: str = "float32", **config: Any) -> EngineCore:
    """Small enough that prefill chunks, mixed steps and waiting requests all come about."""
    wishes: dict[str, Any] = {
        "page_size": 128,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 160,
        "max_model_len": 512,
        "kv_cache_memory": 96 << 20,
    }
    pair = EngineConfig(DEMO / "target", DEMO / "draft", device=device, dtype=dtype, **wishes | config)
    return build.build_engine(pair).core


def requests(prompts: Prompts, *, greedy: bool = False, speculate: bool = True, max_tokens: int = 48) -> list[Request]:
    """Unless `greedy`, every fourth is drawn. Every seventh is decoded plainly, and all are without `speculate`."""
    return [
        Request(
            f"r{i}",
            prompt,
            max_tokens,
            sampling=SamplingParams(temperature=0.0 if greedy or i % 4 else 0.8, seed=i),
            stop_token_ids=prompts.stop_token_ids,
            speculate=speculate and i % 7 != 6,
        )
        for i, prompt in enumerate(prompts.prompts)
    ]


@dataclass
class Run:
    """Texts, and for each step that verified drafts how many it accepted: of all requests in order, and of each."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    accepted_of: dict[str, list[int]] = field(default_factory=dict)
    num_verified: list[int] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step that verified drafts, the bonus included; 1 where none did."""
        return self.acceptance_length_of(self.accepted_of)

    def acceptance_length_of(self, request_ids: Iterable[str]) -> float:
        """The same over some requests."""
        accepted = [count for name in request_ids for count in self.accepted_of.get(name, [])]
        return 1 + sum(accepted) / max(1, len(accepted))


def run(core: EngineCore, wanted: list[Request]) -> Run:
    done = Run()

    def count(step: StepOutput) -> None:
        done.kinds.add(step.stats.kind)
        for delta in step.deltas:
            if delta.num_verified:
                done.accepted.append(delta.num_accepted)
                done.accepted_of.setdefault(delta.request_id, []).append(delta.num_accepted)
                done.num_verified.append(delta.num_verified)

    done.texts = core.run(wanted, count)
    return done


def first_difference(text: list[int], other: list[int]) -> int | None:
    """The index of the first token that differs, or that only one of them has; None where they are equal."""
    if text == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


@torch.inference_mode()
def logits_after(core: EngineCore, token_ids: tuple[int, ...]) -> torch.Tensor:
    """The target's logits [V] for the token after `token_ids`, on an idle engine whose step takes them all at once."""
    core.add(Request("logits", token_ids, max_tokens=1))
    batch = core.scheduler.schedule()
    forward = core.runner.forward
    inputs = step_inputs.build(batch, core.scheduler.pool.page_size, batch.block_rows).target
    tensors = forward.target_tensors(inputs, Packed(inputs.arrays, forward.backend))
    forward.plan(tensors.groups[0], inputs.groups[0])
    hidden, _ = forward.choose(tensors, None, [])
    core.abort("logits")
    return forward.backend.linear(hidden[-1:], forward.target.lm_head)[0].float()


def gap(core: EngineCore, prompt: tuple[int, ...], text: list[int], at: int, other: int) -> float:
    """How far the worse of two candidates for token `at`, the text's own and `other`, lies below the best."""
    logits = logits_after(core, (*prompt, *text[:at]))
    return float(logits.max() - torch.minimum(logits[text[at]], logits[other]))
