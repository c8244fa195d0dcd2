"""Kernels that Triton compiled for an H200 are found in a packed cache, wherever it is unpacked. It takes no GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tools.report import triton_cache

PROGRAM = """
import json
import triton
from tests.devices.cuda.compiled import compile_only
from tools.lab import launch_gap

kernels, hits = compile_only(), []
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
launch_gap.launched(1)
print(json.dumps([hits, len(kernels)]))
"""


def compiled(cache: Path) -> list[bool]:
    """Return whether each kernel was found in a cache."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    hits, count = json.loads(done.stdout.splitlines()[-1])
    assert count == 1
    return list(hits)


def test_a_start_with_an_unpacked_cache_compiles_nothing(tmp_path: Path) -> None:
    cold, file = tmp_path / "cold", tmp_path / triton_cache.NAME
    cold.mkdir()
    assert compiled(cold) == [False]
    triton_cache.pack(cold, file)
    shutil.move(cold, tmp_path / "moved")
    assert triton_cache.unpack(file, tmp_path / "warm") == 1
    assert compiled(tmp_path / "warm") == [True]
