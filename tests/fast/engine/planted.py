"""A planted drafter, for tests only: it knows the plain run's own tokens, and spoils them where it is told to.

So it is known beforehand how many drafts every step accepts, which tokens come out, and how long the KV is after it:
`PlannedRun` steps an engine and holds every one of its deltas, lengths and pages against the plan.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.device.base import AttentionMetadata
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.load.engine import Engine
from app.engine.models.page_pool import SCRATCH_PAGES
from app.engine.models.rope import RotaryTable
from app.engine.sequence import Sequence
from app.messages import Request, StepOutput, TokenDelta
from tests.fast.engine import lossless
from tests.fast.engine.pairs import Pair

torch.set_num_threads(1)

Cut = Callable[[str, int], int]
"""(request id, tokens known) -> how many drafts are right before the first wrong one; b - 1 and more: all."""


@dataclass(frozen=True)
class Proposal:
    """Draft of one sequence in one call. `position` is the anchor's, so position + 1 tokens are known."""

    request_id: str
    anchor: int
    position: int
    drafts: list[int]


@dataclass
class PlantedDrafter:
    """`texts` maps a request id to all its tokens: the prompt and what the target says after it, far enough for a
    whole block past the end. The draft at index `cut` is spoilt, and those behind it are right again.

    `context` is what the target's rows have written: slot -> (position, feature). `real` still gets its context.
    """

    texts: Mapping[str, list[int]]
    cut: Cut
    block_size: int
    vocab_size: int
    real: DFlashDrafter
    proposals: list[Proposal] = field(default_factory=list)
    context: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    @property
    def decoder(self) -> DecoderConfig:
        return self.real.decoder

    @property
    def rotary(self) -> RotaryTable:
        return self.real.rotary

    def propose(
        self, request_ids: list[str], anchors: Tensor, positions: Tensor, slot_mapping: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        blocks = positions.view(len(request_ids), -1)
        num_rows = blocks.shape[1]
        assert 2 <= num_rows <= self.block_size
        assert (blocks == blocks[:, :1] + torch.arange(num_rows)).all(), "a block stands in a row"
        assert slot_mapping.unique().numel() == slot_mapping.numel() == positions.numel(), (
            "every block row has a slot of its own"
        )
        assert not any(mask.causal for mask in meta.plans)
        assert meta.query_lens == [num_rows] * len(request_ids)
        assert meta.host_seq_lens == (blocks[:, -1] + 1).tolist()
        for slot in slot_mapping.tolist():
            self.context.pop(slot, None)  # a real draft writes its block's own K and V there
        drafts = []
        for request_id, anchor, position in zip(request_ids, anchors.tolist(), blocks[:, 0].tolist(), strict=True):
            n = position + 1
            assert anchor == self.texts[request_id][position], "the anchor is the last token known"
            block = self.texts[request_id][n : n + num_rows - 1]
            assert len(block) == num_rows - 1, "the plan is too short"
            cut = self.cut(request_id, n)
            if cut < len(block):
                block[cut] = (block[cut] + 1) % self.vocab_size
            self.proposals.append(Proposal(request_id, anchor, position, block))
            drafts.append(block)
        return torch.tensor(drafts)

    def write_context(self, features: Tensor, positions: Tensor, slot_mapping: Tensor, *rotation: Any) -> None:
        assert len(features) == len(positions) == len(slot_mapping)
        assert slot_mapping.unique().numel() == slot_mapping.numel(), "a slot is written twice in a step"
        for slot, position, feature in zip(slot_mapping.tolist(), positions.tolist(), features, strict=True):
            self.context[slot] = (position, feature)
        self.real.write_context(features, positions, slot_mapping, *rotation)


def plant(engine: Engine, texts: Mapping[str, list[int]], cut: Cut) -> PlantedDrafter:
    """Put a planted drafter in the place of the engine's own, or of the one planted there before: then it begins with
    the context on cached pages, and no other."""
    forward, pool = engine.core.runner.forward, engine.core.scheduler.pool
    assert forward.drafter is not None, "an engine without a draft never asks for one"
    planted = PlantedDrafter(texts, cut, engine.sizes.block_size, engine.target.vocab_size, forward.drafter)
    if isinstance(forward.drafter, PlantedDrafter):
        planted.real = forward.drafter.real
        context, pages = forward.drafter.context.items(), set(pool.cached.values())
        planted.context = {slot: entry for slot, entry in context if slot // pool.page_size in pages}
    forward.drafter = planted
    return planted


def make_engine(pair: Pair, *, num_pages: int | None = None, with_draft: bool = True, **settings: Any) -> Engine:
    """An engine on the CPU; `num_pages` counts those that sequences can own, None is as many as all can use."""
    sizes = {"page_size": 4, "max_model_len": 64, "max_num_seqs": 4, "prefix_caching": False} | settings
    kv_pages = None if num_pages is None else num_pages + SCRATCH_PAGES
    engine = lossless.make_engine(pair.target, pair.draft if with_draft else None, kv_pages=kv_pages, **sizes)
    assert num_pages in (None, engine.core.scheduler.pool.num_usable)
    return engine


@dataclass(frozen=True)
class Planned:
    """One request's step as the plan has it."""

    token_ids: list[int]
    num_verified: int
    num_accepted: int
    finish_reason: str | None


def planned_step(request: Request, text: list[int], n: int, cut: int, block_size: int, *, decoding: bool) -> Planned:
    """Return the right result of a step of a sequence with n tokens. Without `decoding` it verifies nothing."""
    remaining = len(request.token_ids) + request.max_tokens - n
    width = min(block_size, remaining) if decoding and request.speculate else 1
    accepted = min(cut, width - 1)
    said = text[n : n + accepted + 1]
    for count, token in enumerate(said, start=1):
        if token in request.stop_token_ids:
            return Planned(said[:count], min(width - 1, count), min(accepted, count), "stop")
    return Planned(said, width - 1, accepted, "length" if len(said) == remaining else None)


class PlannedRun:
    """An engine with a planted drafter, stepped to the end of all requests, and checked after every step."""

    def __init__(self, engine: Engine, texts: Mapping[str, list[int]], cut: Cut | int) -> None:
        self.engine = engine
        self.scheduler = engine.core.scheduler
        self.cut: Cut = (lambda *_: cut) if isinstance(cut, int) else cut
        self.drafter = plant(engine, texts, self.cut)
        self.requests: dict[str, Request] = {}
        self.emitted: dict[str, list[int]] = {}
        self.deltas: dict[str, list[TokenDelta]] = defaultdict(list)
        self.steps: list[StepOutput] = []
        self.preemptions_before = self.scheduler.num_preemptions

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions - self.preemptions_before

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.emitted[request.request_id] = []
        self.engine.core.add(request)

    def run(self, requests: Iterable[Request] = ()) -> dict[str, list[int]]:
        """All of them at once, to the end; returns what each emitted."""
        for request in requests:
            self.add(request)
        while self.engine.core.has_work:
            self.step()
        assert self.scheduler.pool.num_used == 0
        assert all(deltas[-1].finish_reason for deltas in self.deltas.values())
        assert set(self.deltas) == set(self.requests)
        return self.emitted

    def step(self) -> StepOutput:
        before = {seq.request.request_id: seq.num_tokens for seq in self._sequences}
        anchored = {seq.request.request_id for seq in self.scheduler.running if seq.num_computed == seq.num_tokens - 1}
        num_proposals = len(self.drafter.proposals)
        step = self.engine.core.step()
        self.engine.core.runner.forward.pending_context.write()
        self.steps.append(step)
        expected_proposals = []
        for delta in step.deltas:
            request_id = delta.request_id
            request, n, decoding = self.requests[request_id], before[request_id], request_id in anchored
            assert n == len(request.token_ids) + len(self.emitted[request_id])
            cut = self.cut(request_id, n)
            block_size = self.engine.sizes.block_size
            text = self.drafter.texts[request_id]
            plan = planned_step(request, text, n, cut, block_size, decoding=decoding)
            assert (
                Planned(delta.token_ids, delta.steps[0].n_verified, delta.steps[0].n_accepted, delta.finish_reason)
                == plan
            )
            self.emitted[request_id] += delta.token_ids
            self.deltas[request_id].append(delta)
            remaining = len(request.token_ids) + request.max_tokens - n
            if decoding and request.speculate and min(block_size, remaining) > 1:
                expected_proposals.append((request_id, n - 1))
        made = self.drafter.proposals[num_proposals:]
        proposals = [(proposal.request_id, proposal.position) for proposal in made]
        assert proposals == expected_proposals, "drafted for those that verify drafts, and for no others"
        assert all(len(proposal.drafts) == self.scheduler.policy.fixed_block - 1 for proposal in made)
        self._check_lengths(before, {delta.request_id for delta in step.deltas if not delta.finish_reason})
        return step

    @property
    def _sequences(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _check_lengths(self, before: Mapping[str, int], sampled: set[str]) -> None:
        page_size, block_size = self.engine.sizes.page_size, self.engine.sizes.block_size
        owned: list[int] = []
        for seq in self._sequences:
            request_id = seq.request.request_id
            assert seq.token_ids == [*seq.request.token_ids, *self.emitted[request_id]]
            if seq in self.scheduler.waiting:
                assert (seq.num_computed, len(seq.pages)) == (0, 0)
                continue
            # A chunk may leave just the last token of a prompt: that one is then an anchor like any other.
            assert seq.num_computed == seq.num_tokens - 1 or request_id not in sampled
            assert seq.num_computed <= seq.num_tokens - 1
            assert len(seq.pages) == -(-(before[request_id] + block_size - 1) // page_size)
            owned += seq.pages
            for position in range(seq.num_computed):
                slot = seq.pages[position // page_size] * page_size + position % page_size
                assert self.drafter.context[slot][0] == position, "the draft's context has a hole"
        assert sampled <= {seq.request.request_id for seq in self.scheduler.running}
        assert len(set(owned)) == self.scheduler.pool.num_used
        assert len(set(owned)) == len(owned) or self.scheduler.prefix_caching

    def context_features(self, request_id: str) -> Tensor:
        """The features [num_computed, taps * H] that a running sequence's context was made of."""
        page_size = self.engine.sizes.page_size
        seq = next(seq for seq in self.scheduler.running if seq.request.request_id == request_id)
        slot_mapping = [seq.pages[p // page_size] * page_size + p % page_size for p in range(seq.num_computed)]
        return torch.stack([self.drafter.context[slot][1] for slot in slot_mapping])
