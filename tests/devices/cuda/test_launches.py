"""docs/cuda.md says what a decode step launches. A launch more in a layer or around layers is a failure here."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.devices.cuda.launches import BLOCK, HEAD, STEPS, calls_of_a_step, rows
from tests.fast.engine.pairs import make_pair

DOCS = ROOT / "docs" / "cuda.md"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("num_seqs", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_the_table_of_launches_is_what_captures_launch(tmp_path: Path, num_seqs: int, step: str) -> None:
    line, _ = rows(tmp_path, num_seqs, step)
    page = DOCS.read_text(encoding="utf-8")
    assert f"\n{HEAD}\n" in page and f"|\n{line}\n" in page, f"put this into docs/cuda.md:\n{line}"


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "whole blocks"])
def test_a_step_is_a_copy_and_a_graph_for_each_forward_and_one_copy_back(tmp_path: Path, draft: bool) -> None:
    pair = make_pair(tmp_path, num_layers=2, draft_layers=1, taps=(0,), block_size=BLOCK)
    forwards = 1 + draft
    assert calls_of_a_step(pair, draft=draft) == {"copy up": forwards, "replay": forwards, "copy down": 1}
