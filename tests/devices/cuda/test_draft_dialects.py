"""Drafts with sliding layers on our kernels, interpreted, are the dense reference's, eagerly and from graphs."""

from pathlib import Path

import pytest
import torch

import app.engine.load.engine as build
from app.engine.cuda.backend import CudaBackend
from tests.fast.engine.dialects import DIALECTS
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import make_engine


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("one sliding layer, causal inside the block", False), ("sliding and not causal, by is_causal", True)],
)
def test_drafts_are_the_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, graphs: bool) -> None:
    monkeypatch.setattr(build, "make_backend", lambda device, **_: CudaBackend(torch.device(device)))
    monkeypatch.setattr(build, "check_attention", lambda *_: None)
    monkeypatch.setattr(build, "_warm_up", lambda *_: None)
    pair = DIALECTS[name].make(tmp_path, num_layers=3, taps=(0, 1))
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory": 1 << 20, "max_graphs": 2}
    engine = make_engine(pair.target, pair.draft, enforce_eager=not graphs, **sizes)
    engine.core.overlap = False  # drafts are recorded with the tokens before them, which a step ahead does not know
    blocks = drafted_by(engine, requests_about_the_window(1, 5))
    assert len(blocks) >= 2
    assert share_of_right_drafts(blocks, pair) == 1.0
