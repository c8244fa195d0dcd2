"""`dflash-server check` without torch_npu: each probe's failure says what to do, and none stops the rest."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import cli
from app.check import command as check_command
from app.check import probes
from app.config.settings import Config
from app.engine.cuda import host_probes as cuda_host
from app.engine.device.probe import Finding, Probe, failed, ok, warning
from app.engine.npu import host_probes as host_check
from tests.fast.check.patient import Patient

GIB = 1 << 30
HAS_NPU = any(Path("/dev").glob("davinci*")) or importlib.util.find_spec("torch_npu") is not None
without_npu = pytest.mark.skipif(HAS_NPU, reason="tells what a machine without an NPU is told")


# ---- the command ------------------------------------------------------------------------------------------------


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1700)


@pytest.mark.exhaustive
def test_on_a_cpu_everything_is_asked_and_nothing_fails() -> None:
    done = check("--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = [line.split()[0] for line in lines[:-1]]
    assert names == ["torch", "compiler", "backend", "memory", *probes.OPERATORS]
    assert {line.index("ok ") for line in lines[:-1]} == {len("bidirectional_attention") + 2}
    assert lines[-1] == "nothing failed"


@pytest.mark.exhaustive
@without_npu
def test_an_npu_on_a_machine_without_one_is_a_report_and_no_traceback() -> None:
    done = check("--device", "npu", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    results = {result["name"]: result for result in report["results"]}
    assert report["device"] == "npu" and report["failed"] == sum(r["status"] == "failed" for r in results.values())
    assert results["driver"]["status"] == results["device files"]["status"] == "failed"
    assert "'.[npu]'" in results["torch_npu"]["hint"]
    for name in ("devices", "operators", "backend", "memory", *probes.OPERATORS):
        assert results[name] == {"name": name, "status": "not tried", "found": "torch_npu cannot be loaded", "hint": ""}
    lines = check("--device", "npu").stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("torch_npu "))
    assert "failed" in lines[place] and lines[place + 1].strip().startswith("-> pip install")


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--devise", "cpu"], ["cpu"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    assert "hint:" in capsys.readouterr().err
    cli.main(["--help"])
    assert "\n  check " in capsys.readouterr().out


def test_the_device_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool, int]] = []
    monkeypatch.setattr(check_command, "report", lambda *device, **how: asked.append((*device, *how.values())) or 0)
    monkeypatch.setenv("DFLASH_DEVICE", "npu:2")
    assert cli.main(["check", "--json"]) == 0
    monkeypatch.delenv("DFLASH_DEVICE")
    for flag in ("--tensor-parallel-size", "-tp", "--tp"):
        cli.main(["check", flag, "4"])
    assert asked == [("npu:2", True, 1), *[("auto", False, 4)] * 3]


def broken_off(program: str, capsys: pytest.CaptureFixture[str], seconds: float = 600.0) -> dict[str, dict[str, str]]:
    """Results of probes that are this program, and have so many seconds each."""
    command = [sys.executable, "-c", f'import os, time\nprint(\'["one", "two", "three"]\', flush=True)\n{program}']
    assert check_command.report("npu", as_json=True, command=command, limit=seconds) == 1
    return {result["name"]: result for result in json.loads(capsys.readouterr().out)["results"]}


def test_a_probe_that_kills_the_process_has_failed_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "LineProcess", Patient)
    first = json.dumps({"name": "one", "status": "ok", "found": "fine", "hint": ""})
    results = broken_off(f"print('{first}', flush=True); os.abort()", capsys)
    assert results["one"]["status"] == "ok"
    assert (results["two"]["status"], results["two"]["found"]) == ("failed", "was killed by SIGABRT")
    assert (results["three"]["status"], results["three"]["found"]) == ("not tried", "two broke the run off")


def test_a_probe_that_hangs_is_ended(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command.LineProcess, "_end_seconds", 0.05)
    results = broken_off("time.sleep(6000)", capsys, seconds=0.1)
    assert results["one"]["status"] == "failed" and "did not answer in time" in results["one"]["found"]


# ---- one probe after the other ----------------------------------------------------------------------------------


def test_a_failed_probe_stops_those_that_need_it_and_no_others() -> None:
    def raises() -> Finding:
        raise RuntimeError("AclrtSynchronizeDeviceWithTimeout, error code is 507015\n[Error]: abnormal")

    asked = [
        Probe("a", lambda: failed("no", "do"), without="there is no a"),
        Probe("b", lambda: ok("b"), ("a",), without="there is no b"),
        Probe("c", lambda: ok("c"), ("b",)),
        Probe("d", lambda: warning("hm", "see")),
        Probe("e", raises, ("d",)),
    ]
    found = dict(probes.run(asked))
    assert found["b"] == found["c"] == Finding("not tried", "there is no a")
    assert found["d"].status == "warning"
    assert found["e"].found == "RuntimeError: AclrtSynchronizeDeviceWithTimeout, error code is 507015"
    assert found["e"].status == "failed" and "AI core" in found["e"].hint


def test_what_probes_need_is_the_name_of_an_earlier_one_and_auto_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("app.engine.device.factory.found_device", lambda device: "cpu")
        assert dict(probes.run(probes.probes("auto")[:1]))["device"] == ok("auto is cpu here")
        patch.setattr(probes, "has_npu", lambda: True)  # without torch_npu, which its probe tells
        assert dict(probes.run(probes.probes("auto")[:1]))["device"] == ok("auto is npu here")
    for device in ("cpu", "cuda:1", "npu"):
        names = [probe.name for probe in probes.probes(device)]
        assert len(set(names)) == len(names)
        for place, probe in enumerate(probes.probes(device)):
            assert {need for need in probe.needs if need in names} <= set(names[:place])


# ---- torch, GPUs, memory, operators -----------------------------------------------------------------------------


def fake_torch(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, gpus: int = 0) -> None:
    names = SimpleNamespace(device_count=lambda: gpus, get_device_name=lambda index: "H200")
    torch = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda), cuda=names)
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]


def test_a_cuda_build_of_torch_cannot_drive_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "2.10.0+cu128", "12.8")
    found = probes.torch_build("npu")
    assert found.status == "failed" and "CUDA 12.8 build" in found.found
    assert found.hint == "pip install --index-url https://download.pytorch.org/whl/cpu torch==2.10.0"
    assert probes.torch_build("cuda").status == probes.torch_build("cpu").status == "ok"
    fake_torch(monkeypatch, "2.10.0+cpu", None)
    assert "pip install torch==2.10.0 from PyPI" in probes.torch_build("cuda").hint


def test_a_torch_that_cannot_be_loaded_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = probes.torch_build("cpu")
    assert found.status == "failed" and found.hint == "install torch again"


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_torch(monkeypatch, "2.10.0", "12.8", gpus=2)
    assert cuda_host.devices("cuda:1") == ok("2 visible; cuda:1 is H200")
    found = cuda_host.devices("cuda:2")
    assert found.found == "cuda:2 is not among them: 2 visible" and found.hint.endswith("cuda:0 to cuda:1")
    fake_torch(monkeypatch, "2.10.0", "12.8", gpus=0)
    assert "nvidia-smi" in cuda_host.devices("cuda").hint


def holding(free: float, total: float, kind: str = "npu") -> Finding:
    opened = SimpleNamespace(memory_is_host=kind == "cpu", memory=lambda: (int(free * GIB), int(total * GIB)))
    return probes.memory(opened)  # type: ignore[arg-type]


def test_memory_that_others_hold_is_a_warning_and_a_full_device_a_failure() -> None:
    assert holding(60, 64) == ok("60.0 of 64.0 GiB free")
    assert holding(50, 64).status == "warning" and "14.0 GiB are held by others" in holding(50, 64).hint
    assert holding(5, 64).status == "failed" and "--device" in holding(5, 64).hint
    assert holding(1, 64, "cpu").status == "ok"
    assert Config().engine.memory_utilization == probes.MEMORY_SHARE


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_driver_is_found_where_its_installer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = host_check.driver(tmp_path)
    assert missing.status == "failed" and "HDK" in missing.hint and "mount" in missing.hint
    (tmp_path / "usr/local/Ascend/driver/lib64").mkdir(parents=True)
    assert host_check.driver(tmp_path).status == "warning"
    put(tmp_path / "opt/Ascend/driver/version.info", "Version=25.5.1\nascendhal_version=7.35.23\n")
    put(tmp_path / "etc/ascend_install.info", "UserGroup=HwHiAiUser\nDriver_Install_Path_Param=/opt/Ascend\n")
    assert host_check.driver(tmp_path) == ok("driver 25.5.1, no npu-smi")
    put(tmp_path / "usr/local/sbin/npu-smi")
    assert host_check.driver(tmp_path).found == f"driver 25.5.1, npu-smi is {tmp_path}/usr/local/sbin/npu-smi"


def test_device_files_must_be_there_and_open_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("davinci_manager", "hisi_hdc", "davinci0", "davinci1"):
        put(tmp_path / "dev" / name)
    missing = host_check.device_files(tmp_path)
    assert missing.status == "failed" and missing.found == f"missing: {tmp_path}/dev/devmm_svm"
    assert "--device" in missing.hint
    put(tmp_path / "dev/devmm_svm")
    assert host_check.device_files(tmp_path).status == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "davinci1")
    closed = host_check.device_files(tmp_path)
    assert closed.status == "failed" and closed.found.endswith(f"read and write {tmp_path}/dev/davinci1")
    assert "HwHiAiUser" in closed.hint


def test_several_ranks_want_a_user_that_hccl_can_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {ranks: [probe.name for probe in probes.probes("npu:0", ranks)] for ranks in (1, 2)}
    assert [name for name in names[2] if name not in names[1]] == ["user", "all_reduce"]
    assert host_check.user().status == "ok"
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_123)
    found = host_check.user()
    assert found.status == "failed" and "4000000123" in found.found and "error 19" in found.found
    assert "/etc/passwd" in found.hint


def test_cann_is_found_through_its_environment(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "cann-9.1.0"
    environ: dict[str, str] = {}
    assert "install CANN" in host_check.cann(environ, root).hint
    put(root / "usr/local/Ascend/cann/set_env.sh")
    found = host_check.cann(environ, root)
    assert found.status == "failed" and found.hint == f"run `source {root}/usr/local/Ascend/cann/set_env.sh`"
    environ["ASCEND_HOME_PATH"] = str(home)
    assert "is not a folder" in host_check.cann(environ, root).found
    home.mkdir()
    assert "ASCEND_OPP_PATH" in host_check.cann(environ, root).found
    environ["ASCEND_OPP_PATH"] = str(home / "opp")
    assert host_check.cann(environ, root).status == "warning"
    info = home / f"{os.uname().machine}-linux" / "ascend_toolkit_install.info"
    put(info, "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100\n")
    assert host_check.cann(environ, root) == ok(f"CANN 9.1.0 in {home}")
    put(info, "version=8.5.1\n")
    old = host_check.cann(environ, root)
    assert old.status == "failed" and "older than 9.0.0" in old.found and "9.1.0" in old.hint


@pytest.mark.parametrize(
    ("torch", "torch_npu", "cann", "status", "said"),
    [
        ("2.10.0+cpu", "2.10.0.post4", "9.1.0", "ok", "a documented set"),
        ("2.9.0", "2.9.0.post2+gitdc51c2d", "9.0.0", "ok", "a documented set"),
        ("2.10.0+cpu", "2.10.0.post4", "8.5.1", "warning", "documented with CANN 9.1.0"),
        ("2.10.0+cpu", "2.10.0.post4", None, "warning", "documented with CANN 9.1.0"),
        ("2.13.0+cpu", "2.13.0", "9.1.0", "warning", "nothing is known of this set"),
        ("2.11.0+cpu", "2.10.0.post4", "9.1.0", "failed", "belongs to torch 2.10.0"),
    ],
)
def test_versions_that_do_not_belong_together(
    torch: str, torch_npu: str, cann: str | None, status: str, said: str
) -> None:
    found = host_check.matched(torch, torch_npu, cann)
    assert found.status == status and said in found.found
    assert (found.hint == "") == (status == "ok")


def test_an_old_driver_is_said_to_want_no_graphs(tmp_path: Path) -> None:
    assert host_check.graphs(tmp_path).status == "warning"
    info = tmp_path / "usr/local/Ascend/driver/version.info"
    put(info, "Version=25.5.0\n")
    found = host_check.graphs(tmp_path)
    assert found.status == "warning" and "25.5.1" in found.found and "--enforce-eager" in found.hint
    for recent in ("25.5.1", "25.5.2", "26.0.rc1"):
        put(info, f"Version={recent}\n")
        assert host_check.graphs(tmp_path).status == "ok"


def nodes_of_the_backend() -> list[Any]:
    sources = [path.read_text() for path in (Path(cli.__file__).parent / "engine/npu").glob("*.py")]
    return [node for source in sources for node in ast.walk(ast.parse(source))]


def calls_of_torch_npu() -> list[ast.Call]:
    """Every call of an operator of torch_npu in the NPU backend."""
    calls: list[Any] = [node for node in nodes_of_the_backend() if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)]
    return [call for call in named if call.func.value.id == "torch_npu" and call.func.attr.startswith("npu_")]


def test_the_operators_that_are_looked_for_are_those_that_the_backend_calls() -> None:
    calls, assigned = calls_of_torch_npu(), [node for node in nodes_of_the_backend() if hasattr(node, "value")]
    shared = {  # keywords that two calls share
        node.target.id: [key.value for key in node.value.keys]
        for node in assigned
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and isinstance(node.target, ast.Name)
    }
    tuples = {
        node.targets[0].id: len(node.value.elts)
        for node in assigned
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Name)
    }
    assert {call.func.attr for call in calls} == set(host_check.OPERATORS)  # type: ignore[attr-defined]
    for call in calls:
        listed = host_check.OPERATORS[call.func.attr].split()  # type: ignore[attr-defined]
        given: list[Any] = [argument.value if isinstance(argument, ast.Starred) else None for argument in call.args]
        number = sum(1 if name is None else tuples.get(getattr(name, "id", ""), 2) for name in given)  # cos and sin
        keywords = [name for k in call.keywords for name in ([k.arg] if k.arg else shared[k.value.id])]  # type: ignore[attr-defined]
        assert number + len(keywords) == len(listed)
        assert set(keywords) <= set(listed[number:])


# ---- a CPU's compiler --------------------------------------------------------------------------------------------


def test_a_cpu_without_gpp_is_told_what_that_costs_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.engine.cpu import linear  # with torch, which most of these tests do without

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(linear, "why_not_compiled", linear.why_not_compiled.__wrapped__)
    (asked,) = [probe for probe in probes.probes("cpu") if probe.name == "compiler"]
    found = asked.ask()
    assert found.status == "warning" and "3 to 5 times as long" in found.found
    assert found.hint == "there is no g++ (Debian and Ubuntu: apt install g++)"


# ---- Triton's compiler ------------------------------------------------------------------------------------------


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of a host's programs and headers, which has gcc and Python.h."""
    gcc = tmp_path / "gcc"
    gcc.write_text("#!/bin/sh\n")
    gcc.chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cuda_host.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(cuda_host.importlib.util, "find_spec", lambda name: name)
    return tmp_path


def test_a_host_without_a_compiler_or_headers_is_told_what_to_install(
    triton: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda_host.compiler() == ok(f"{triton}/gcc, {triton}/Python.h")
    (triton / "Python.h").unlink()
    assert "python3-dev" in cuda_host.compiler().hint and cuda_host.compiler().status == "failed"
    (triton / "gcc").unlink()
    assert "apt-get install gcc" in cuda_host.compiler().hint and cuda_host.compiler().status == "failed"
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert cuda_host.compiler().found == "CC=/nowhere/cc is not there"
    monkeypatch.delenv("CC")
    monkeypatch.setattr(cuda_host.importlib.util, "find_spec", lambda name: None)
    assert cuda_host.compiler() == failed("Triton is not installed", "pip install triton")
    (asked,) = [probe for probe in probes.probes("cuda") if probe.name == "backend"]
    assert "compiler" in asked.needs
