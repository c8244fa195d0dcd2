"""Context KV of a plain stretch waits, and is written for many steps at once: before anyone drafts, and before its
slots can be anyone else's."""

from typing import Any

import pytest
import torch

from app.engine.dflash import context_kv
from app.engine.load.engine import Engine
from app.messages import Request
from tests.fast.engine.lossless import LUCKY, make_engine, random_prompts
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.pending_context import pending_steps

PROMPTS = 14


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("lucky"), **LUCKY)


def engine_of(pair: Pair, **settings: Any) -> Engine:
    sizes = {"page_size": 4, "block_size": 8, "max_model_len": 192, "max_num_seqs": 4, "enforce_eager": True}
    return make_engine(pair.target, pair.draft, **sizes | settings)


def requests(pair: Pair, plain: str) -> list[Request]:
    return [
        Request(
            str(i), prompt.token_ids, prompt.max_tokens, speculate=plain == "none" or (plain == "some" and i % 3 == 0)
        )
        for i, prompt in enumerate(random_prompts(pair.vocab_size, PROMPTS))
    ]


@pytest.mark.parametrize("kv_pages", [None, 56], ids=["roomy", "preempted"])
@pytest.mark.parametrize("plain", ["all", "some"])
def test_no_pending_slot_is_written_by_another_and_no_sequence_drafts_before(pair, plain, kv_pages):
    engine = engine_of(pair, kv_pages=kv_pages)
    forward, most = engine.core.runner.forward, 0
    deciding, draft, pending = forward.deciding, forward.draft, pending_steps(forward.pending_context)

    def watched_deciding(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        owed = set[int]().union(*pending)
        written = {slot for group in tensors.inputs.groups for slot in group.slot_mapping.tolist()}
        assert not owed & written
        found = deciding(tensors, *args, **kwargs)
        most = max(most, len(pending))
        return found

    def watched_draft(inputs: Any) -> Any:
        assert not pending
        return draft(inputs)

    forward.deciding, forward.draft = watched_deciding, watched_draft
    engine.core.run(requests(pair, plain))
    assert most > 1
    assert bool(engine.core.scheduler.num_preemptions) == (kv_pages is not None)


@pytest.mark.parametrize(("budget", "num_requests", "steps"), [(512, 1, 32), (32, 2, 16)])
def test_no_more_steps_wait_than_allowed_nor_more_rows_than_the_widest_step_has(pair, budget, num_requests, steps):
    engine = engine_of(pair, max_num_batched_tokens=budget)
    context, waited = engine.core.runner.forward.pending_context, []
    pending = pending_steps(context)
    write = context.write
    context.write = lambda: (waited.append(len(pending)), write())
    engine.core.run(requests(pair, "all")[:num_requests])
    assert max(waited) == steps


def test_what_is_written_later_is_what_would_have_been_written_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    pools = []
    for most in (context_kv.MAX_PENDING, 1):
        monkeypatch.setattr(context_kv, "MAX_PENDING", most)
        engine = engine_of(pair)
        engine.core.run(requests(pair, "all")[:4])
        engine.core.runner.forward.pending_context.write()
        pools.append(engine.core.runner.forward.drafter.pool.all_layers)
    late, at_once = pools
    assert at_once.k.any() and torch.allclose(late.k, at_once.k, atol=1e-5)
    assert torch.allclose(late.v, at_once.v, atol=1e-5)
