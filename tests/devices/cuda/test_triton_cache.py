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
for chained in (False, True):
    launch_gap.launched(1, chained=chained)
print(json.dumps([hits, [kernel.asm["ptx"].count("griddepcontrol") for kernel in kernels]]))
"""


def compiled(cache: Path) -> tuple[list[bool], list[int]]:
    """Return whether each kernel was found in a cache, and its instructions of programmatic dependent launch."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    hits, waits = json.loads(done.stdout.splitlines()[-1])
    return hits, waits


def test_a_start_with_an_unpacked_cache_compiles_nothing(tmp_path: Path) -> None:
    cold, file = tmp_path / "cold", tmp_path / triton_cache.NAME
    cold.mkdir()
    assert compiled(cold) == ([False, False], [0, 2]), "the chained one waits, and lets the next one begin"
    triton_cache.pack(cold, file)
    shutil.move(cold, tmp_path / "moved")
    assert triton_cache.unpack(file, tmp_path / "warm") == 2
    assert compiled(tmp_path / "warm") == ([True, True], [0, 2])
