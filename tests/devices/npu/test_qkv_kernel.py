"""The kernel of triton-ascend is used where it is right. A double stands for it, because no stub can run it."""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import app.engine.load.engine as build
from app.engine.core import EngineCore
from app.engine.npu.backend import NpuBackend
from app.engine_config import EngineConfig
from app.messages import Request
from tests.devices.npu import qkv_double
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.pairs import Pair, make_pair

LAYERS = 3 + 1


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, head_dim=64, num_layers=3, draft_layers=1, taps=(0, 1))


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Take float32, in which texts are the CPU's."""
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    caplog.set_level(logging.INFO, "app.engine.npu")


def engine(pair: Pair, **config: Any) -> EngineCore:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "dtype": "float32"}
    return build.build_engine(EngineConfig(target=pair.target, draft=pair.draft, **sizes | config)).core


def texts(core: EngineCore) -> tuple[dict[str, list[int]], int, list[str]]:
    """Return all texts, the kernels that were launched, and the operators that were."""
    with traced() as trace:
        found = core.run([Request(f"r{i}", tuple(range(1 + i, 30)), max_tokens=9) for i in range(3)])
    return found, trace.launches[qkv_double.KERNEL], list(trace.launches)


@pytest.mark.parametrize("eager", [True, False])
def test_with_the_kernel_texts_are_the_cpu_engines(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eager: bool
) -> None:
    wanted, *_ = texts(engine(pair, device="cpu"))
    monkeypatch.setitem(sys.modules, qkv_double.MODULE, qkv_double.module())
    with torch.inference_mode(), Numerics(lift=["N7"]):
        found, kernels, operators = texts(engine(pair, device="npu:0", enforce_eager=eager))
    assert found == wanted
    assert kernels and not any("ApplyRotary" in name for name in operators), "the operators are still there"
    assert "one kernel of triton-ascend" in caplog.text


def unturned(
    qkv: Tensor, q_norm: Any, k_norm: Any, eps: float, rotation: Any, kv: Any, slots: Any, **cores: Any
) -> Any:
    cos, sin = rotation
    return qkv_double.qkv_into_kv(qkv, q_norm, k_norm, eps, (cos, torch.zeros_like(sin)), kv, slots, **cores)


def not_compiled(*args: Any, **cores: Any) -> Any:
    raise RuntimeError("MLIRCompilationError:\nub overflow, requires 1572864 bits")


def no_driver(device: torch.device) -> int:
    raise RuntimeError("0 active drivers ([]). There should only be one.")


@pytest.mark.parametrize(
    ("changes", "logged"),
    [
        ({"qkv_into_kv": unturned}, "kernel is wrong for 4 + 2 x 2 heads of 64"),
        ({"qkv_into_kv": not_compiled}, "ub overflow, requires 1572864 bits"),
        ({"vector_cores": no_driver}, "0 active drivers"),
        (None, "triton is not installed"),
    ],
    ids=["wrong", "not compiled", "no driver", "not installed"],
)
def test_otherwise_the_operators_stay_and_the_log_says_why(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: Any, logged: str
) -> None:
    wanted, *_ = texts(engine(pair, device="cpu"))
    if changes is not None:
        monkeypatch.setitem(sys.modules, qkv_double.MODULE, qkv_double.module(**changes))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        found, kernels, operators = texts(engine(pair, device="npu:0", enforce_eager=True))
    assert found == wanted and not kernels
    assert any("ApplyRotary" in name for name in operators)
    assert logged in caplog.text


@pytest.mark.parametrize("config", [{"npu_triton": False}, {"npu_check": True}], ids=str)
def test_it_is_not_tried_where_it_is_off_and_where_every_operator_is_checked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, config: dict[str, bool]
) -> None:
    tried = qkv_double.module(vector_cores=lambda device: pytest.fail("the kernel was looked for"))
    monkeypatch.setitem(sys.modules, qkv_double.MODULE, tried)
    monkeypatch.setattr("app.engine.npu.backend.Checked", nullcontext)  # it would hold the rules of other tests too
    with torch.inference_mode(), Numerics(lift=["N7"]):
        _, kernels, _ = texts(engine(pair, device="npu:0", dtype="float32", enforce_eager=True, **config))
    assert not kernels


def test_a_trial_that_leaves_the_device_unknown_ends_the_engine_and_names_the_switch(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulted(*args: Any, **cores: Any) -> Any:
        raise RuntimeError("The vector core execution is abnormal, error code is 507035")

    monkeypatch.setitem(sys.modules, qkv_double.MODULE, qkv_double.module(qkv_into_kv=faulted))
    with torch.inference_mode(), Numerics(lift=["N7"]), pytest.raises(RuntimeError, match="507035") as raised:
        engine(pair, device="npu:0")
    assert any("--no-npu-triton" in note for note in raised.value.__notes__)
