"""A draft of every dialect drafts what the dense, unpaged reference drafts, token for token over whole answers."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.config.engine import EngineConfig
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.dflash.report import report
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine
from tests import UNTIMED
from tests.costs import fast_ones
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.dialects import DIALECTS, SLIDES, WINDOW, Dialect, with_a_selector, with_convolutions
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import Pair
from tests.fast.engine.thread_ranks import ThreadRanks

torch.set_num_threads(1)


def engine_of(pair: Pair, **settings: Any) -> Engine:
    sizes = {"max_model_len": 100, "page_size": 4, "max_num_seqs": 3} | settings
    return make_engine(pair.target, pair.draft, **sizes)


@pytest.mark.parametrize("name", fast_ones(DIALECTS, list(DIALECTS)[::3]))
def test_drafts_are_the_references_over_whole_answers(tmp_path, name: str):
    """Contexts are longer than the window, cross pages, and are prefilled in chunks beside decoding rows."""
    pair = DIALECTS[name].make(tmp_path)
    blocks = drafted_by(engine_of(pair, max_num_batched_tokens=29).core, requests_about_the_window(3, 14))
    assert len(blocks) > 20 and max(len(block.token_ids) for block in blocks) > 3 * WINDOW
    assert len({tuple(block.drafts) for block in blocks}) > 10
    assert share_of_right_drafts(blocks, pair) == 1.0


SLIDING = DIALECTS["one sliding layer, causal inside the block"]


def test_drafts_are_the_references_after_preemption_and_prefix_hits(tmp_path):
    pair = SLIDING.make(tmp_path)
    engine = engine_of(pair, kv_pages=40, max_num_seqs=4)
    blocks = drafted_by(engine.core, requests_about_the_window(4, 16, shared=17))
    assert engine.core.scheduler.num_preemptions > 0
    assert engine.core.scheduler.prefix_cache_hits > 0
    assert share_of_right_drafts(blocks, pair) == 1.0


def test_drafts_from_graphs_are_the_references(tmp_path):
    pair = SLIDING.make(tmp_path)
    engine = engine_of(pair, enforce_eager=False, max_graphs=4)
    assert engine.core.runner.graphs.draft_graphs
    assert share_of_right_drafts(drafted_by(engine.core, requests_about_the_window(3, 14)), pair) == 1.0


@pytest.mark.parametrize("graphs", [False, True])
def test_every_row_drafts_if_the_anchors_row_does(tmp_path, graphs: bool):
    pair = DIALECTS["sample from anchor"].make(tmp_path)
    for wanted, count in ((None, 8), (5, 4)):
        engine = engine_of(pair, block_size=wanted, enforce_eager=not graphs, max_graphs=4)
        blocks = drafted_by(engine.core, requests_about_the_window(2, 10))
        assert {len(block.drafts) for block in blocks} == {count}
        assert share_of_right_drafts(blocks, pair, block_size=count) == 1.0


@pytest.mark.parametrize("name", ["speculators", "sliding and not causal, by is_causal", "sample from anchor"])
def test_layers_one_by_one_draft_the_same(tmp_path, name: str):
    pair = DIALECTS[name].make(tmp_path)
    engine = engine_of(pair)
    engine.core.runner.backend.use_operators(0)
    assert share_of_right_drafts(drafted_by(engine.core, requests_about_the_window(2, 10)), pair) == 1.0


@pytest.mark.parametrize("name", ["one sliding layer, causal inside the block", "sliding and not causal, by is_causal"])
def test_a_step_launched_ahead_drafts_the_same(tmp_path, name: str):
    """Its lengths are on the device alone. Wrong drafts would only show in how many are accepted."""
    pair = DIALECTS[name].make(tmp_path, **LUCKY, taps=(1, 2))

    def tokens_of_steps(engine: Engine) -> list[int]:
        counts: list[int] = []
        for request in requests_about_the_window(2, 20):
            request = replace(request, token_ids=tuple(token % 5 for token in request.token_ids))
            engine.core.run([request], lambda step: counts.extend(len(delta.token_ids) for delta in step.deltas))
        return counts

    sizes = {"max_num_seqs": 2, "max_model_len": 100, "page_size": 4}
    with device_lengths():
        ahead = make_engine(pair.target, pair.draft, enforce_eager=False, max_graphs=2, **sizes)
    assert ahead.core.overlap
    found = tokens_of_steps(ahead)
    assert found == tokens_of_steps(make_engine(pair.target, pair.draft, **sizes))
    assert len(set(found)) > 1


@pytest.mark.parametrize("name", fast_ones(DIALECTS, list(DIALECTS)[1::3]))
def test_the_text_with_a_draft_is_the_text_without(tmp_path, name: str):
    pair = DIALECTS[name].make(tmp_path)
    wanted = requests_about_the_window(3, 14)
    plain = make_engine(pair.target, None, max_model_len=100, page_size=4, max_num_seqs=3).core.run(wanted)
    assert engine_of(pair).core.run(wanted) == plain


@pytest.mark.parametrize("name", ["DFlash2, sliding", "DSpark, rnn"])
def test_a_smaller_block_has_the_first_rows_of_the_path(tmp_path, name: str):
    pair = DIALECTS[name].make(tmp_path)
    block = 4 + (name == "DFlash2, sliding")
    blocks = drafted_by(engine_of(pair, block_size=5).core, requests_about_the_window(2, 10))
    assert {len(block.drafts) for block in blocks} == {4}
    assert share_of_right_drafts(blocks, pair, block_size=block) == 1.0


@pytest.mark.parametrize("name", ["DFlash2 with a cap", "DSpark, gated", "DSpark, SpecForge"])
@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_two_ranks_draft_what_the_reference_drafts(tmp_path, name: str, draft_ranks: int):
    pair = DIALECTS[name].make(tmp_path, vocab_size=96)
    sizes = {"max_model_len": 100, "page_size": 4, "max_num_seqs": 3, "device": "cpu", "dtype": "float32"}
    shared = {"tensor_parallel_size": 2, "draft_tensor_parallel_size": draft_ranks}
    ranks = ThreadRanks(EngineConfig(pair.target, pair.draft, **UNTIMED | sizes | shared))
    wanted = [replace(r, token_ids=tuple(t % 96 for t in r.token_ids)) for r in requests_about_the_window(2, 10)]
    blocks = drafted_by(ranks.engine.core, wanted)
    ranks.close()
    ranks.check_alike()
    assert len(blocks) > 5 and share_of_right_drafts(blocks, pair) == 1.0


def test_a_draft_window_is_that_of_sliding_layers(tmp_path):
    def drafts(name: str, config: dict[str, Any], **settings: Any) -> list[list[int]]:
        engine = engine_of(Dialect(config).make(tmp_path / name), **settings)
        return [block.drafts for block in drafted_by(engine.core, requests_about_the_window(2, 10))]

    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW, "is_causal": False}
    assert drafts("full", {}, draft_window=WINDOW) == drafts("sliding", sliding) != drafts("whole", {})
    with pytest.raises(UnsupportedError, match="--draft-window 7 is less than a block of 8 rows"):
        drafts("narrow", {}, draft_window=7)
    with pytest.raises(UnsupportedError, match="--draft-window: it is for a draft, and there is none"):
        make_engine(tmp_path / "full" / "target", None, draft_window=WINDOW)


def test_kernels_of_the_identity_change_no_draft(tmp_path):
    def identity(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        with_convolutions(config, tensors)
        for name, tensor in tensors.items():
            if "_conv." in name:
                tensors[name] = torch.zeros_like(tensor)
                tensors[name][:, 0] = float(name.endswith("base_kernel"))

    def drafts(folder: str, rewrite: Any) -> list[list[int]]:
        pair = Dialect(SLIDES, rewrite).make(tmp_path / folder)
        return [block.drafts for block in drafted_by(engine_of(pair).core, requests_about_the_window(2, 10))]

    assert drafts("plain", lambda *_: None) == drafts("convolved", identity)


def test_tables_of_zeros_leave_the_best_token_of_each_row(tmp_path):
    def zeros(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        with_a_selector(config, tensors)
        tensors["candidate_selector.successor_codebook"].zero_()

    def drafts(folder: str, rewrite: Any) -> list[list[int]]:
        pair = Dialect(SLIDES, rewrite).make(tmp_path / folder)
        return [block.drafts for block in drafted_by(engine_of(pair).core, requests_about_the_window(2, 10))]

    assert drafts("plain", lambda *_: None) == drafts("path", zeros) != drafts("pairs", with_a_selector)


@pytest.mark.parametrize("bit", [0, 1])
def test_ends_that_are_the_targets_own_are_not_kept_twice(tmp_path, bit: int):
    pair = DIALECTS["DeepSpec, rank 0"].make(tmp_path)
    ends = load_file(pair.target / "model.safetensors")
    tensors = load_file(pair.draft / "model.safetensors")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = ends[f"model.{name}" if name.startswith("embed") else name].clone()
        tensors[name].view(torch.int32)[3, 3] ^= bit
    save_file(tensors, pair.draft / "model.safetensors")
    forward = engine_of(pair).core.runner.forward
    kept = [forward.drafter.model.embedding is forward.target.embedding]
    kept.append(forward.drafter.model.lm_head is forward.target.lm_head)
    assert kept == [not bit] * 2


def test_the_masks_own_row_stands_behind_the_anchor(tmp_path):
    pair = DIALECTS["use_swa"].make(tmp_path)
    row = torch.randn(32, generator=torch.Generator().manual_seed(3)) * 0.35
    torch.save({"embedding": row, "mask_token_id": 96}, pair.draft / "mask_embedding.pt")
    blocks = drafted_by(engine_of(pair).core, requests_about_the_window(2, 10))
    assert share_of_right_drafts(blocks, pair) == 1.0


def test_an_unknown_key_is_told_by_its_name_and_known_noise_is_not(tmp_path, caplog):
    keys = {"colour": "red", "warmth": 3}
    pair = Dialect(keys | {"attn_output_gate": True, "_note": 1}).make(tmp_path)
    raw, target = (json.loads((folder / "config.json").read_text()) for folder in (pair.draft, pair.target))
    (warning,) = draft_config(raw, target_config(target)).warnings
    assert warning.endswith(": colour, warmth")
    with caplog.at_level(logging.WARNING):
        engine_of(pair)
    assert f"draft: {warning}" in caplog.messages


def test_a_speculators_drafts_own_key_wins_over_the_copied_one(tmp_path):
    pair = DIALECTS["speculators"].make(tmp_path)
    raw, target = (json.loads((folder / "config.json").read_text()) for folder in (pair.draft, pair.target))
    raw["transformer_layer_config"] |= {"rope_theta": 5e5, "rms_norm_eps": 1e-5}
    decoder = draft_config(raw | {"rope_theta": 7e5}, target_config(target)).decoder
    assert (decoder.rope.theta, decoder.rms_norm_eps) == (7e5, 1e-5)


def test_the_report_of_a_draft_has_all_that_was_read(tmp_path, caplog):
    pair = DIALECTS["speculators"].make(tmp_path)
    with caplog.at_level(logging.DEBUG):
        found = report(engine_of(pair).draft)
    assert found["masks"] == f"1 causal, window {WINDOW}; 1 bidirectional"
    assert (found["layers"], found["taps"], found["vocabulary"]) == ("2", "0,1,2 of 32", "32 of 97")
    assert (found["mask_token"], found["dtype"], found["rope"]) == ("96", "float32", "default, theta 10000")
    assert (found["head"], found["convolutions"]) == ("the best token of each row", "none")
    (line,) = [message for message in caplog.messages if message.startswith("draft: ")]
    assert all(f"{name} {value}" in line for name, value in found.items())


def test_the_report_names_the_head_and_the_convolutions(tmp_path):
    found = report(engine_of(DIALECTS["DFlash2, sliding"].make(tmp_path / "2")).draft)
    assert found["head"] == "DFlash2's selector, a path through 6 candidates"
    assert found["convolutions"] == "in groups of 8 channels"
    found = report(engine_of(DIALECTS["DSpark, rnn"].make(tmp_path / "s")).draft)
    assert found["head"] == "DSpark's rnn head, a path through 16 candidates"
