"""A hybrid target in the engine: DFlash on == off == the reference, and its recurrent states are those of its tokens.

test_state_rollback.py tests one layer, tests/exhaustive/test_hybrid.py compares with Transformers live.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import read_config
from app.engine.checkpoint.read import check_checkpoints
from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine
from app.engine.load.made_up_steps import made_up
from app.engine.load.memory import SIZES_ONLY
from app.engine.models.kv_pool import bytes_per_token
from app.engine.models.state_pool import StatePool
from app.engine.schedule.costs import Shape
from app.messages import Request
from tests.costs import fast_ones
from tests.fast.engine.bf16_margin import drafted, measured
from tests.fast.engine.feeder import Feeder, assert_logits_close
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.hybrid_reference import HybridReference, hybrid_subject
from tests.fast.engine.lossless import LUCKY, Case, Subject, assert_lossless, make_engine, random_prompts
from tests.fast.engine.pairs import Pair
from tests.fast.engine.planted import PlannedRun
from tests.fast.engine.planted import make_engine as make_planted_engine
from tests.fast.engine.planted_faults import NAN, PHASES, Run, during
from tests.fast.engine.reference import features, greedy, teacher_forced
from tests.fast.engine.state_books import check_state

torch.set_num_threads(1)
BLOCK = 8
ANSWER = 36


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_hybrid_pair(tmp_path_factory.mktemp("hybrid"), seed=2, block_size=BLOCK, max_position_embeddings=128)


@pytest.fixture(scope="module")
def reference(pair: Pair) -> HybridReference:
    return HybridReference(pair.target)


def prompt_of(length: int) -> list[int]:
    draw = Random(length)
    return [draw.randrange(97) for _ in range(length)]


@pytest.fixture(scope="module")
def text(reference: HybridReference) -> Any:
    """A prompt of that length and what the target says after it, a block further than any answer goes."""

    @cache
    def make(length: int) -> tuple[int, ...]:
        return (*prompt_of(length), *greedy(reference, prompt_of(length), ANSWER + BLOCK))

    return make


# Logits


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_rows_are_the_references_however_the_text_is_cut(tmp_path, chunk):
    pair = make_hybrid_pair(tmp_path, seed=2, experts=0 if chunk in (1, 64) else 8)
    tokens, reference = prompt_of(70), HybridReference(pair.target)
    feeder = Feeder(make_engine(pair.target, pair.draft, page_size=4, max_model_len=96, max_num_seqs=2))
    seq = feeder.feed_whole(tokens, chunk)
    assert_logits_close(feeder.logits(seq), teacher_forced(reference, tokens))
    assert_logits_close(feeder.features(seq), features(reference, tokens, pair.taps))


def test_decoding_and_prefilling_in_turn_give_each_sequence_its_own_logits(pair: Pair, reference: HybridReference):
    feeder = Feeder(make_engine(pair.target, pair.draft, page_size=4, max_model_len=96, max_num_seqs=3))
    first, second, third = seqs = [feeder.sequence(prompt_of(length)) for length in (24, 17, 9)]
    feeder.feed(prefills=[(first, 7), (second, 3)])
    feeder.feed(decodes=[second], prefills=[(first, 4), (third, 5)])
    feeder.feed(decodes=[first, second, third])
    feeder.feed(decodes=[third], prefills=[(second, 20), (first, 20)])
    for seq in seqs:
        wanted = teacher_forced(reference, seq.token_ids)[: seq.num_computed]
        assert_logits_close(feeder.logits(seq), wanted)


@pytest.mark.parametrize("experts", [0, 8])
def test_every_layout_of_a_checkpoint_is_the_same_model(tmp_path: Path, experts: int):
    """The text part of a multimodal checkpoint, experts one by one or fused, and the columns of Qwen3-Next."""
    shapes: dict[str, dict[str, bool]] = {"fused": {}, "part": {"multimodal": True}}
    if experts:
        shapes |= {"one by one": {"fused": False}, "Next": {"grouped": True}}
    pairs = {
        name: make_hybrid_pair(tmp_path / name, experts=experts, tied=not experts, **shape)
        for name, shape in shapes.items()
    }
    request = Request("r", tuple(prompt_of(12)), 16)
    said = [make_engine(pair.target, pair.draft, max_model_len=64).core.run([request])["r"] for pair in pairs.values()]
    assert said == [greedy(HybridReference(pairs["part"].target), prompt_of(12), 16)] * len(pairs)


@pytest.mark.parametrize("shape", [{}, {"multimodal": True}, {"experts": 8, "grouped": True}], ids=str)
def test_its_headers_pass_before_the_server_listens(tmp_path: Path, shape: dict[str, Any]):
    pair = make_hybrid_pair(tmp_path, **shape)
    (pair.target / "tokenizer.json").write_text("{}")
    check_checkpoints(EngineConfig(pair.target, pair.draft))


# bfloat16

IN_FLOAT32 = ("input_norm", "post_attention_norm", "q_norm", "k_norm", "norm", "a_log", "dt_bias")


def test_norms_decays_and_states_stay_in_float32_in_a_narrower_dtype(pair: Pair):
    wide, narrow = (make_engine(pair.target, max_model_len=64, dtype=kind) for kind in ("float32", "bfloat16"))
    parameters = dict(wide.core.runner.forward.target.named_parameters())
    for name, found in narrow.core.runner.forward.target.named_parameters():
        if name.rpartition(".")[2] in IN_FLOAT32:
            assert torch.equal(found, parameters[name]), f"{name} is rounded"
        else:
            assert found.dtype == torch.bfloat16, name
    for _, _, memory in recurrent_layers(narrow):
        assert memory.matrix.dtype == torch.float32
        assert memory.conv.dtype == memory.pending.dtype == torch.bfloat16, "the layer's inputs are in that dtype"


def test_in_bfloat16_drafts_hit_and_a_difference_is_within_that_of_other_operators(tmp_path: Path, monkeypatch):
    """The margin is what logits differ by between our operators and PyTorch's, which a timing may choose by rows."""
    shape = LUCKY | {"dtype": torch.bfloat16}
    pair = make_hybrid_pair(tmp_path, **shape)
    prompts = [replace(p, token_ids=p.token_ids[:30], max_tokens=16) for p in random_prompts(5, 4)]
    subject = Subject("bf16", pair.target, pair.draft, prompts, HybridReference)
    sizes: dict[str, Any] = {"page_size": 4, "max_model_len": 64, "dtype": "bfloat16"}

    found, case = measured(subject, monkeypatch, 30, **sizes), Case(concurrency=4, page_size=4, block_size=8)
    (on,), differences = drafted(subject, case, (4,), **sizes)
    print(f"logits differ by {found:.3g} between operators; {[str(each) for each in differences]}")
    assert 0 < found < 0.25 and all(each.margin <= 2 * found for each in differences)
    assert on.acceptance_length > 1.1


# On == off


CASES = [
    Case(concurrency=4, page_size=1, chunked=True, preempted=True, temperature=None, sampling="all"),
    Case(concurrency=4, page_size=16, speculation="half", block_size=4, temperature=0.7, path="graphs"),
    Case(concurrency=4, page_size=4, block_size=16, path="overlap", chunked=True),
]


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return hybrid_subject(tmp_path_factory.mktemp("lucky"))


def test_plain_decoding_is_the_references(lucky: Subject):
    assert_lossless(lucky.compare(list(lucky.plain(Case())), Case()))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dflash_changes_no_token(lucky: Subject, case: Case):
    run = lucky.run(case)
    assert_lossless(lucky.compare(run.texts, case))
    assert run.verify_steps > 0
    assert (run.preemptions > 0) == case.preempted


# Every accepted count


def recurrent_layers(engine: Engine) -> Iterator[tuple[int, Any, Any]]:
    """(number, layer, its memory) of each Gated DeltaNet."""
    target, pool = engine.core.runner.forward.target, engine.core.runner.pools[0]
    assert target.config.gated_delta is not None
    for number in target.config.gated_delta.layers:
        yield number, target.layers[number].attention, pool.layers[number]


@torch.inference_mode()
def check_states(engine: Engine, reference: HybridReference) -> int:
    """Hold what each running sequence's next step begins with against a recomputation. Return how many were checked."""
    checked = 0
    for seq in engine.core.scheduler.running:
        if not seq.num_computed:
            continue
        wanted = reference(torch.tensor([seq.token_ids[: seq.num_computed]])).cache
        check_state(engine, seq.state_slot, seq.num_computed, wanted)
        checked += 1
    return checked


def check_slots(engine: Engine) -> None:
    """Each running sequence has a slot of its own, at most one has another for its next chunk, and no slot is lost."""
    scheduler = engine.core.scheduler
    scheduler.check()
    assert all(seq.state_slot for seq in scheduler.running)
    assert scheduler.states.num_used <= len(scheduler.running) + 1


@pytest.mark.parametrize("cut", fast_ones(range(BLOCK), (4,)))
def test_every_accepted_count_says_the_text_and_leaves_its_state(pair, reference, text, cut):
    engine = make_planted_engine(pair, page_size=4, max_model_len=64, max_num_seqs=3)
    texts = {f"r{length}": list(text(length)) for length in (1, 9)}
    run = PlannedRun(engine, texts, cut)
    for length in (1, 9):
        run.add(Request(f"r{length}", tuple(prompt_of(length)), 10))
    while engine.core.has_work:
        run.step()
        check_slots(engine)
        check_states(engine, reference)
    assert run.emitted == {f"r{length}": texts[f"r{length}"][length : length + 10] for length in (1, 9)}
    assert engine.core.scheduler.states.num_used == 0


def test_luck_preemption_and_prompts_in_chunks_leave_the_state_of_the_tokens(pair, reference, text):
    sizes = {"max_model_len": 48, "num_pages": -(-(48 + 2 * BLOCK) // 4), "max_num_batched_tokens": 3 * BLOCK}
    engine = make_planted_engine(pair, page_size=4, max_num_seqs=3, **sizes)
    lengths = (29, 5, 17, 26)
    texts = {f"r{length}": list(text(length)) for length in lengths}
    run = PlannedRun(engine, texts, lambda name, n: Random(f"{name} {n}").randrange(BLOCK))
    for length in lengths:
        run.add(Request(f"r{length}", tuple(prompt_of(length)), 18))
    checked = 0
    while engine.core.has_work:
        run.step()
        check_slots(engine)
        checked += check_states(engine, reference)
    assert run.num_preemptions > 0 and checked > 10
    assert run.emitted == {f"r{n}": list(text(n)[n : n + 18]) for n in lengths}


# Faults


def requests(count: int, max_tokens: int = 14) -> list[Request]:
    return [flat_request(f"r{i}", tuple(prompt_of(5 + 6 * i)), max_tokens) for i in range(count)]


def faulty(pair: Pair, **settings: Any) -> Engine:
    sizes = {"page_size": 4, "max_model_len": 96, "max_num_seqs": 4, "enforce_eager": True}
    return make_engine(pair.target, pair.draft, **sizes | settings)


def said(reference: HybridReference, asked: list[Request]) -> dict[str, list[int]]:
    return {r.request_id: greedy(reference, list(r.token_ids), r.max_tokens) for r in asked}


HYBRID_PHASES = PHASES | {"behind a layer": during("forward", behind=True, of=lambda forward: forward.target.layers[0])}


@pytest.mark.parametrize(
    "phase",
    fast_ones(
        ["build", "target", "behind a layer", "behind target", "behind verify", "read"],
        ("behind a layer", "behind target", "read"),
    ),
)
def test_a_batch_that_fails_is_run_in_halves_and_no_row_is_committed_twice(pair, reference, phase, monkeypatch):
    good, engine = requests(3), faulty(pair)
    run = Run(engine, good).until(4)
    HYBRID_PHASES[phase](monkeypatch, engine.core)
    run.texts["bad"] = []
    engine.core.add(flat_request("bad", (9, 8, 7), 9))
    run.step()
    check_states(engine, reference)
    run.to_the_end()
    assert list(run.errors()) == ["bad"]
    del run.texts["bad"]
    assert run.texts == said(reference, good)


def test_a_batch_that_fails_with_the_middle_of_a_prompt_repeats_its_chunk(pair, reference, monkeypatch):
    good = flat_request("good", tuple(prompt_of(60)), 9)
    engine = faulty(pair, max_num_batched_tokens=32, max_num_seqs=2)
    run = Run(engine, [good])
    during("verify", behind=True)(monkeypatch, engine.core)
    run.texts["bad"] = []
    engine.core.add(flat_request("bad", (9, 8, 7), 9))
    run.step()
    assert run.scheduler.running[0].num_computed == 32 and check_states(engine, reference) == 1
    run.step()
    assert list(run.errors()) == ["bad"] and check_states(engine, reference) == 1
    check_slots(engine)
    run.to_the_end()
    assert run.texts["good"] == said(reference, [good])["good"]


def test_nan_in_a_state_ends_that_sequence_alone_and_its_slot_serves_the_next(pair: Pair, reference: HybridReference):
    good = requests(6)
    engine = faulty(pair, max_num_seqs=3)
    run = Run(engine, good).until(4)
    bad = run.sequence("r1")
    with torch.inference_mode():
        for _, _, memory in recurrent_layers(engine):
            memory.matrix[bad.state_slot] = NAN
    run.to_the_end()
    assert list(run.errors()) == ["r1"] and "not finite" in run.errors()["r1"]
    wanted = said(reference, good)
    partial = run.texts.pop("r1")
    assert partial == wanted.pop("r1")[: len(partial)]
    assert run.texts == wanted, "later ones had its slot"


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_a_step_that_fails_behind_a_launch_recomputes_its_sequences(lucky, failing, monkeypatch):
    """The step ahead has committed the failed one's rows, so this cannot be repeated from the state."""
    case = Case(concurrency=4, page_size=4, block_size=8, path="overlap")
    engine = lucky.engine(case)
    launch, kinds = engine.core.launch, list[str]()

    def fails_once(batch: Any) -> Any:
        pending = launch(batch)
        kinds.append(batch.kind)
        if kinds.count(failing) == 1 and kinds[-1] == failing:
            pending.read = lambda: 1 / 0
        return pending

    monkeypatch.setattr(engine.core, "launch", fails_once)
    emitted = engine.core.run(lucky.requests(case))
    texts = [emitted[request.request_id] for request in lucky.requests(case)]
    assert_lossless(lucky.compare(texts, case))
    assert engine.core.scheduler.num_preemptions > 0 and not engine.core.overlap
    assert engine.core.scheduler.num_faults == 0


# Sizes


QWEN3_5_27B = GatedDeltaConfig(
    layers=tuple(i for i in range(64) if (i + 1) % 4),
    conv_kernel=4,
    num_k_heads=16,
    num_v_heads=48,
    k_head_dim=128,
    v_head_dim=128,
)


def test_pending_rows_of_a_27b_take_less_than_16_mb_a_sequence():
    pool = StatePool(QWEN3_5_27B, 1, 16, torch.bfloat16, SIZES_ONLY)
    print(f"27B: {pool.slot_bytes:,} bytes of state and {pool.pending_bytes:,} of pending rows a sequence")
    assert pool.pending_bytes == 48 * 16 * (10240 + 96) * 2 < 16_000_000
    assert pool.slot_bytes == 48 * (48 * 128 * 128 * 4 + 3 * 10240 * 2 + 4)
    assert pool.nbytes == 2 * (pool.slot_bytes + pool.pending_bytes)


def test_kv_is_counted_for_layers_with_attention_alone(pair: Pair):
    config = target_config(read_config(pair.target))
    assert config.num_kv_layers == 1
    assert bytes_per_token(config, torch.float32) == 2 * config.num_kv_heads * config.head_dim * 4


def test_timed_steps_touch_a_state_for_each_sequence_and_leave_no_trace(pair: Pair, reference: HybridReference):
    engine = make_engine(pair.target, pair.draft, page_size=4, max_model_len=96, max_num_seqs=2)
    batch = made_up(Shape(2, 2, BLOCK, BLOCK), engine.sizes)
    assert [rows.seq.state_slot for rows in batch.decodes] == [1, 2]
    engine.core.launch(batch).read()
    asked = requests(2)
    assert engine.core.run(asked) == said(reference, asked)


def test_without_a_prefix_cache_nothing_is_found(pair: Pair):
    engine = make_engine(pair.target, pair.draft, page_size=4, max_model_len=64, prefix_caching=False)
    request = Request("r", tuple(prompt_of(24)), 8)
    texts = [engine.core.run([request]) for _ in range(2)]
    assert texts[0] == texts[1]
    assert engine.core.scheduler.prefix_cache_queries == engine.core.scheduler.prefix_cache_hits == 0


def test_states_that_do_not_fit_are_refused_with_the_number(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.engine.device.torch.host_memory", lambda: (1 << 20, 1 << 20))
    with pytest.raises(UnsupportedError, match="recurrent state of --max-num-seqs 500 takes"):
        make_engine(pair.target, None, max_model_len=64, max_num_seqs=500)


# Refusals


MOE = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


def changed(folder: Path, **fields: Any) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()) | fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must be linear_attention and full_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types has .* not supported yet"),
        ({"layer_types": [["linear_attention"]] * 4}, "layer_types has .* not supported yet"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is the share of a head"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1: it must be at least 2"),
        ({"layer_types": ["full_attention"]}, "must name num_hidden_layers = 4 layers"),
        ({"linear_num_value_heads": 3}, "no multiple of linear_num_key_heads"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads is missing"),
        ({"num_experts": 8}, "num_experts = 8 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic' is not supported yet"),
        ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp' is not supported yet"),
        ({**MOE, "norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ({**MOE, "mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported"),
        ({**MOE, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ({"text_config": 3}, "text_config must be an object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_run_wrongly_is_refused_by_name(pair: Pair, fields: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        target_config(changed(pair.target, **fields))


def test_a_text_part_that_contradicts_the_whole_is_refused(pair: Pair):
    whole = {"model_type": "qwen3_5", "text_config": changed(pair.target, dtype="float16"), "dtype": "bfloat16"}
    with pytest.raises(UnsupportedError, match=r"dtype is 'bfloat16' in config\.json and 'float16'"):
        target_config(whole)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, 1), (False, True, 0), (None, True, 1), (None, None, 0)]
)
def test_the_whole_decides_if_its_head_is_the_embedding_and_else_its_text_part(
    pair: Pair, outer: bool | None, inner: bool | None, tied: bool
):
    text_part = changed(pair.target, tie_word_embeddings=inner)
    whole = {"model_type": "qwen3_5", "text_config": text_part, "tie_word_embeddings": outer}
    assert target_config(whole).tie_word_embeddings == tied
    del whole["tie_word_embeddings"]
    assert target_config(whole).tie_word_embeddings == bool(inner)


def test_a_quantisation_of_the_whole_is_refused_for_its_text_part(pair: Pair):
    awq = {"quantization_config": {"quant_method": "awq"}}
    whole = {"model_type": "qwen3_5", "text_config": changed(pair.target), **awq}
    with pytest.raises(UnsupportedError, match=r"quantization_config\.quant_method = 'awq' is not supported yet"):
        target_config(whole)


def test_a_field_that_is_null_has_the_familys_own_value(pair: Pair):
    nulls = dict.fromkeys(["attn_output_gate", "attention_bias", "quantization_config"])
    assert target_config(changed(pair.target, **nulls)) == target_config(changed(pair.target))


def test_without_layer_types_every_fourth_layer_has_attention_and_a_quarter_of_its_head_turns(pair: Pair):
    raw = changed(pair.target, num_hidden_layers=8)
    del raw["layer_types"], raw["rope_parameters"]["partial_rotary_factor"]
    config = target_config(raw)
    assert config.gated_delta is not None and config.gated_delta.layers == (0, 1, 2, 4, 5, 6)
    assert config.rope.dim == config.head_dim // 4


def test_float16_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="--dtype float16: a target with recurrent layers"):
        make_engine(pair.target, None, dtype="float16")
