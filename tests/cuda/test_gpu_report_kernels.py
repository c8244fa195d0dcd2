"""The checks of `bench gpu-report`, in the interpreter and at toy sizes: they pass, and find a kernel that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.bench import gpu_report_kernels as kernels
from app.bench.gpu_report_kernels import Cases, Sizes, checked
from app.engine.cuda import rows
from app.engine.cuda.backend import CudaBackend

torch.set_num_threads(1)

SIZES = Sizes(hidden=32, inner=48, heads=4, kv_heads=2, dim=16, layers=2, block=4, context=40, batches=(1, 2))


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(CudaBackend(torch.device("cpu")), SIZES, torch.float32)


def untimed(run: Callable[[], object]) -> None:
    return None


def ran(run: Callable[[], object]) -> float:
    run()
    return 1e-6


def test_every_kernel_is_checked_and_right(cases: Cases) -> None:
    found = checked(cases.all(), untimed)
    assert all(row["passed"] for row in found), [row for row in found if not row["passed"]]
    names = {row["kernel"].partition(",")[0] for row in found}
    every = "attention rms_norm add_rms_norm silu_mul qkv_into_kv context_into_kv places embed_blocks verify follow"
    assert names == set(every.split())
    assert all(row["error"] < 1e-5 for row in found)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_kernel_that_is_wrong_is_found(cases: Cases, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    own = rows.rms_norm
    monkeypatch.setattr(rows, "rms_norm", lambda *args: own(*args) * wrong)
    failed = {row["kernel"].partition(",")[0] for row in checked(cases.all(), untimed) if not row["passed"]}
    assert failed == {"rms_norm"}


def test_times_are_shares_of_the_bandwidth(cases: Cases) -> None:
    found = checked(cases.all()[:1], lambda run: 1e-3)
    assert found[0]["us"] == pytest.approx(1000) and 0 < found[0]["share of bandwidth"] < 1


def test_trials_of_attention_and_prompts_run_every_launch(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend(torch.device("cpu"))
    small: list[tuple[Any, Any]] = []

    def shortened(q_lens: list[int], kv_lens: list[int], *, causal: bool) -> Any:
        small.append((q_lens, kv_lens))
        return Cases.attention(cases, [17 for _ in q_lens[:1]], [20 for _ in kv_lens[:1]], causal=causal)

    found = kernels.attention_trials(backend, cases, replace(SIZES, batches=(1,), context=20), ran)
    assert sum("own" in row["launch"] for row in found) == 2 and all(row["us"] > 0 for row in found)
    monkeypatch.setattr(cases, "attention", shortened)
    assert len(kernels.prefill_trials(backend, cases, ran)) == len(small) == 3
