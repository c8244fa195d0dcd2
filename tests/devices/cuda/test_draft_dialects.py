"""Drafts with sliding layers on our kernels, interpreted, are the dense reference's, eagerly and from graphs."""

from pathlib import Path

import pytest

from tests.costs import landing_ones
from tests.devices.cuda.engines import GRAPHS, engine, use_kernels
from tests.fast.engine.dialects import DIALECTS
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("one sliding layer, causal inside the block", False),
        pytest.param("sliding and not causal, by is_causal", True, marks=pytest.mark.slow),
        pytest.param("DFlash2, sliding", False, marks=pytest.mark.slow),
        ("DFlash2 with a cap", True),
        ("DSpark, gated", True),
        pytest.param("DSpark, speculators, reduced vocabulary", False, marks=pytest.mark.slow),
    ],
)
def test_drafts_are_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, graphs: bool) -> None:
    use_kernels(monkeypatch)
    pair = DIALECTS[name].make(tmp_path, num_layers=3, taps=(0, 1))
    made = engine(pair, **GRAPHS if graphs else {})
    made.core.overlap = False  # drafts are recorded with the tokens before them, which a step ahead does not know
    blocks = drafted_by(made.core, requests_about_the_window(1, 5))
    assert len(blocks) >= 2
    assert share_of_right_drafts(blocks, pair) == 1.0


@pytest.mark.parametrize("graphs", landing_ones([False, True], (True,)))
def test_drafts_from_separate_pages_are_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Slots in both tables are found on the device. Pages before the window are released while the prompt is read."""
    use_kernels(monkeypatch)
    pair = DIALECTS["use_swa"].make(tmp_path, num_layers=3, taps=(0, 1))
    sizes = {"max_model_len": 160, "max_num_batched_tokens": 32, "page_size": 4}
    made = engine(pair, **sizes, **GRAPHS if graphs else {})
    made.core.overlap = False
    assert made.core.scheduler.draft_pages
    blocks = drafted_by(made.core, requests_about_the_window(1, 5, shared=30))
    assert len(blocks) >= 2 and share_of_right_drafts(blocks, pair) == 1.0
