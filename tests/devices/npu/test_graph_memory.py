"""Graphs have memory of their own in the plan, because their workspaces are in no step's peak."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.engine.npu.backend import NpuBackend
from tests.devices.npu.engines import SMALL, engine
from tests.fast.engine.pairs import make_pair

pytestmark = pytest.mark.usefixtures("numerics")


def test_half_a_gigabyte_is_kept_for_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, kv_bytes = [], build.kv_bytes

    def noted(*args: Any) -> int:
        kept.append(args[-1])
        return kv_bytes(*args)

    monkeypatch.setattr(build, "kv_bytes", noted)
    monkeypatch.setattr(NpuBackend, "peak_memory", lambda backend, run: (run(), 1000)[1])
    pair = make_pair(tmp_path, **SMALL)
    engine(pair, max_graphs=2)
    engine(pair, enforce_eager=True)
    assert kept == [2 * 1000 + (1 << 29), 1000]


def test_what_graphs_take_and_leave_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine(make_pair(tmp_path, **SMALL), max_graphs=2)
    (said,) = [record.message for record in caplog.records if record.message.startswith("graphs take ")]
    free = torch.npu.mem_get_info()[0] >> 20
    assert said.endswith(" MiB are free on npu:0") and abs(int(said.split()[5]) - free) < 256
