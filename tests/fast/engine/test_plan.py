"""A plan has the shapes, dtype and sizes of an engine, and reads no weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.read import read_checkpoints
from app.engine.device.factory import make_backend
from app.engine.load.plan import make_plan
from app.engine.models.kv_pool import bytes_per_token
from tests.fast.engine.pairs import Pair, make_pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A pair without weights."""
    pair = make_pair(tmp_path, block_size=8, vocab_size=96)
    for folder in (pair.target, pair.draft):
        for weights in folder.glob("*.safetensors*"):
            weights.unlink()
    return pair


def test_a_plan_is_made_without_weights(pair: Pair) -> None:
    config = EngineConfig(pair.target, pair.draft, device="cpu", max_num_seqs=4, page_size=16, enforce_eager=True)
    plan = make_plan(config, read_checkpoints(config), make_backend("cpu"))
    assert (plan.sizes.block_size, plan.sizes.max_num_seqs, plan.dtype) == (8, 4, torch.float32)
    assert plan.graph_sizes is None and plan.max_rows == plan.sizes.max_num_batched_tokens
    plain_config = replace(config, draft=None)
    plain = make_plan(plain_config, read_checkpoints(plain_config), make_backend("cpu"))
    assert plain.draft is None and plain.sizes.block_size == 1 and len(plain.decoders) == 1


def test_scratch_pages_hold_the_rows_of_the_largest_graph(pair: Pair) -> None:
    config = EngineConfig(pair.target, pair.draft, device="cpu", max_num_seqs=4, page_size=16, enforce_eager=False)
    plan = make_plan(config, read_checkpoints(config), make_backend("cpu"))
    assert plan.graph_sizes and plan.sizes.scratch_pages * 16 >= plan.graph_sizes.max_rows >= 4 * 8


def test_a_rank_has_its_share_of_the_heads(pair: Pair) -> None:
    config = EngineConfig(pair.target, pair.draft, device="cpu", tensor_parallel_size=2)
    for whole in (True, False):
        asked = replace(config, draft_tensor_parallel_size=1 if whole else None)
        plan = make_plan(asked, read_checkpoints(asked), make_backend("cpu"))
        share = plan.shard(2)
        assert plan.draft is not None and plan.sharing == 2
        assert share.draft is not None and 2 * share.target.num_heads == plan.target.num_heads
        assert share.draft.decoder.num_heads * (1 if whole else 2) == plan.draft.decoder.num_heads


def test_each_of_four_ranks_has_one_of_two_kv_heads_and_the_memory_for_it(pair: Pair) -> None:
    config = EngineConfig(pair.target, pair.draft, device="cpu", tensor_parallel_size=4)
    plan = make_plan(config, read_checkpoints(config), make_backend("cpu"))
    for whole, share in zip(plan.decoders, plan.shard(4).decoders, strict=True):
        assert (whole.num_kv_heads, share.num_kv_heads, share.num_heads) == (2, 1, 1)
        assert 2 * bytes_per_token(share, plan.dtype) == bytes_per_token(whole, plan.dtype)
