"""A draft of every dialect drafts what the dense, unpaged reference drafts, token for token over whole answers."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.dflash.startup_log import report
from app.engine.load.engine import Engine
from tests.costs import fast_ones
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.dialects import DIALECTS, WINDOW, Dialect
from tests.fast.engine.drafted import drafted_by, requests_about_the_window, share_of_right_drafts
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import Pair

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
    engine.core.runner.backend.use_own(0)
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


def test_an_unknown_key_is_told_by_its_name_and_known_noise_is_not(tmp_path, caplog):
    keys = {"colour": "red", "dflash_config.warmth": 3, "dflash_config.attention_bias": True}
    pair = Dialect(keys | {"attn_output_gate": True, "_note": 1}).make(tmp_path)
    raw, target = (json.loads((folder / "config.json").read_text()) for folder in (pair.draft, pair.target))
    (warning,) = draft_config(raw, target_config(target)).warnings
    assert warning.endswith(": colour, dflash_config.warmth, dflash_config.attention_bias")
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
    (line,) = [message for message in caplog.messages if message.startswith("draft: ")]
    assert all(f"{name} {value}" in line for name, value in found.items())
