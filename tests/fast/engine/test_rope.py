"""RoPE of a config.json: its dialects, its length, and the dims of a head that turn together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.checkpoint.decoder import rope_config
from app.engine.checkpoint.shapes import Llama3Scaling, RopeConfig, RopeDivisors, YarnScaling
from app.engine.cpu.backend import CpuBackend
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.models.rope import RotaryTable, frequencies, head_order, reordered

CPU = torch.device("cpu")
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def read(**raw: Any) -> RopeConfig:
    return rope_config({"max_position_embeddings": 40960, **raw}, 64)[0]


def test_scaling_is_read_from_either_place_and_by_either_name_of_its_type() -> None:
    wanted = RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    for scaling in ({"rope_type": "llama3", **LLAMA3}, {"type": "llama3", **LLAMA3}):
        assert read(rope_theta=5e5, rope_scaling=scaling) == wanted
    assert read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}) == wanted


def test_yarn_has_the_papers_defaults_and_takes_all_parameters() -> None:
    scaling = read(rope_scaling={"rope_type": "yarn", **YARN}).scaling
    assert scaling == YarnScaling(4.0, 32768, 32.0, 1.0, pytest.approx(1.1386294), truncate=True)
    more = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    scaling = read(rope_scaling={"rope_type": "yarn", **YARN, **more}).scaling
    assert scaling == YarnScaling(4.0, 32768, 16.0, 2.0, 1.5, truncate=False)


def test_linear_scaling_divides_all_frequencies_and_divisors_each_its_own() -> None:
    plain = frequencies(read(), 64)
    linear = read(rope_scaling={"type": "linear", "factor": 2.5})
    assert linear.scaling == RopeDivisors((2.5,) * 32)
    assert torch.equal(frequencies(linear, 64), plain / 2.5)
    divisors = [1.0 + i for i in range(32)]
    each = read(rope_parameters={"rope_type": "divisors", "divisors": divisors})
    assert torch.equal(frequencies(each, 64), plain / torch.tensor(divisors))


def test_yarn_makes_the_context_longer_and_llama3_does_not() -> None:
    for scaling, longest in (
        ({"rope_type": "yarn", **YARN}, 131072),
        ({"rope_type": "yarn", "factor": 2.0}, 81920),
        ({"rope_type": "llama3", **LLAMA3}, 40960),
        ({}, 40960),
    ):
        assert rope_config({"rope_scaling": scaling, "max_position_embeddings": 40960}, 64)[1] == longest


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported yet; supported: 'default'"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 1.0}}, "mscale = 1.0 of yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "must exceed low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 31}}, "divisors must be 32 numbers"),
        ({"rope_scaling": {"rope_type": "divisors", "divisors": [1.0, 0.0] * 16}}, r"divisors\[1\] must be a positive"),
        ({"rope_scaling": {"rope_dim": 80}}, "rope_dim 80 must be even, and at most head_dim 64"),
        ({"rope_scaling": {"rope_dim": 31}}, "rope_dim 31"),
        ({"is_neox_style": "no"}, "is_neox_style"),
        ({"is_neox_style": False, "rope_is_neox_style": True}, "rope_is_neox_style disagree"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(raw: dict[str, Any], names: str) -> None:
    with pytest.raises(UnsupportedError, match=names):
        read(**raw)


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
def test_pairs_side_by_side_are_named_by_either_key_in_either_place(key: str) -> None:
    for raw in ({key: False}, {"rope_scaling": {key: False}}, {"rope_parameters": {key: False}}):
        assert read(**raw).adjacent_pairs
    assert not read(**{key: True}).adjacent_pairs


@pytest.mark.parametrize(
    "rope", [{"partial_rotary_factor": 1.0}, {"partial_rotary_factor": None, "factor": None}], ids=str
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rope_parameter_that_changes_nothing_is_read(key: str, rope: dict[str, Any]) -> None:
    assert read(**{key: {"rope_type": "default", "rope_theta": 1e6, **rope}}) == read(rope_theta=1e6)
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor = 0\.5 is not supported yet"):
        read(**{key: rope | {"partial_rotary_factor": 0.5}})


def turned_by_hand(x_thd: Tensor, rope: RopeConfig) -> Tensor:
    """Turn the first dims of row t by t / theta^(2i / dim), pair by pair, in the checkpoint's order."""
    out, dim = x_thd.clone(), rope.dim or x_thd.shape[2]
    for i in range(dim // 2):
        first, second = (2 * i, 2 * i + 1) if rope.adjacent_pairs else (i, dim // 2 + i)
        angle = torch.arange(len(x_thd)).double() * rope.theta ** (-2 * i / dim)
        cos, sin = angle.cos()[:, None].float(), angle.sin()[:, None].float()
        a, b = x_thd[:, :, first], x_thd[:, :, second]
        out[:, :, first], out[:, :, second] = a * cos - b * sin, a * sin + b * cos
    return out


@pytest.mark.parametrize("backend", [TorchBackend(CPU), CpuBackend(CPU)], ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("adjacent_pairs", [False, True])
@pytest.mark.parametrize("dim", [None, 8, 2])
def test_scores_are_those_of_the_checkpoints_pairs_whichever_a_backend_turns(backend, adjacent_pairs, dim):
    rope = RopeConfig(100.0, dim=dim, adjacent_pairs=adjacent_pairs)
    q, k = (torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    rotation = RotaryTable(rope, 16, 7, torch.float32, backend).at(torch.arange(7))
    order = head_order(rope, 16, backend)
    turned = [backend.rope(reordered(x.transpose(0, 2), order).transpose(0, 2), rotation) for x in (q, k)]
    found, wanted = (
        torch.einsum("thd,shd->hts", *pair) for pair in (turned, [turned_by_hand(x, rope) for x in (q, k)])
    )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_yarns_attention_factor_multiplies_what_turns_and_nothing_else() -> None:
    rope = RopeConfig(1e4, YarnScaling(2.0, 64, 32.0, 1.0, attention_factor=3.0, truncate=True), dim=8)
    for backend in (TorchBackend(CPU), CpuBackend(CPU)):
        rotation = RotaryTable(rope, 16, 4, torch.float32, backend).at(torch.zeros(1, dtype=torch.long))
        found = backend.rope(torch.ones(1, 1, 16), rotation).flatten()
        assert sorted(found.tolist()) == [1.0] * 8 + [3.0] * 8
