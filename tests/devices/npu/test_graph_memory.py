"""Graphs have memory of their own in the plan, because their workspaces are in no step's peak."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import read_config
from app.engine.npu.backend import NpuBackend
from app.engine.npu.graph import NpuGraph
from tests.devices.npu.engines import SMALL, engine
from tests.fast.engine.pairs import make_pair

pytestmark = pytest.mark.usefixtures("numerics")


@pytest.mark.parametrize(("heads", "head_dim", "mb"), [(32, 128, 387), (64, 128, 590), (32, 256, 589), (16, 128, 285)])
def test_graphs_have_memory_for_the_workspace_of_attention(tmp_path: Path, heads: int, head_dim: int, mb: int) -> None:
    """`mb` are of the published tiling on 24 cores. Of target and draft the larger needs it, and once."""
    target = target_config(read_config(make_pair(tmp_path, num_heads=heads, head_dim=head_dim).target))
    kept = NpuBackend(torch.device("npu:0")).graph_bytes([replace(target, num_heads=1), target])
    assert mb < kept / 1e6 - (128 << 20) / 1e6 < 1.05 * mb


def test_memory_is_kept_for_graphs_of_a_plan_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, kv_bytes = [], build.kv_bytes

    def noted(*args: Any) -> int:
        kept.append(args[-1])
        return kv_bytes(*args)

    monkeypatch.setattr(build, "kv_bytes", noted)
    monkeypatch.setattr(NpuBackend, "peak_memory", lambda backend, run: (run(), 1000)[1])
    monkeypatch.setattr(NpuBackend, "graph_bytes", lambda backend, decoders: 7 * len(decoders))
    pair = make_pair(tmp_path, **SMALL)
    engine(pair, max_graphs=2)
    engine(pair, enforce_eager=True)
    assert kept == [2 * 1000 + 7 * 2, 1000]


def test_what_graphs_take_and_leave_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each graph is made 32 MiB larger, which is more than its own tensors and later steps take here."""
    held, free, capture = [], [0], NpuBackend.capture

    def larger(backend: NpuBackend, *args: Any) -> NpuGraph:
        held.append(torch.empty(32 << 20, dtype=torch.uint8, device="npu:0"))
        graph = capture(backend, *args)
        free[0] = torch.npu.mem_get_info()[0] >> 20
        return graph

    monkeypatch.setattr(NpuBackend, "capture", larger)
    with caplog.at_level(logging.INFO):
        engine(make_pair(tmp_path, **SMALL), max_graphs=2)
    (said,) = [record.message for record in caplog.records if record.message.startswith("graphs take ")]
    numbers = re.fullmatch(r"graphs take (\d+) MiB, and (\d+) MiB are free on npu:0", said)
    assert numbers, said
    taken, left = map(int, numbers.groups())
    assert 32 * len(held) <= taken < 32 * (len(held) + 2) and free[0] - 32 < left <= free[0]
