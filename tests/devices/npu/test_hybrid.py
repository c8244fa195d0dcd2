"""A hybrid target on device "npu:0": its tokens are the CPU engine's, eager and from graphs, with DFlash and plain."""

from pathlib import Path
from typing import Any

import pytest

from tests.devices.npu.engines import engine, waits_once_a_step
from tests.devices.npu.recurrent import SHAPE, SIZES, requests
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_hybrid_pair(tmp_path, block_size=8, **SHAPE)


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(("eager", "head_dim"), [(True, 64), (False, 256)], ids=["eager", "graphs, heads of 256"])
def test_tokens_with_dflash_and_without_are_the_cpu_engines(tmp_path: Path, eager: bool, head_dim: int) -> None:
    pair = make_hybrid_pair(tmp_path, block_size=8, **SHAPE | {"head_dim": head_dim})
    plain = engine(pair, "cpu", "float32", draft=None, **SIZES).run(requests())
    core = engine(pair, dtype="float32", enforce_eager=eager, **SIZES)
    assert core.run(requests()) == plain
    assert core.run(requests()) == plain, "and from the states of the prefix cache"


@pytest.mark.usefixtures("in_float32")
@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"experts": 4}, {"experts": 4, "grouped": True}], ids=str)
def test_tokens_of_other_families_are_the_cpu_engines(tmp_path: Path, shape: dict[str, Any]) -> None:
    pair = make_hybrid_pair(tmp_path, block_size=8, **SHAPE | shape)
    wanted = engine(pair, "cpu", "float32", **SIZES).run(requests())
    assert engine(pair, dtype="float32", **SIZES).run(requests()) == wanted


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_every_rule_holds_in_bfloat16_and_the_host_waits_once_a_step(pair: Pair, eager: bool) -> None:
    assert "decode" in waits_once_a_step(engine(pair, enforce_eager=eager, **SIZES), requests())


@pytest.mark.usefixtures("in_float32")
def test_steps_that_are_timed_at_startup_keep_every_rule(pair: Pair) -> None:
    """Their rows do not lie on the scratch pages, where the padding rows of a graph lie."""
    sizes: dict[str, Any] = SIZES | {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    core = engine(pair, dtype="float32", verify="auto", block_size=8, **sizes)
    assert core.run(requests()[:1])["r0"]
