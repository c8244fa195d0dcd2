"""`--draft-quantization int8`: a draft of every kind drafts nearly what it did, and no text changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.config.engine import EngineConfig
from app.engine.cpu.backend import CpuBackend
from app.engine.dflash.model import DFlashModel
from app.engine.load.engine import Engine
from app.engine.quantised import QuantisedWeight
from app.messages import Request
from tests import UNTIMED
from tests.costs import fast_ones
from tests.fast.engine.dialects import DIALECTS
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import LUCKY, make_engine, random_prompts, run_engine
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.quantised import is_linear
from tests.fast.engine.thread_ranks import ThreadRanks

SIZES = {"max_model_len": 100, "page_size": 4, "max_num_seqs": 3}
NEARLY_ALL = 0.75
"""Share of drafts of random weights that int8 leaves as they are. Wrong scales or rows leave hardly any."""


def engine_of(pair: Pair, **settings: Any) -> Engine:
    return make_engine(pair.target, pair.draft, **SIZES | {"draft_quantization": "int8"} | settings)


def draft_of(engine: Engine) -> DFlashModel:
    drafter = engine.core.runner.forward.drafter
    assert drafter
    return drafter.model


@pytest.mark.parametrize("name", fast_ones(DIALECTS, list(DIALECTS)[2::3]))
def test_a_draft_of_every_kind_drafts_nearly_the_same_and_changes_no_text(tmp_path: Path, name: str) -> None:
    pair = DIALECTS[name].make(tmp_path)
    wanted = requests_about_the_window(3, 14)
    engine = engine_of(pair)
    draft = draft_of(engine)
    layer = draft.layers[0]
    products = [layer.attention.qkv, layer.attention.o, layer.gate_up, layer.down, draft.lm_head]
    assert all(isinstance(weight, QuantisedWeight) for weight in products)
    blocks = drafted_by(engine.core, wanted)
    assert len(blocks) > 20 and share_of_right_drafts(blocks, pair) >= NEARLY_ALL
    plain = make_engine(pair.target, None, **SIZES).core.run(wanted)
    assert engine_of(pair).core.run(wanted) == plain


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"enforce_eager": False, "max_graphs": 4}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_texts_are_those_without_a_draft(tmp_path: Path, dtype: str, settings: dict[str, Any]) -> None:
    pair = make_pair(tmp_path, **LUCKY)
    sizes = {"page_size": 4, "max_model_len": 256, "max_num_seqs": 4, "dtype": dtype, "batch_invariant": True}
    asked = [Request(str(i), p.token_ids, 24) for i, p in enumerate(random_prompts(pair.vocab_size, 4))]
    plain = run_engine(make_engine(pair.target, None, **sizes | settings), asked)
    drafted = run_engine(engine_of(pair, **sizes | settings), asked)
    assert drafted.texts == plain.texts and drafted.verify_steps


@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_two_ranks_draft_nearly_what_the_reference_drafts(tmp_path: Path, draft_ranks: int) -> None:
    pair = DIALECTS["DSpark, gated"].make(tmp_path, vocab_size=96)
    shared = {"tensor_parallel_size": 2, "draft_tensor_parallel_size": draft_ranks, "draft_quantization": "int8"}
    ranks = ThreadRanks(
        EngineConfig(pair.target, pair.draft, **UNTIMED | SIZES | {"device": "cpu", "dtype": "float32"} | shared)
    )
    wanted = [replace(r, token_ids=tuple(t % 96 for t in r.token_ids)) for r in requests_about_the_window(2, 10)]
    blocks = drafted_by(ranks.engine.core, wanted)
    ranks.close()
    ranks.check_alike()
    assert len(blocks) > 5 and share_of_right_drafts(blocks, pair) >= NEARLY_ALL


@pytest.mark.parametrize("own_head", [False, True])
def test_its_memory_is_told_before_it_is_loaded_and_after(tmp_path: Path, caplog, own_head: bool) -> None:
    """With the head in int8, which is a copy of the target's or the draft's own."""
    pair = make_pair(tmp_path, vocab_size=20_000, hidden_size=128, intermediate_size=2048, own_head=own_head)
    with caplog.at_level("INFO"):
        engine = engine_of(pair)
    stored = load_file(pair.draft / "model.safetensors")
    rounded = sum(tensor.numel() + 4 * len(tensor) for name, tensor in stored.items() if is_linear(name))
    others = sum(tensor.nbytes for name, tensor in stored.items() if not is_linear(name))
    head = pair.vocab_size * (128 + 4)
    assert f"and {(rounded + others + head) >> 20} MiB of {pair.draft}" in caplog.text
    assert f"draft: {(rounded + head) >> 20} MiB of weights in int8, with a copy of its head" in caplog.text
    assert engine.core.runner.backend.quantised_bytes == rounded + head


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_draft_stays_as_it_is_where_the_device_does_not_multiply_by_8_bits_and_the_log_says_so(
    tmp_path: Path, caplog, monkeypatch, kind: str
) -> None:
    """A CPU never multiplies by fp8, and by int8 only with its compiled products."""
    if kind == "int8":
        monkeypatch.setattr(CpuBackend, "multiplies", lambda self, weight: False)
    pair = DIALECTS["use_swa"].make(tmp_path)
    with caplog.at_level("WARNING"):
        engine = engine_of(pair, draft_quantization=kind)
    assert f"--draft-quantization {kind}: left out, because cpu does not multiply by it" in caplog.text
    draft, plain = draft_of(engine), draft_of(engine_of(pair, draft_quantization="none"))
    assert draft.lm_head is engine.core.runner.forward.target.lm_head
    assert torch.equal(draft.layers[0].down, plain.layers[0].down)


@pytest.mark.parametrize(
    ("asked", "dtype", "is_rounded"),
    [("auto", "bfloat16", True), ("auto", "float32", False), ("none", "bfloat16", False), ("int8", "float32", True)],
)
def test_auto_rounds_a_draft_on_a_cpu_in_bfloat16_only(
    tmp_path: Path, asked: str, dtype: str, is_rounded: bool
) -> None:
    pair = make_pair(tmp_path, **LUCKY)
    draft = draft_of(engine_of(pair, draft_quantization=asked, dtype=dtype))
    assert isinstance(draft.layers[0].attention.qkv, QuantisedWeight) == is_rounded
