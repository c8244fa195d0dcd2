"""The checks of `bench gpu-report`, in the interpreter and at toy sizes: they pass, and find a kernel that is wrong."""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.doctor.report.cuda import kernels, trials
from app.doctor.report.cuda import report as gpu_report
from app.doctor.report.cuda import section as gpu_report_section
from app.doctor.report.cuda.kernels import Cases, Sizes, checked, parts
from app.doctor.report.cuda.parts import Row
from app.engine.cuda import backend as cuda_backend
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


def test_every_section_has_its_parts_with_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its process makes them, but on a CPU."""
    backend = CudaBackend(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    monkeypatch.setattr(cuda_backend, "CudaBackend", lambda device: backend)
    monkeypatch.setattr(kernels, "Sizes", lambda: SIZES)
    options = gpu_report._parser().parse_args(["--device", "cuda:1", "--concurrency", "1", "8"])
    found = {}
    for name, section in gpu_report.sections(options).items():
        assert section.command[-2] == name and gpu_report_section.__name__ in section.command
        device, parts = gpu_report_section.parts(name, Namespace(**json.loads(section.command[-1])), 60.0)
        assert device == "a GPU, cuda:1"
        found[name] = [part.name for part in parts]
    assert found["speeds"] == [f"{way} at {n}" for way in ("plain", "full blocks", "auto") for n in (1, 8)]
    assert found["attention"] == ["1 x 1", "1 x 4", "2 x 1", "2 x 4"] and len(found["prefill"]) == 4
    assert len(found["kernels"]) > 30 and len(found["equality"]) == 11 and len(found["device"]) == 2


def test_what_the_device_gives_is_timed() -> None:
    copy, product = (part.run()[0] for part in kernels.of_device(torch.device("cpu"), ran, copied=8, size=2))
    assert copy["TB/s"] == pytest.approx(16e-6) and product["TFLOP/s"] == pytest.approx(16e-6)


def all_checked(cases: Cases) -> list[Row]:
    return [row for part in parts(cases, untimed) for row in part.run()]  # type: ignore[arg-type]


def test_every_kernel_is_checked_and_right(cases: Cases) -> None:
    found = all_checked(cases)
    assert all(row["passed"] for row in found), [row for row in found if not row["passed"]]
    names = {row["kernel"].partition(",")[0] for row in found}
    every = "attention rms_norm add_rms_norm silu_mul qkv_into_kv context_into_kv places embed_blocks verify follow"
    assert names == set(every.split())
    assert all(row["error"] < 1e-5 for row in found)


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_kernel_that_is_wrong_is_found(cases: Cases, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    own = rows.rms_norm
    monkeypatch.setattr(rows, "rms_norm", lambda *args: own(*args) * wrong)
    failed = {row["kernel"].partition(",")[0] for row in all_checked(cases) if not row["passed"]}
    assert failed == {"rms_norm"}


def test_times_are_shares_of_the_bandwidth(cases: Cases) -> None:
    (found,) = checked(cases.all()[0], lambda run: 1e-3)
    assert found["us"] == pytest.approx(1000) and 0 < found["share of bandwidth"] < 1


def test_a_kernel_that_cannot_be_timed_is_checked_all_the_same_and_has_failed(cases: Cases) -> None:
    def fail(run: Callable[[], object]) -> float:
        raise RuntimeError("out of graphs")

    (found,) = checked(cases.all()[0], fail)
    assert found["failed"] == "RuntimeError: out of graphs" and found["error"] < 1e-5 and not found["passed"]


def test_attention_is_checked_in_the_shapes_that_graphs_replay() -> None:
    """32 sequences and nobody's, of whole blocks and of ragged ones, at the widths that serving has."""
    shapes = []

    class Shapes(Cases):
        def __init__(self) -> None: ...
        def attention(self, query_lens: list[int], host_seq_lens: list[int], *, causal: bool) -> Any:
            shapes.append((query_lens, causal))
            assert all(q_len <= kv_len for q_len, kv_len in zip(query_lens, host_seq_lens, strict=True))
            return Cases.attention(made, [1], [1], causal=causal)

    made = Cases(CudaBackend(torch.device("cpu")), SIZES, torch.float32)
    some = Shapes()
    some._sizes = Sizes()
    for width in (1, 16):
        some._attentions(32, width)
    for whole in ([1] * 32 + [0], [16] * 32 + [0]):
        assert (whole, True) in shapes
    (ragged,) = [query_lens for query_lens, _ in shapes if len(set(query_lens)) > 2]
    assert len(ragged) == 33 and sum(ragged) == 512 and max(ragged[:-1]) == 16 and ([16] * 32, False) in shapes


def test_trials_run_every_launch_beside_nobodys_sequence(cases: Cases) -> None:
    backend = CudaBackend(torch.device("cpu"))
    made = trials.of_launches(backend, cases, replace(SIZES, batches=(1,), context=20), ran)
    found = [row for part in made for row in part.run()]
    assert sum("own" in row["launch"] for row in found) == 2 and all(row["us"] > 0 for row in found)


def test_a_launch_that_triton_refuses_is_a_row_among_the_others(cases: Cases) -> None:
    class OutOfResources(Exception):
        """As Triton's own: no RuntimeError."""

    def refuses(run: Any) -> float:
        if run.args[-1].warps == 8:
            raise OutOfResources("shared memory")
        return 1e-6

    backend = CudaBackend(torch.device("cpu"))
    (part, _) = trials.of_launches(backend, cases, replace(SIZES, batches=(1,), context=20), refuses)
    found = part.run()
    assert {row["failed"] for row in found if "failed" in row} == {"OutOfResources: shared memory"}
    assert len([row for row in found if "us" in row]) >= 5


def test_prompts_are_timed_through_every_attention(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PROMPTS", [([17], [20]), ([20, 17], [20, 40])])
    monkeypatch.setattr(trials, "WARM_UP", ([18], [18]))
    backend = CudaBackend(torch.device("cpu"))
    found = [row for part in trials.of_prompts(backend, cases, ran, ran) for row in part.run()]
    assert [row["tokens"] for row in found] == 4 * ["[20]", "[20, 40]"]
    assert len({row["attention"] for row in found}) == 4
    for row in found:
        if row["attention"] in ("ours", "PyTorch's, as the backend calls it"):
            assert row["us"] > 0 and row["first call ms"] > 0
        else:
            assert "us" in row or row["failed"], "a CPU has them not"
