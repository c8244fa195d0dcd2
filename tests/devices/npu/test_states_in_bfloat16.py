"""`--mamba-ssm-cache-dtype bfloat16` on device "npu:0": decoding rows by the fused operator, and when it is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from app.engine.device.recurrent import GatedDeltaStep
from app.engine.errors import UnsupportedError
from app.engine.npu import gated_delta
from app.engine.npu.backend import l2norm
from tests import ROOT
from tests.devices.npu.engines import HOST_PROCESSOR, engine
from tests.devices.npu.null_device import traced
from tests.devices.npu.test_gated_delta import launches_of
from tests.devices.npu.test_hybrid import SHAPE, SIZES, requests
from tests.fast.engine.delta_suite import DeltaSuite
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair

IN_BFLOAT16: dict[str, Any] = {**SIZES, "mamba_ssm_cache_dtype": "bfloat16"}


def commit_and_verify(step: GatedDeltaStep) -> Tensor:
    return gated_delta.commit_and_verify(step, l2norm)


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


@pytest.mark.usefixtures("numerics")
def test_a_layer_takes_at_most_thirty_launches() -> None:
    for rows in (1, 8):
        of_step = launches_of(commit_and_verify, rows, block=8, state_dtype=torch.bfloat16)
    first, other = (trace.launches.total() for trace in of_step)
    print(f"launches to commit and verify with states in bfloat16: {other}, and {first - other} for the first layer")
    assert other <= 30
    wanted = f"bfloat16` takes {other}, and {first - other} for the first layer"
    assert wanted in (ROOT / "docs" / "ascend.md").read_text(), of_step[1].launches


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
    core = engine(pair, enforce_eager=eager, **IN_BFLOAT16)
    for request in requests():
        core.add(request)
    while core.has_work:
        with traced() as trace:
            core.step()
        assert trace.waits == ["aclrtSynchronizeEvent"], "the one read of the step"
        assert not HOST_PROCESSOR.intersection(trace.launches)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a scale that is not read": lambda call: call.update(scale=1.0),
    "a state as [Dk, Dv]": lambda call: call.update(key=call["key"].flip(2)),
    "no decays": lambda call: call.update(g=torch.zeros_like(call["g"])),
    "the state of another sequence": lambda call: call.update(ssm_state_indices=call["ssm_state_indices"].flip(0)),
}


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_an_operator_with_other_results_is_refused_by_name(
    pair: Pair, spoil: Callable[[dict[str, Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gated_delta.torch_npu.npu_recurrent_gated_delta_rule

    def spoilt(*args: Tensor, **kwargs: Any) -> Tensor:
        call = dict(zip(("query", "key", "value", "state"), args, strict=True)) | kwargs
        spoil(call)
        return right(**call)

    monkeypatch.setattr(gated_delta.torch_npu, "npu_recurrent_gated_delta_rule", spoilt)
    with pytest.raises(UnsupportedError, match="npu_recurrent_gated_delta_rule is not right here: its results differ"):
        engine(pair, **IN_BFLOAT16)


@pytest.mark.usefixtures("numerics")
def test_an_operator_that_is_lacking_is_refused_by_name(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("aclnnRecurrentGatedDeltaRuleGetWorkspaceSize not in libopapi.so")

    monkeypatch.setattr(gated_delta.torch_npu, "npu_recurrent_gated_delta_rule", lacking)
    with pytest.raises(UnsupportedError, match=r"--mamba-ssm-cache-dtype bfloat16: .*not in libopapi.so; leave it out"):
        engine(pair, **IN_BFLOAT16)


@pytest.mark.usefixtures("numerics")
def test_blocks_of_more_than_eight_rows_are_refused_by_name(tmp_path: Path) -> None:
    longer = make_hybrid_pair(tmp_path, block_size=9, **SHAPE)
    with pytest.raises(UnsupportedError, match=re.escape("a block has 9 rows, and its operator takes 8 (N46)")):
        engine(longer, **IN_BFLOAT16)


def test_other_devices_refuse_it_by_name(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="--mamba-ssm-cache-dtype bfloat16: it is for an NPU; leave it out"):
        engine(pair, "cpu", "float32", **IN_BFLOAT16)
