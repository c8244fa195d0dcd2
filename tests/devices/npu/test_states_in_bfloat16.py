"""`--mamba-ssm-cache-dtype bfloat16` on device "npu:0": decoding rows by the fused operator, and when it is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch_npu
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.recurrent import GatedDeltaStep
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.engine.npu.gated_delta import commit_and_verify
from tests import ROOT
from tests.devices.npu.engines import engine, waits_once_a_step
from tests.devices.npu.recurrent import SHAPE, SIZES, launches_of, requests
from tests.fast.engine.delta_layers import SMALL, Layer, assert_slots
from tests.fast.engine.delta_suite import DeltaSuite
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair

OPERATOR = "npu_recurrent_gated_delta_rule"
RIGHT = torch_npu.npu_recurrent_gated_delta_rule
IN_BFLOAT16: dict[str, Any] = {**SIZES, "mamba_ssm_cache_dtype": "bfloat16"}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_hybrid_pair(tmp_path, block_size=8, **SHAPE)


@pytest.mark.usefixtures("numerics")
class TestConformance(DeltaSuite):
    run = staticmethod(commit_and_verify)
    device = torch.device("npu:0")
    close: ClassVar[dict[str, float]] = {"rtol": 0.02, "atol": 0.02}
    sizes: ClassVar[dict[str, Any]] = {"state_dtype": torch.bfloat16}
    widest = 8

    def test_a_step_whose_second_call_failed_commits_nothing_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer, calls = self.layer(), list[int]()
        layer.memory.num_tokens.fill_(40)
        rows = layer.rows(3)
        wanted, slots = layer.wanted(rows, [3], [42], [3])

        def second_fails(*args: Tensor, **kwargs: Any) -> Tensor:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return RIGHT(*args, **kwargs)

        monkeypatch.setattr(torch_npu, OPERATOR, second_fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            layer.found(rows, [3], [42], [3])
        torch.testing.assert_close(layer.found(rows, [3], [42], [3]), wanted, **self.close)
        found = layer.state
        found["pending"][3, 3:] = slots["pending"][3, 3:] = 0
        assert_slots(found, slots, self.close)


@pytest.mark.usefixtures("numerics")
def test_a_layer_that_a_failed_step_has_not_reached_commits_its_own_rows() -> None:
    """The layers before it have committed theirs. The first layer of a forward finds the rows of all."""
    shared: dict[str, Any] = {}

    def run(step: GatedDeltaStep) -> Tensor:
        return commit_and_verify(step._replace(shared=shared))

    sizes = TestConformance.sizes | {"device": TestConformance.device}
    layers = [Layer(SMALL, run, **sizes) for _ in range(2)]
    num_tokens = torch.stack([layer.memory.num_tokens for layer in layers])
    num_tokens[0], num_tokens[1] = 42, 40
    for index, layer in enumerate(layers):
        layer.memory = replace(layer.memory, num_tokens=num_tokens[index], of_layers=num_tokens, index=index)
        rows, moves = layer.rows(5), ([3, 1], [42, 42], [3, 2])
        wanted, slots = layer.wanted(rows, *moves)
        torch.testing.assert_close(layer.found(rows, *moves), wanted, **TestConformance.close)
        torch.testing.assert_close(layer.state["matrix"], slots["matrix"], **TestConformance.close)


@pytest.mark.usefixtures("numerics")
def test_a_layer_takes_at_most_thirty_launches() -> None:
    narrow, wide = (
        [trace.launches.total() for trace in launches_of(commit_and_verify, rows, 8, state_dtype=torch.bfloat16)]
        for rows in (1, 8)
    )
    print(f"launches to commit and verify with states in bfloat16: {narrow} for 1 row, {wide} for 8")
    assert narrow <= wide and wide[1] <= 30
    wanted = f"bfloat16` takes {wide[1]}, and the first of a forward {wide[0] - wide[1]} more"
    assert wanted in (ROOT / "docs" / "ascend.md").read_text()


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_drafts_change_no_token_of_these(pair: Pair, eager: bool) -> None:
    """A state is rounded where a step ends, so that drafts may change a text at a near tie. Here is none."""
    plain = engine(pair, dtype="float32", draft=None, enforce_eager=eager, **IN_BFLOAT16).run(requests())
    core = engine(pair, dtype="float32", enforce_eager=eager, **IN_BFLOAT16)
    assert core.run(requests()) == plain
    assert core.run(requests()) == plain, "and from the states of the prefix cache"


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_every_rule_holds_and_the_host_waits_once_a_step(pair: Pair, eager: bool) -> None:
    assert "decode" in waits_once_a_step(engine(pair, enforce_eager=eager, **IN_BFLOAT16), requests())


def keeps_states_but_one(call: dict[str, Any]) -> Tensor:
    kept = call["state"][1].clone()
    o = RIGHT(**call)
    call["state"][1] = kept
    return o


WRONG: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "a scale that is not read": lambda call: RIGHT(**call | {"scale": 1.0}),
    "a scale that is slightly off": lambda call: RIGHT(**call | {"scale": 1.05 * call["scale"]}),
    "keys in another order": lambda call: RIGHT(**call | {"key": call["key"].flip(2)}),
    "no decays": lambda call: RIGHT(**call | {"g": torch.zeros_like(call["g"])}),
    "states of other sequences": lambda call: RIGHT(
        **call | {"ssm_state_indices": call["ssm_state_indices"].flip(0).contiguous()}
    ),
    "states that are not written": lambda call: RIGHT(**call | {"state": call["state"].clone()}),
    "a state that is not written": keeps_states_but_one,
    "no numbers": lambda call: RIGHT(**call) * torch.nan,
}


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_operator_with_other_results_is_refused_by_name(
    pair: Pair, wrong: Callable[[dict[str, Any]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("query", "key", "value", "state")
    monkeypatch.setattr(
        torch_npu, OPERATOR, lambda *args, **kwargs: wrong(dict(zip(names, args, strict=True)) | kwargs)
    )
    with pytest.raises(UnsupportedError, match="npu_recurrent_gated_delta_rule is not right here: its results differ"):
        engine(pair, **IN_BFLOAT16)


def lacking(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("aclnnRecurrentGatedDeltaRuleGetWorkspaceSize not in libopapi.so")


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize(
    ("operator", "why"), [(lacking, "not in libopapi.so"), (None, "this torch_npu has none")], ids=["CANN", "torch_npu"]
)
def test_an_operator_that_is_lacking_is_refused_by_name(
    pair: Pair, operator: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if operator:
        monkeypatch.setattr(torch_npu, OPERATOR, operator)
    else:
        monkeypatch.delattr(torch_npu, OPERATOR)
    with pytest.raises(UnsupportedError, match=f"--mamba-ssm-cache-dtype bfloat16: .*{why}; leave it out"):
        engine(pair, **IN_BFLOAT16)


@pytest.mark.usefixtures("numerics")
def test_the_memory_of_checkpoints_holds_more_of_them(pair: Pair) -> None:
    given = {"state_cache_memory": 1 << 18}
    single, half = (engine(pair, **sizes | given) for sizes in (SIZES, IN_BFLOAT16))
    counts = [core.scheduler.stats().num_state_checkpoints for core in (single, half)]
    assert counts[0] < counts[1], counts


@pytest.mark.usefixtures("numerics")
def test_more_heads_than_the_operator_takes_are_refused_by_name() -> None:
    heads = GatedDeltaConfig((0,), 4, num_k_heads=257, num_v_heads=257, k_head_dim=8, v_head_dim=8)
    with pytest.raises(UnsupportedError, match=re.escape("at most 256 heads of 256 (N46); leave it out")):
        NpuBackend(torch.device("npu:0")).check_states(heads, 8, torch.bfloat16)


@pytest.mark.usefixtures("numerics")
def test_blocks_of_more_than_eight_rows_are_refused_by_name(tmp_path: Path) -> None:
    longer = make_hybrid_pair(tmp_path, block_size=9, **SHAPE)
    with pytest.raises(UnsupportedError, match=re.escape("a block has 9 rows, and its operator takes 8 (N46)")):
        engine(longer, **IN_BFLOAT16)


def test_other_devices_refuse_it_by_name(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="--mamba-ssm-cache-dtype bfloat16: it is for an NPU; leave it out"):
        engine(pair, "cpu", "float32", **IN_BFLOAT16)
