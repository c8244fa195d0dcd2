"""The real torch_npu on stub libraries: `make test-npu`. Fixtures for tests that run code on device "npu:0".

Where the process was not started on the stubs (another environment, a real Ascend host, no gcc), only what reads the
wheels' files is collected.
"""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.devices.npu.numerics import Numerics


def _on_stubs() -> bool:
    try:
        stubs = ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    return hasattr(stubs, "npu_stub_trace") and importlib.util.find_spec("torch_npu") is not None


ON_STUBS = _on_stubs()
HAS_RANKS = all(importlib.util.find_spec(name) for name in ("msgspec", "zmq"))
if ON_STUBS:
    import torch
    import torch_npu  # noqa: F401

    torch.set_num_threads(1)
    collect_ignore = [] if HAS_RANKS else ["test_ranks.py"]
elif importlib.util.find_spec("torch_npu") is not None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem != "test_wheel_files"]
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # torch_npu 2.13.0 says so at the first `int32 >> 3`, and then does what it should.
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format:UserWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ON_STUBS:
        terminalreporter.line("torch_npu: the real wheel on stub libraries; nothing here ran on an Ascend device")
        if not HAS_RANKS:
            terminalreporter.line("*** WITHOUT SEVERAL RANKS: pip install msgspec pyzmq ***", red=True)
    elif importlib.util.find_spec("torch_npu") is not None:
        terminalreporter.line("*** torch_npu WITHOUT ITS STUBS: ONLY THE WHEELS' SCHEMAS WERE CHECKED ***", red=True)


@pytest.fixture
def numerics() -> Iterator["Numerics"]:
    """Operators on "npu:0" compute, and every rule of docs/npu-contract.md is held."""
    from tests.devices.npu.numerics import Numerics

    with torch.inference_mode(), Numerics() as mode:
        yield mode


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same with the dtype rule lifted, so that an engine's tokens are the CPU's."""
    from app.engine.npu.backend import NpuBackend
    from tests.devices.npu.numerics import Numerics

    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        yield


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run a program in a fresh process with these NPU_STUB_* (and other) variables, and return its output."""

    def run(program: str, **environment: str) -> str:
        lines = f"import torch, torch_npu\ntorch.set_num_threads(1)\n{program}"
        command = [sys.executable, "-c", lines]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1700)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
