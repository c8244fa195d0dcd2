"""Triton's kernels on a CPU, in Triton's interpreter. TRITON_INTERPRET is read where a kernel is defined, so Triton,
whose own library has kernels, and ours are loaded here, once for the process.
"""

import importlib
import importlib.util
import os
from typing import Any

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
REASON = "TRITON IS NOT INSTALLED HERE: NOTHING OF THE CUDA BACKEND WAS TESTED"

if HAS_TRITON:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    for name in (
        "triton.experimental.gluon",  # the interpreter loads it when it runs
        "app.engine.cuda.backend",
    ):
        importlib.import_module(name)
    launch = importlib.import_module("app.engine.cuda.launch")
    del os.environ["TRITON_INTERPRET"]
    if before is not None:
        os.environ["TRITON_INTERPRET"] = before
    if not launch.INTERPRETED:
        raise RuntimeError("Triton was loaded before tests/devices/cuda, so its kernels would be compiled, for a GPU")
else:
    collect_ignore_glob = ["test_*.py"]
    if os.environ.get("CI"):
        raise RuntimeError(f"{REASON}: pip install '.[dev]'")


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiles that add K from its first number on, because NumPy's library looks at the place of a row."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
        total = d.data.copy()
        for column, row in zip(a.data.T, b.data, strict=True):
            total += column[:, None] * row
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if HAS_TRITON:
        terminalreporter.line("Triton: kernels were interpreted, and compiled for sm_90; nothing here ran on a GPU")
    else:
        terminalreporter.line(f"*** {REASON} ***", red=True)
