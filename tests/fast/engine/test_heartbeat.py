"""An engine counts what it computes, in a file that its parent reads: a long step is told from one that hangs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.engine import heartbeat
from app.engine.cpu import linear
from app.engine.load.engine import Engine
from app.messages import Request
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import make_pair

DRAFT_LAYERS, TARGET_LAYERS = 2, 6


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(heartbeat, "count", heartbeat.count)
    heartbeat.share(tmp_path / "heartbeat")
    yield tmp_path / "heartbeat"
    monkeypatch.undo()
    if linear.compiled(torch.float32):
        linear.set_up(heartbeat=torch.from_numpy(heartbeat.count))


def engine_of(folder: Path) -> Engine:
    pair = make_pair(folder, num_layers=TARGET_LAYERS)
    return make_engine(pair.target, pair.draft, device="cpu", max_model_len=64, max_num_seqs=4, page_size=4)


def beats_of_steps(engine: Engine, file: Path) -> list[int]:
    """Return the beats of each step, as the parent reads them."""
    beats = [0]
    total = int.from_bytes(file.read_bytes(), sys.byteorder)

    def count(_: object) -> None:
        nonlocal total
        before, total = total, int.from_bytes(file.read_bytes(), sys.byteorder)
        beats.append(total - before)

    engine.core.run([Request("r", tuple(range(3, 30)), 12)], count)
    return beats[1:]


@pytest.mark.parametrize("whole", [True, False], ids=["one operator", "layer by layer"])
def test_each_layer_of_target_and_draft_is_a_beat_that_the_parent_reads(
    file: Path, tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole and not linear.compiled(torch.float32):
        pytest.skip("there is no g++")
    if not whole:
        monkeypatch.setattr(linear, "compiled", lambda dtype: None)
        monkeypatch.setattr(linear, "operator_for", lambda dtype: None)
    engine = engine_of(tmp_path)
    prefill, *decodes, last = beats_of_steps(engine, file)
    assert min(prefill, last) >= TARGET_LAYERS, "the last step drafts nothing"
    assert min(decodes) >= TARGET_LAYERS + DRAFT_LAYERS
