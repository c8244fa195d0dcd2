"""docs/cuda.md says what a decode step launches. A launch more in a layer or around layers is a failure here."""

from pathlib import Path

import pytest

from tests import ROOT
from tests.devices.cuda.launches import (
    BLOCK,
    DRAW_HEAD,
    EXPERTS_HEAD,
    HEAD,
    RECURRENT_HEAD,
    STEPS,
    calls_of_steps,
    draw_rows,
    layer_in_8_bits,
    mixture_rows,
    recurrent_rows,
    rows,
)
from tests.fast.engine.pairs import make_pair

DOCS = ROOT / "docs" / "cuda.md"


@pytest.mark.parametrize("step", [*[s for s in STEPS if s != "DSpark"], pytest.param("DSpark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_seqs", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_the_table_of_launches_is_what_captures_launch(tmp_path: Path, num_seqs: int, step: str) -> None:
    line, _ = rows(tmp_path, num_seqs, step)
    page = DOCS.read_text(encoding="utf-8")
    assert f"\n{HEAD}\n" in page and f"|\n{line}\n" in page, f"put this into docs/cuda.md:\n{line}"


def test_only_what_attention_returns_is_quantised_by_a_launch_of_its_own(tmp_path: Path) -> None:
    layer = layer_in_8_bits(tmp_path)
    assert layer["quantise"] == 1 and layer["product8"] == 4 and layer["norm"] == 2 and not layer["mm"]
    page = DOCS.read_text(encoding="utf-8")
    assert f"a layer in 8 bits {layer.total()}," in page, f"put {layer.total()} into docs/cuda.md"


def test_the_table_of_experts_is_what_a_mixture_launches() -> None:
    table = "\n".join([EXPERTS_HEAD, "|---" * 3 + "|", *mixture_rows()])
    assert table in DOCS.read_text(encoding="utf-8"), f"put this into docs/cuda.md:\n{table}"


def test_the_table_of_draws_is_what_captures_launch(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    table = "\n".join([DRAW_HEAD, "|---" * 3 + "|", *draw_rows(tmp_path)])
    assert table in page, f"put this into docs/cuda.md:\n{table}"


def test_the_table_of_recurrent_layers_is_what_they_launch(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    table = "\n".join([RECURRENT_HEAD, "|---" * 2 + "|", *recurrent_rows(tmp_path)])
    assert table in page, f"put this into docs/cuda.md:\n{table}"


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "whole blocks"])
def test_a_step_is_a_copy_and_a_graph_for_each_forward_and_draw_and_one_copy_back(tmp_path: Path, draft: bool) -> None:
    """Prefill and mixed steps run their target eagerly. Counts of penalties begin with a prompt's last row."""
    pair = make_pair(tmp_path, num_layers=2, draft_layers=1, taps=(0,), block_size=BLOCK)
    greedy = calls_of_steps(pair, draft=draft)
    drawn = calls_of_steps(pair, draft=draft, temperature=0.7, top_k=20)
    penalised = calls_of_steps(pair, draft=draft, temperature=0.7, presence_penalty=0.5)
    forwards = 1 + draft
    for found, draws, begun in ((greedy, 0, 0), (drawn, 1, 0), (penalised, 1, 1)):
        calls = forwards + draws
        assert found["decode"] == {"copy up": calls, "replay": calls, "copy down": 1}
        assert found[""]["waits"] == found[""]["steps"], "one a step, whatever its kind"
        for kind in ("prefill", "mixed"):
            assert found[kind]["copy up"] == greedy[kind]["copy up"] + draws + begun
            assert (found[kind]["replay"], found[kind]["copy down"]) == (draft and kind == "mixed", 1)
