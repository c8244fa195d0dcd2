"""A mixture of experts: its maths, its loading, and a target with experts that DFlash changes no token of.

tests/exhaustive/test_target_parity.py compares such targets with Transformers' own class.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, mixture
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.load.loader import CheckpointWeights
from app.engine.models.experts import load_experts
from app.engine.models.target import Target
from app.engine.models.weights import ExpertLayout, LayerSource
from tests.costs import fast_ones
from tests.fast.engine.feeder import EXPERTS, Feeder, assert_logits_close, random_checkpoint
from tests.fast.engine.live_bytes import LiveBytes
from tests.fast.engine.lossless import Case, Subject, assert_lossless, random_prompts
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.reference import load_target, teacher_forced

torch.set_num_threads(1)

CPU = torch.device("cpu")
MOE = MoeConfig(num_experts=8, num_experts_per_tok=3, intermediate_size=16, norm_topk_prob=True)
HIDDEN = 24
LUCKY_EXPERTS = {"seed": 22, "vocab_size": 5, "num_kv_heads": 4, "tied": True, "own_head": True, "experts": 8}
"""A random pair of five tokens, found by trying seeds, whose drafts are accepted to depths from 0 to the block."""


def random_weights(moe: MoeConfig) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    count, inner = moe.num_experts, moe.intermediate_size
    tensors = [normal(count, HIDDEN), normal(count, 2 * inner, HIDDEN), normal(count, HIDDEN, inner)]
    biases = [normal(count), normal(count, 2 * inner), normal(count, HIDDEN)] if moe.has_bias else []
    return ExpertWeights(*tensors, *biases)


def row_by_row(x: Tensor, weights: ExpertWeights, moe: MoeConfig) -> Tensor:
    """Every row through its own experts, and every expert through its own products."""
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        logits = weights.router @ row + (weights.router_bias if weights.router_bias is not None else 0)
        best = sorted(range(moe.num_experts), key=lambda e: -float(logits[e]))[: moe.num_experts_per_tok]
        total = logits[best].exp().sum() if moe.norm_topk_prob else logits.exp().sum()
        for e in best:
            gate, up = (weights.gate_up[e] @ row).split(moe.intermediate_size)
            if weights.gate_up_bias is not None:
                gate, up = (
                    part + bias
                    for part, bias in zip((gate, up), weights.gate_up_bias[e].split(moe.intermediate_size), strict=True)
                )
            if moe.swiglu_limit is None:
                inner = F.silu(gate) * up
            else:
                gate = torch.minimum(gate, torch.tensor(moe.swiglu_limit))
                up = up.clip(-moe.swiglu_limit, moe.swiglu_limit)
                inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            expert = weights.down[e] @ inner + (weights.down_bias[e] if weights.down_bias is not None else 0)
            out[t] += logits[e].exp() / total * expert
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 8},
        {"has_bias": True, "swiglu_limit": 0.5},
        {"swiglu_limit": math.inf},
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_a_row_is_the_weighted_sum_of_its_experts(rows: int, changes: dict[str, Any]) -> None:
    moe = replace(MOE, **changes)
    weights, x = random_weights(moe), torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mixture(x, weights, moe), row_by_row(x, weights, moe), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weights, x = random_weights(MOE), torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([mixture(row[None], weights, MOE) for row in x])
    torch.testing.assert_close(mixture(x, weights, MOE), alone, atol=2e-6, rtol=2e-6)
    x[7] = torch.nan
    found = mixture(x, weights, MOE)
    assert found[7].isnan().all() and not found[[i for i in range(40) if i != 7]].isnan().any()


def test_the_host_reads_no_value() -> None:
    """Tensors without memory have no values, so a graph can hold all of it."""
    weights = random_weights(MOE)
    kinds = {"router": torch.float32, "gate_up": torch.bfloat16, "down": torch.bfloat16}
    bare = ExpertWeights(*(getattr(weights, name).to("meta", dtype) for name, dtype in kinds.items()))
    out = mixture(torch.empty(5, HIDDEN, dtype=torch.bfloat16, device="meta"), bare, MOE)
    assert out.shape == (5, HIDDEN) and out.dtype == torch.bfloat16


def test_bfloat16_rows_choose_the_experts_that_float32_rows_choose() -> None:
    weights, x = random_weights(MOE), torch.ones(1, HIDDEN)
    steps = 1 + 1e-4 * torch.arange(MOE.num_experts)
    router = steps[:, None].expand(-1, HIDDEN) / 4
    narrow = ExpertWeights(router, weights.gate_up.bfloat16(), weights.down.bfloat16())
    wide = ExpertWeights(router, narrow.gate_up.float(), narrow.down.float())
    found, wanted = mixture(x.bfloat16(), narrow, MOE), row_by_row(x, wide, MOE)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, atol=0.1, rtol=0.03)


# Loading


def sparse_pair(folder: Path, **shape: Any) -> Pair:
    return make_pair(folder, **{"experts": 16, "expert_size": 64, "num_layers": 2, "taps": (0,)} | shape)


@pytest.mark.parametrize("changes", [{"interleaved": True}, {"interleaved": True, "input_first": True}], ids=str)
def test_every_layout_of_a_checkpoint_is_the_same_experts(tmp_path: Path, changes: dict[str, bool]) -> None:
    one_by_one, fused = (make_pair(tmp_path / str(f), experts=8, fused_experts=f) for f in (False, True))
    loaded = [_first_layer(pair) for pair in (one_by_one, fused)]
    file = fused.target / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        if changes.get("interleaved") and "gate_up" in name:
            tensors[name] = torch.stack(tensors[name].chunk(2, dim=1), dim=2).flatten(1, 2).contiguous()
        if changes.get("input_first"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file)
    loaded.append(_first_layer(fused, ExpertLayout(**changes)))
    for other in loaded[1:]:
        assert all(map(torch.equal, (other.router, other.gate_up, other.down), vars_of(loaded[0])))


def vars_of(weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    return weights.router, weights.gate_up, weights.down


def _first_layer(pair: Pair, layout: ExpertLayout = Target.expert_layout) -> ExpertWeights:
    checkpoint = Checkpoint(pair.target)
    config, weights = target_config(checkpoint.config), CheckpointWeights(checkpoint, CPU, torch.float32)
    assert config.moe is not None
    return load_experts(LayerSource(0, config, weights, TorchBackend(CPU), layout), config.moe)


@pytest.mark.parametrize(
    ("shape", "dtype", "tensors"),
    [
        ({}, torch.float32, 1 / 16),
        ({}, torch.bfloat16, 1 / 16),
        ({"fused_experts": True}, torch.float32, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_loading_takes_little_more_than_the_result(tmp_path, shape, dtype, tensors, interleaved):
    """At most `tensors` of a layer's experts more: of files in another dtype, and over two shards."""
    pair = sparse_pair(tmp_path, shards=2, dtype=torch.bfloat16, **shape)
    with LiveBytes() as live:
        weights = CheckpointWeights(Checkpoint(pair.target), CPU, dtype)
        get = weights.get
        weights.get = lambda *asked, **part: live.note(get(*asked, **part))  # type: ignore[method-assign]
        family = type("Family", (Target,), {"expert_layout": ExpertLayout(interleaved=interleaved)})
        target = family(target_config(read_config(pair.target)), weights, TorchBackend(CPU))
        peak = live.peak
    of_a_layer = 3 * 16 * 64 * 32 * dtype.itemsize
    assert live.now >= 2 * of_a_layer, "the result was counted"
    assert peak - live.now <= tensors * of_a_layer
    assert len(target.layers) == 2


# Config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8"),
        ({"moe_intermediate_size": 12}, "moe_intermediate_size 12"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"num_experts": "8"}, "num_experts"),
        ({"num_local_experts": 4}, "num_local_experts = 4"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"model_type": "qwen3"}, "num_experts = 8 is not supported"),
    ],
    ids=str,
)
def test_a_config_that_says_nothing_sensible_is_refused_by_name(tmp_path, changes, named):
    raw = read_config(make_pair(tmp_path, experts=8).target)
    with pytest.raises(UnsupportedError, match=named):
        target_config(raw | changes)


def test_layers_are_dense_by_list_and_by_step(tmp_path: Path) -> None:
    raw = read_config(make_pair(tmp_path, experts=8).target)
    dense = [
        [i for i in range(4) if target_config(raw | changes).moe_of(i) is None]
        for changes in ({}, {"mlp_only_layers": [2]}, {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    ]
    assert dense == [[], [2], [0, 1, 2]]
    renamed = {name: value for name, value in raw.items() if name != "num_experts"} | {"num_local_experts": 8}
    assert target_config(renamed) == target_config(raw)
    assert target_config(raw | {"num_experts": 0}).moe is None


# The target


@pytest.mark.parametrize("shape", [name for name in EXPERTS if not EXPERTS[name].get("fused_experts")])
def test_logits_are_the_reference_however_the_text_is_cut(tmp_path: Path, shape: str) -> None:
    checkpoint = random_checkpoint(tmp_path, **EXPERTS[shape])
    wanted = teacher_forced(load_target(checkpoint.folder), checkpoint.prompts[1])
    feeder = Feeder(checkpoint.engine())
    for chunk in (5, None):
        assert_logits_close(feeder.logits(feeder.feed_whole(checkpoint.prompts[1], chunk)), wanted)


@pytest.mark.parametrize("path", fast_ones(["eager", "graphs"], ("graphs",)))
def test_dflash_changes_no_token(tmp_path: Path, path: str) -> None:
    pair = make_pair(tmp_path, block_size=16, **LUCKY_EXPERTS)
    prompts = [replace(prompt, max_tokens=min(prompt.max_tokens, 20)) for prompt in random_prompts(5, 5)]
    lucky = Subject("lucky experts", pair.target, pair.draft, prompts)
    case = Case(concurrency=4, path=path)
    run = lucky.run(case)
    assert run.acceptance_length > 2
    assert_lossless(lucky.compare(run.texts, case))
    assert_lossless(lucky.compare(list(lucky.plain(case)), case))
