"""Compiled drafts with sliding layers, and with a vocabulary of their own, are the dense reference's."""

import shutil
from pathlib import Path

import pytest

from tests.fast.engine.dialects import DIALECTS
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import make_engine

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here to compile with"),
    pytest.mark.usefixtures("kept"),
    pytest.mark.timeout(3600),
]


def test_compiled_drafts_are_the_references(tmp_path: Path) -> None:
    pair = DIALECTS["speculators"].make(tmp_path, num_layers=3, draft_layers=2, taps=(0, 1))
    engine = make_engine(pair.target, pair.draft, compile=True, max_num_seqs=2, max_model_len=100, page_size=4)
    blocks = drafted_by(engine.core, requests_about_the_window(2, 10))
    assert len(blocks) > 8
    assert share_of_right_drafts(blocks, pair) == 1.0
