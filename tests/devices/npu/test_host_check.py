"""The probes of `dflash-server check --device npu` that need a torch_npu: the real one, on stub libraries."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.check import operators, probes
from app.engine.device.probe import Finding, Probe, ok
from app.engine.npu import host_probes as host_check
from app.engine.npu.backend import NpuBackend


@pytest.fixture
def ask(run_python: Callable[..., str]) -> Callable[..., Finding]:
    """Return an expression on host_check (`h`) in a fresh process with these NPU_STUB_* variables."""

    def asked(expression: str, **environment: str) -> Finding:
        program = (
            "import json\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
            f"import app.engine.npu.host_probes as h\nprint('FOUND', json.dumps(asdict({expression})))"
        )
        lines = run_python(program, **environment).splitlines()
        return Finding(**json.loads(next(line for line in lines if line.startswith("FOUND ")).removeprefix("FOUND ")))

    return asked


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def report(device: str) -> dict[str, dict[str, str]]:
    """Return the results of the probes, by the process that the command starts."""
    command = [sys.executable, "-m", "app.check.probes", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    names, *results = map(json.loads, done.stdout.splitlines())
    assert [result["name"] for result in results] == names
    return {result["name"]: result for result in results}


# ---- the whole report -------------------------------------------------------------------------------------------


def test_a_torch_npu_without_cann_is_told_to_source_set_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    results = report("npu")
    found = results["torch_npu"]
    assert found["status"] == "failed" and found["found"].startswith("torch_npu cannot be loaded: ")
    assert ".so" in found["found"] and "set_env.sh" in found["hint"]
    assert results["versions"]["status"] == "warning" and "CANN unknown" in results["versions"]["found"]
    assert {results[name]["found"] for name in ("operators", "backend", "rope")} == {"torch_npu cannot be loaded"}


def test_a_device_that_computes_nothing_is_found_out() -> None:
    results = report("npu:0")
    for name in ("torch", "torch_npu", "devices", "chip", "operators", "backend", "memory"):
        assert results[name]["status"] == "ok", results[name]
    assert {results[name]["status"] for name in probes.OPERATORS} == {"failed"}


def test_a_device_number_too_high_leaves_the_operators_untried() -> None:
    results = report("npu:4")
    assert results["devices"]["status"] == "failed"
    assert {results[name]["found"] for name in ("chip", "backend", "causal_attention")} == {"the device does not exist"}


def test_the_version_of_cann_is_torch_npus_where_no_file_tells_it(ask: Callable[..., Finding]) -> None:
    assert "CANN 9.1.0" in host_check.versions({}).found
    assert "CANN unknown" in ask("h.versions({})", NPU_STUB_CANN="none").found


def test_on_a_host_that_has_all_nothing_fails(numerics, tmp_path, monkeypatch):
    for name in ("davinci0", "davinci_manager", "devmm_svm", "hisi_hdc"):
        put(tmp_path / "dev" / name)
    put(tmp_path / "usr/local/Ascend/driver/version.info", "Version=25.5.1\n")
    put(tmp_path / "cann/ascend_toolkit_install.info", "version=9.1.0\n")
    monkeypatch.setattr(host_check, "_ROOT", tmp_path)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path / "cann"))
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "cann/opp"))
    found = dict(probes.run(probes.probes("npu")))
    assert {name for name, finding in found.items() if finding.status != "ok"} == {"versions"}
    assert "nothing is known of this set" in found["versions"].found


# ---- devices ----------------------------------------------------------------------------------------------------


def test_without_a_device_the_hint_is_npu_smi(ask: Callable[..., Finding]) -> None:
    found = ask("h.devices('npu', {}, Path('/'))", NPU_STUB_DEVICES="0")
    assert (found.status, found.found) == ("failed", "torch_npu sees no NPU")
    assert "npu-smi info" in found.hint


def test_a_device_beyond_the_visible_ones_is_named_with_what_hides_the_rest(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / f"dev/davinci{number}").touch()
    visible = {"ASCEND_RT_VISIBLE_DEVICES": "3"}
    assert host_check.devices("npu:0", visible, tmp_path) == ok("1 visible; ASCEND_RT_VISIBLE_DEVICES=3 hides 7")
    found = host_check.devices("npu:3", visible, tmp_path)
    assert found.status == "failed" and found.found.startswith("npu:3 is not among them: 1 visible")
    assert found.hint.endswith("npu:0 to npu:0")


def test_chips_with_operators_of_their_own_are_a_warning(ask: Callable[..., Finding]) -> None:
    assert host_check.chip("npu:0") == ok("Ascend910B3")
    found = ask("h.chip('npu:0')", NPU_STUB_SOC="Ascend310P3")
    assert found.status == "warning" and "Ascend310P3" in found.found


def test_graphs_want_a_recent_driver(ask: Callable[..., Finding]) -> None:
    assert host_check.graphs(Path("/nowhere")) == ok("driver 25.5.1, at least 25.5.1")
    old = ask("h.graphs(Path('/nowhere'))", NPU_STUB_DRIVER="25.2.3")
    assert old.status == "warning" and "25.2.3" in old.found and "--enforce-eager" in old.hint


def test_a_torch_npu_that_cannot_update_attention_in_graphs_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch_npu.npu.graph_task_update_begin")
    found = host_check.graphs(Path("/nowhere"))
    assert found.status == "warning" and "2.10.0.post4" in found.hint


def test_an_operator_or_argument_that_torch_npu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_check.operators().status == "ok"
    monkeypatch.setitem(host_check.OPERATORS, "npu_rms_norm", "input gamma eps")
    monkeypatch.setitem(host_check.OPERATORS, "npu_dream", "input")
    found = host_check.operators()
    assert (found.status, found.found) == ("failed", "torch_npu has no npu_rms_norm(eps), npu_dream")


# ---- the backend, its memory and its operators ------------------------------------------------------------------


@pytest.fixture
def backend(numerics: object) -> NpuBackend:
    return NpuBackend(torch.device("npu:0"))


def test_the_backend_and_its_memory_are_told(backend: NpuBackend) -> None:
    assert probes.backend(backend) == ok("NpuBackend on npu:0, bfloat16, pages of 128 tokens")
    memory = probes.memory(backend)  # memory of earlier tests in this process is missing
    assert memory.status == "ok" and memory.found.endswith(" of 64.0 GiB free")


EXACT = {"write_kv", "embed_blocks", "positions_and_slots", "verify", "advance_by_accepted"}


@pytest.mark.parametrize("name", probes.OPERATORS)
def test_an_operator_agrees_with_the_cpu_to_rounding(backend: NpuBackend, name: str) -> None:
    found = operators.find(backend, name)
    assert found.status == "ok", found
    assert (name in EXACT) == (found.found == "exactly as on the CPU")


def test_an_operator_that_raises_has_failed_with_the_meaning_of_its_code(numerics: object) -> None:
    def opened() -> NpuBackend:
        raise RuntimeError("NPU function error: call aclnnRmsNorm failed, error code is 561002\nEZ9999: Inner Error!")

    ((_, found),) = probes.run([Probe("rms_norm", lambda: operators.find(opened(), "rms_norm"))])
    assert found.found.endswith("error code is 561002") and "tiling" in found.hint
