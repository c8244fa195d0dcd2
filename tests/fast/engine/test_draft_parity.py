"""The engine's draft computes what the unpaged reference computes, block by block, whatever ran beside and before it.

Engines run whole; every block they draft is recorded and held against `ReferenceDraft` on the same tokens.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.load.engine import Engine
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence
from app.messages import Request, StepOutput
from tests.costs import fast_ones
from tests.fast.engine.lossless import LUCKY, demo_folder, demo_prompts, make_engine
from tests.fast.engine.pairs import LLAMA3, Pair, make_pair
from tests.fast.engine.reference import ReferenceDraft, dflash_greedy, features, load_target

TIGHT = 2e-5
"""Tolerance as a share of the largest value, for hidden states and logits. 5e-6 is usual, and a mistake exceeds 0.2."""


@dataclass(frozen=True)
class Block:
    """One drafted block: the tokens it starts from (the last is the anchor), hidden [b, H] and the drafts chosen."""

    token_ids: list[int]
    hidden: Tensor
    logits: Tensor
    drafts: list[int]
    together: int


class Blocks(list[Block]):
    """Every block that `engine` drafts from now on."""

    def __init__(self, engine: Engine) -> None:
        runner = engine.core.runner
        drafter = runner.forward.drafter
        launch, propose, forward = engine.core.launch, drafter.propose, drafter.model.forward

        def recorded_forward(*args) -> Tensor:
            hidden = forward(*args)
            self._hidden, self._head = hidden, drafter.model.lm_head
            return hidden

        def recorded_propose(*args) -> Tensor:
            self._drafts = propose(*args)
            return self._drafts

        def recorded_launch(batch: Batch):
            anchored = [list(rows.seq.token_ids) for rows in batch.decodes if rows.num_drafts]
            pending = launch(batch)
            if anchored:
                hidden = self._hidden.unflatten(0, (len(anchored), -1))
                for i, token_ids in enumerate(anchored):
                    logits = F.linear(hidden[i, 1:], self._head)
                    self.append(Block(token_ids, hidden[i], logits, self._drafts[i].tolist(), len(anchored)))
            return pending

        drafter.model.forward, drafter.propose = recorded_forward, recorded_propose
        engine.core.launch = recorded_launch

    def worst_error(self, draft: ReferenceDraft) -> float:
        """The largest difference of hidden states or logits, as a share of the largest value there."""
        worst = 0.0
        for block in self:
            context, anchor, n = block.token_ids[:-1], block.token_ids[-1], len(block.token_ids)
            tapped = features(draft.target, context, draft.taps) if context else torch.empty(0, draft.fc_width)
            hidden, logits = draft.block_hidden(tapped, anchor, n), draft.block_logits(tapped, anchor, n)
            assert block.hidden.shape == hidden.shape and block.logits.shape == logits.shape
            assert block.drafts == block.logits.argmax(dim=-1).tolist()
            for found, wanted in ((block.hidden, hidden), (block.logits, logits)):
                worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
        return worst


class Reference(ReferenceDraft):
    """`ReferenceDraft`, with the width of the features that an empty context has none of."""

    @property
    def fc_width(self) -> int:
        return self.weights["fc.weight"].shape[1]


def reference(pair: Pair, block_size: int | None = None) -> Reference:
    return Reference(pair.draft, load_target(pair.target), block_size)


def random_requests(pair: Pair, lengths: tuple[int, ...], max_tokens: int = 8, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(str(i), tuple(rng.randrange(pair.vocab_size) for _ in range(length)), max_tokens)
        for i, length in enumerate(lengths)
    ]


LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 40)

PAIRS: dict[str, dict] = {
    "gqa 4:2": {},
    "mha, own embedding": {"num_kv_heads": 4, "own_embedding": True},
    "gqa 4:1, own head, wide heads": {"num_kv_heads": 1, "own_head": True, "head_dim": 24},
    "own embedding and head, three layers, one tap": {
        "own_embedding": True,
        "own_head": True,
        "draft_layers": 3,
        "taps": (2,),
    },
    "biases": {"biases": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "llama3, adjacent pairs": {"rope_scaling": LLAMA3, "is_neox_style": False},
    "half of a head turns, biases": {"rope_scaling": {"rope_dim": 8}, "biases": True},
    "tied target, three taps": {"tied": True, "taps": (0, 1, 2), "rope_theta": 1e6},
}

SETTINGS: dict[str, dict] = {
    "alone": {"max_num_seqs": 1, "page_size": 16},
    "alone, pages of 1": {"max_num_seqs": 1, "page_size": 1},
    "batched, pages of 4": {"max_num_seqs": 16, "page_size": 4},
    "batched, pages of 128": {"max_num_seqs": 16, "page_size": 128},
    "alone, chunked": {"max_num_seqs": 1, "page_size": 4, "max_num_batched_tokens": 8},
    "batched, chunked": {"max_num_seqs": 3, "page_size": 4, "max_num_batched_tokens": 25},
    "preempted": {"max_num_seqs": 4, "page_size": 4, "kv_pages": 26},
    "block 2 of 8": {"max_num_seqs": 4, "page_size": 4, "block_size": 2},
    "block 5 of 8": {"max_num_seqs": 4, "page_size": 4, "block_size": 5},
    "3 rows of 8": {"max_num_seqs": 4, "page_size": 4, "verify": 3},
}


SHAPES = [("gqa 4:2", name) for name in SETTINGS] + [(shape, "batched, chunked") for shape in PAIRS][1:]
FAST_SHAPES = [
    ("gqa 4:2", "block 5 of 8"),
    ("own embedding and head, three layers, one tap", "batched, chunked"),
    ("llama3, adjacent pairs", "batched, chunked"),
]


@pytest.mark.parametrize("case", fast_ones(SHAPES, FAST_SHAPES), ids=", ".join)
def test_every_block_equals_the_reference(tmp_path, case: tuple[str, str]):
    shape, settings = case
    pair = make_pair(tmp_path, seed=4, **PAIRS[shape])
    engine = make_engine(pair.target, pair.draft, max_model_len=80, **SETTINGS[settings])
    blocks = Blocks(engine)
    engine.core.run(random_requests(pair, LENGTHS, max_tokens=30 if settings == "preempted" else 8))
    error = blocks.worst_error(reference(pair, SETTINGS[settings].get("block_size", SETTINGS[settings].get("verify"))))
    print(f"{len(blocks)} blocks, worst error {error:.2g}")
    assert error <= TIGHT
    assert {len(block.token_ids) for block in blocks} >= {2, 3, 4, 5, 6, 16, 17, 18, 41}
    assert max(block.together for block in blocks) == 1 or SETTINGS[settings]["max_num_seqs"] > 1
    if settings == "preempted":
        assert engine.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_a_block_over_no_context_at_all_equals_the_reference(tmp_path, page_size: int):
    pair = make_pair(tmp_path, seed=4)
    engine = make_engine(pair.target, pair.draft, page_size=page_size, max_model_len=80, max_num_seqs=2)
    blocks = Blocks(engine)
    seq = Sequence(Request("n = 1", (7,), max_tokens=20), arrival=0)
    engine.core.scheduler.pool.grow(seq.pages, pair.block_size)
    engine.core.launch(
        Batch(
            [ScheduledSequence(seq, 0, pair.block_size, needs_logits=True, num_drafts=pair.block_size - 1)],
            block_rows=pair.block_size,
        )
    )
    assert [block.token_ids for block in blocks] == [[7]]
    assert blocks.worst_error(reference(pair)) <= TIGHT


def test_rows_that_were_decoded_without_drafts_are_context_like_any_other(tmp_path):
    pair = make_pair(tmp_path, seed=4)
    engine = make_engine(pair.target, pair.draft, page_size=4, max_model_len=80, max_num_seqs=2)
    blocks = Blocks(engine)
    text, b = list(random_requests(pair, (19,))[0].token_ids), pair.block_size
    plain = Sequence(Request("plain", tuple(text), max_tokens=20), arrival=0)
    drafted = Sequence(Request("drafted", (7,), max_tokens=20), arrival=1)
    for seq in (plain, drafted):
        engine.core.scheduler.pool.grow(seq.pages, seq.num_tokens + b - 1)
    launch = engine.core.launch
    launch(Batch(prefills=[ScheduledSequence(plain, 0, 5, needs_logits=False)]))
    for row in range(5, len(text) - 1):
        beside = [ScheduledSequence(drafted, 0, b, needs_logits=True, num_drafts=b - 1)] if row % 2 else []
        launch(Batch([ScheduledSequence(plain, row, 1, needs_logits=False), *beside], block_rows=b))
    launch(Batch([ScheduledSequence(plain, len(text) - 1, b, needs_logits=True, num_drafts=b - 1)], block_rows=b))
    assert blocks[-1].token_ids == text
    assert blocks.worst_error(reference(pair)) <= TIGHT


# The whole method verifies and accepts the same drafts in each step.


CHUNK = 17


def steps_of(engine: Engine, requests: list[Request]) -> dict[str, list[tuple[int, int, int]]]:
    """Per request (tokens, verified, accepted) of every step after the one that ended its prompt."""
    steps: dict[str, list[tuple[int, int, int]]] = {request.request_id: [] for request in requests}

    def note(step: StepOutput) -> None:
        for delta in step.deltas:
            steps[delta.request_id].append((len(delta.token_ids), delta.steps[0].n_verified, delta.steps[0].n_accepted))

    engine.core.run(requests, note)
    return {request_id: after_prompt for request_id, (_, *after_prompt) in steps.items()}


BATCHES: dict[str, dict] = {
    "alone": {"max_num_seqs": 1, "page_size": 16},
    "alone, pages of 1": {"max_num_seqs": 1, "page_size": 1},
    "batched": {"max_num_seqs": 16, "page_size": 4},
    "batched, pages of 128": {"max_num_seqs": 4, "page_size": 128},
    # No prompt leaves a rest of one row: the engine takes that for a decoding one and drafts at once.
    "alone, chunked": {"max_num_seqs": 1, "page_size": 4, "max_num_batched_tokens": CHUNK},
}


def accepted_as_by_the_reference(
    target: Path, draft: Path, requests: list[Request], block_size: int, **settings
) -> list[int]:
    """All accepted counts, once every batch has shown the reference's own steps.

    On a stop token the engine counts the drafts up to it, the reference those of the whole block.
    """
    assert all(len(request.token_ids) % CHUNK != 1 for request in requests if len(request.token_ids) > 1)
    plain = ReferenceDraft(draft, load_target(target), block_size)
    runs = {
        r.request_id: dflash_greedy(plain.target, plain, r.token_ids, r.max_tokens, eos=r.stop_token_ids)
        for r in requests
    }
    wanted = {request_id: [tuple(step) for step in run.steps] for request_id, run in runs.items()}
    for request in requests:
        steps = wanted[request.request_id]
        if steps and runs[request.request_id].tokens[-1] in request.stop_token_ids:
            tokens, verified, accepted = steps[-1]
            steps[-1] = (tokens, min(verified, tokens), accepted)
    for batch, sizes in BATCHES.items():
        engine = make_engine(target, draft, block_size=block_size, **settings, **sizes)
        found = steps_of(engine, requests)
        for request in requests:
            assert found[request.request_id] == wanted[request.request_id], f"{batch}: request {request.request_id}"
    return [count for run in runs.values() for count in run.accepted]


@pytest.mark.exhaustive
@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
def test_every_step_accepts_what_the_reference_accepts_on_a_random_pair(tmp_path, block_size: int):
    pair = make_pair(tmp_path, **LUCKY)
    requests = random_requests(pair, (1, 3, 16, 40, 60), max_tokens=33)
    accepted = accepted_as_by_the_reference(pair.target, pair.draft, requests, block_size, max_model_len=120)
    print(f"accepted {sorted(accepted)}")
    assert len(set(accepted)) >= min(block_size, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("block_size", [pytest.param(8, marks=pytest.mark.slow), 16])
def test_every_step_accepts_what_the_reference_accepts_on_the_demo_pair(block_size: int):
    requests = [
        Request(f"{domain} {i}", prompt.token_ids, prompt.max_tokens, stop_token_ids=prompt.stop_token_ids)
        for domain in ("math", "copy", "prose", "talk")
        for i, prompt in enumerate(demo_prompts(domain, 3, max_tokens=60))
        if len(prompt.token_ids) % CHUNK != 1
    ]
    accepted = accepted_as_by_the_reference(demo_folder("target"), demo_folder("draft"), requests, block_size)
    print(f"accepted {sorted(accepted)}")
    assert max(accepted) == block_size - 1 and min(accepted) < block_size - 1
