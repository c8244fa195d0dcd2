"""The references agree with themselves, with Transformers, and notice the mistakes they are there to catch."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, apply_rotary_pos_emb

from tests.exhaustive.live import load_transformers
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.reference import (
    ReferenceDraft,
    default_taps,
    dflash_greedy,
    dflash_sampled,
    features,
    first_difference,
    greedy,
    gumbel,
    gumbel_of,
    margin,
    mix,
    perturbed,
    sampled,
    teacher_forced,
    token_hashes,
)

PROMPT = [5, 9, 2, 60, 33, 71, 8]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), seed=3)


@pytest.fixture(scope="module")
def target(pair: Pair) -> Qwen3ForCausalLM:
    return load_transformers(pair.target)


@pytest.fixture(scope="module")
def draft(pair: Pair, target: Qwen3ForCausalLM) -> ReferenceDraft:
    return ReferenceDraft(pair.draft, target)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


# Pairs


@pytest.mark.parametrize(
    ("tied", "shards", "rope_dialect"),
    [(False, 1, "rope_theta"), (True, 3, "rope_theta"), (True, 1, "rope_parameters"), (False, 3, "rope_parameters")],
)
def test_target_files_load_in_transformers_with_nothing_missing(tmp_path, tied, shards, rope_dialect):
    pair = make_pair(tmp_path, tied=tied, shards=shards, rope_dialect=rope_dialect, rope_theta=5000.0)
    model, info = Qwen3ForCausalLM.from_pretrained(pair.target, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    for name, tensor in all_tensors(pair.target).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    tied_now = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied_now == tied


@pytest.mark.parametrize(
    "dialect",
    [
        {"shards": 3},
        {"draft_prefix": "model."},
        {"block_size_in": "dflash_config"},
        {"rope_dialect": "rope_parameters"},
        {"shards": 2, "draft_prefix": "model.", "block_size_in": "dflash_config", "rope_dialect": "rope_parameters"},
    ],
    ids=str,
)
def test_every_dialect_holds_the_same_tensors_and_drafts_the_same(tmp_path, pair, target, draft, dialect):
    other = make_pair(tmp_path, seed=3, **dialect)
    assert all(torch.equal(t, all_tensors(other.target)[name]) for name, t in all_tensors(pair.target).items())
    ours, theirs = all_tensors(pair.draft), all_tensors(other.draft)
    prefix = dialect.get("draft_prefix", "")
    assert {prefix + name for name in ours} == set(theirs)
    assert all(torch.equal(t, theirs[prefix + name]) for name, t in ours.items())
    context = features(target, PROMPT[:-1], pair.taps)
    hidden = ReferenceDraft(other.draft, load_transformers(other.target)).block_hidden(context, PROMPT[-1], len(PROMPT))
    assert torch.equal(hidden, draft.block_hidden(context, PROMPT[-1], len(PROMPT)))


def test_bf16_files_hold_bf16_and_run_near_the_fp32_reference(tmp_path, pair, target, draft):
    low = make_pair(tmp_path, seed=3, dtype=torch.bfloat16)
    assert {t.dtype for t in all_tensors(low.target).values()} == {torch.bfloat16}
    low_target = load_transformers(low.target, dtype=torch.bfloat16)
    context = features(low_target, PROMPT[:-1], low.taps)
    assert context.dtype == torch.bfloat16
    logits = ReferenceDraft(low.draft, low_target).block_logits(context, PROMPT[-1], len(PROMPT))
    expected = draft.block_logits(features(target, PROMPT[:-1], pair.taps), PROMPT[-1], len(PROMPT))
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_random_targets_wander_and_rounding_stays_below_the_lossless_margin(tmp_path):
    for seed in range(4):
        target = load_transformers(make_pair(tmp_path / str(seed), seed=seed, tied=seed % 2 == 1).target)
        text = PROMPT + greedy(target, PROMPT, 40)
        assert len(set(text[len(PROMPT) :])) >= 5, text
        logits = teacher_forced(target, text)
        best = logits.topk(2).values
        assert 0.1 < (best[:, 0] - best[:, 1]).median() < 3
        with torch.no_grad():
            cache, step_by_step = DynamicCache(config=target.config), []
            for token in text:
                out = target(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                step_by_step.append(out.logits[0, -1])
        assert (torch.stack(step_by_step) - logits).abs().max() < 5e-5


def test_a_draft_that_brings_its_own_embedding_and_head_keeps_them(tmp_path, target, draft):
    own = make_pair(tmp_path, seed=3, own_embedding=True, own_head=True, draft_prefix="model.")
    loaded = ReferenceDraft(own.draft, target)
    tensors = all_tensors(own.draft)
    assert torch.equal(loaded.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(loaded.head, tensors["lm_head.weight"])
    assert torch.equal(draft.embedding, target.model.embed_tokens.weight)
    assert torch.equal(draft.head, target.lm_head.weight)


def test_default_taps_are_those_of_the_published_checkpoints(tmp_path):
    assert default_taps(5, 36) == [1, 9, 17, 25, 33]
    assert default_taps(5, 64) == [1, 16, 31, 46, 61]
    assert default_taps(5, 24) == [1, 6, 11, 16, 21]
    assert default_taps(1, 8) == [4]
    pair = make_pair(tmp_path, num_layers=6, taps=(1, 3), name_taps=False)
    assert "target_layer_ids" not in json.loads((pair.draft / "config.json").read_text())["dflash_config"]
    assert ReferenceDraft(pair.draft, load_transformers(pair.target)).taps == [1, 3]


# Draft


@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_draft_layers_equal_transformers_own_layers_over_a_prefilled_cache(pair, target, draft, n):
    """The same maths by another road: Qwen3's own layers, their cache filled with the context's K and V."""
    config = Qwen3Config.from_pretrained(pair.draft, attn_implementation="eager")
    model = Qwen3Model(config).eval()
    weights = all_tensors(pair.draft)
    model.load_state_dict({"embed_tokens.weight": target.model.embed_tokens.weight.detach()}, strict=False)
    report = model.load_state_dict(weights, strict=False)
    assert report.missing_keys == ["embed_tokens.weight"]
    assert set(report.unexpected_keys) == {"fc.weight", "hidden_norm.weight"}

    text = (PROMPT + greedy(target, PROMPT, 40))[:n]
    context = features(target, text[:-1], pair.taps) if n > 1 else torch.zeros(0, weights["fc.weight"].shape[1])
    with torch.no_grad():
        fused = context @ weights["fc.weight"].T
        fused = fused / (fused.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        fused = (fused * weights["hidden_norm.weight"])[None]
        cache = DynamicCache(config=config)
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            split = (1, n - 1, config.num_key_value_heads, config.head_dim)
            k = attention.k_norm(attention.k_proj(fused).view(split)).transpose(1, 2)
            v = attention.v_proj(fused).view(split).transpose(1, 2)
            cos, sin = model.rotary_emb(fused, torch.arange(n - 1)[None])
            cache.update(apply_rotary_pos_emb(k, k, cos, sin)[0], v, index)
        rows = torch.tensor([[text[-1]] + [pair.mask_token_id] * (pair.block_size - 1)])
        nothing_masked = {"full_attention": torch.zeros(1, 1, pair.block_size, n - 1 + pair.block_size)}
        positions = torch.arange(n - 1, n - 1 + pair.block_size)[None]
        expected = model(rows, attention_mask=nothing_masked, position_ids=positions, past_key_values=cache)[0][0]
        logits = target.lm_head(expected)[1:]
    torch.testing.assert_close(draft.block_hidden(context, text[-1], n), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(draft.block_logits(context, text[-1], n), logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_context_kv_written_in_chunks_drafts_the_same(pair, target, draft, chunk):
    text = PROMPT + greedy(target, PROMPT, 10)
    context = features(target, text[:-1], pair.taps)
    parts = [draft.context_kv(context[start : start + chunk], start) for start in range(0, len(context), chunk)]
    joined = [tuple(torch.cat(kv, dim=1) for kv in zip(*layer, strict=True)) for layer in zip(*parts, strict=True)]
    hidden = draft.block_hidden_over(joined, text[-1], len(text))
    torch.testing.assert_close(hidden, draft.block_hidden(context, text[-1], len(text)), atol=1e-5, rtol=1e-5)


def test_a_smaller_block_sees_fewer_masks(pair, target, draft):
    context = features(target, PROMPT[:-1], pair.taps)
    small = ReferenceDraft(pair.draft, target, block_size=3)
    assert small.block_hidden(context, PROMPT[-1], len(PROMPT)).shape == (3, 32)
    assert small.block_logits(context, PROMPT[-1], len(PROMPT)).shape == (2, pair.vocab_size)
    full = draft.block_hidden(context, PROMPT[-1], len(PROMPT))[:3]
    assert (small.block_hidden(context, PROMPT[-1], len(PROMPT)) - full).abs().max() > 1e-2  # bidirectional


MISTAKES = ["hidden_norm", "norm", "layers.1.self_attn.k_norm", "layers.0.self_attn.q_norm", "layers.1.input_layernorm"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_skipped_norm_weight_shows_in_the_block(tmp_path, pair, target, draft, name):
    tensors = all_tensors(pair.draft)
    tensors[f"{name}.weight"] = torch.ones_like(tensors[f"{name}.weight"])
    (tmp_path / "config.json").write_text((pair.draft / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    context = features(target, PROMPT[:-1], pair.taps)
    right = draft.block_hidden(context, PROMPT[-1], len(PROMPT))
    wrong = ReferenceDraft(tmp_path, target).block_hidden(context, PROMPT[-1], len(PROMPT))
    assert (right - wrong).abs().max() > 1e-2


def test_wrong_taps_positions_and_anchors_show_in_the_block(pair, target, draft):
    n, anchor = len(PROMPT), PROMPT[-1]
    context = features(target, PROMPT[:-1], pair.taps)
    right = draft.block_hidden(context, anchor, n)
    wrong = {
        "taps off by one": draft.block_hidden(features(target, PROMPT[:-1], [t - 1 for t in pair.taps]), anchor, n),
        "taps swapped": draft.block_hidden(features(target, PROMPT[:-1], pair.taps[::-1]), anchor, n),
        "mask in row 0": draft.block_hidden(context, pair.mask_token_id, n),
        "context shifted by one": draft.block_hidden_over(draft.context_kv(context, start=1), anchor, n),
        "block shifted by one": draft.block_hidden_over(draft.context_kv(context), anchor, n + 1),
        "last context row lost": draft.block_hidden_over(draft.context_kv(context[:-1]), anchor, n),
    }
    for mistake, hidden in wrong.items():
        assert (right - hidden).abs().max() > 1e-2, mistake


def test_features_are_the_residual_stream_and_refuse_the_last_layer(target):
    seen = {}
    layers = target.model.layers
    hooks = [m.register_forward_hook(lambda m, _args, out: seen.update({m.self_attn.layer_idx: out})) for m in layers]
    rows = features(target, PROMPT, [0, 2])
    for hook in hooks:
        hook.remove()
    assert torch.equal(rows, torch.cat([seen[0][0], seen[2][0]], dim=-1))
    with pytest.raises(ValueError, match=r"0\.\.2"):
        features(target, PROMPT, [3])


# Sampling

GOLDEN_0_0 = [0x22BEAA4B, 0xD4B4DE36, 0xC6E47D63]
GOLDEN_OTHER = [0x43F55BD1, 0x31F4E28C, 0x26069CDD]


def test_the_hash_is_the_one_that_was_agreed():
    """Pinned, and made again with numpy's wrapping 32-bit words."""
    np = pytest.importorskip("numpy")

    def mix32(x):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    for seed, position in [(0, 0), (1, 7), (2**64 - 1, 2**32 - 1), (0x9E3779B9, 0), (0x0123456789ABCDEF, 4095)]:
        state = mix32(np.array([(seed & 0xFFFFFFFF) ^ 0x9E3779B9], dtype=np.uint32))
        state = mix32(state ^ np.uint32(seed >> 32))
        state = mix32(state ^ np.uint32(position))
        hashes = mix32(state ^ mix32(np.arange(500, dtype=np.uint32) + np.uint32(0x85EBCA6B)))
        assert token_hashes(seed, position, 500) == hashes.tolist()
    assert mix(0) == 0
    assert token_hashes(0, 0, 3) == GOLDEN_0_0
    assert token_hashes(0x0123456789ABCDEF, 4095, 3) == GOLDEN_OTHER


def test_gumbel_is_finite_for_the_extreme_hashes():
    low, high = gumbel_of([0, 0xFFFFFFFF])
    assert low.item() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)
    assert high.item() == pytest.approx(24 * math.log(2), abs=1e-5)


def test_gumbel_has_the_moments_of_gumbel():
    noise = torch.cat([gumbel(seed, position, 1000) for seed in (0, 1, 2**63) for position in range(20)]).double()
    assert noise.dtype == torch.float64 and len(noise) == 60_000
    assert noise.mean().item() == pytest.approx(0.577216, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.06)
    assert (noise < 0).double().mean().item() == pytest.approx(math.exp(-1), abs=0.01)


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated():
    base = gumbel(7, 100, 20_000)
    for other in (gumbel(8, 100, 20_000), gumbel(7 + 2**32, 100, 20_000), gumbel(7, 101, 20_000), base.roll(1)):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < 0.03


def test_gumbel_choices_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    for temperature in (0.7, 1.0):
        draws = [int(perturbed(logits, position, temperature, seed=11).argmax()) for position in range(4000)]
        measured = torch.bincount(torch.tensor(draws), minlength=5) / len(draws)
        torch.testing.assert_close(measured, (logits / temperature).softmax(-1), atol=0.03, rtol=0)


# Decoding


@pytest.mark.parametrize(("tied", "width"), [(False, None), (True, None), (True, 3), (False, 1)])
def test_dflash_greedy_is_greedy(tmp_path, tied, width):
    for seed in range(1, 3):
        pair = make_pair(tmp_path / str(seed), seed=seed, tied=tied)
        target = load_transformers(pair.target)
        plain = greedy(target, PROMPT, 20)
        run = dflash_greedy(target, ReferenceDraft(pair.draft, target), PROMPT, 20, width=width)
        assert run.tokens == plain
        assert 1 + sum(step.n_tokens for step in run.steps) == 20
        assert all(step.n_tokens == step.n_accepted + 1 for step in run.steps)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_dflash_sampled_is_sampled(target, draft, temperature):
    for seed in (0, 2**40 + 5):
        plain = sampled(target, PROMPT, 15, temperature, seed)
        assert dflash_sampled(target, draft, PROMPT, 15, temperature, seed).tokens == plain
    assert sampled(target, PROMPT, 15, temperature, 1) != sampled(target, PROMPT, 15, temperature, 2)


def oracle(text, b=8, wrong_at=None):
    """Drafts the true text; `wrong_at` spoils one row of every block."""

    def propose(tokens):
        drafts = (text[len(tokens) :] + [0] * b)[: b - 1]
        if wrong_at is not None:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % 97
        return drafts

    return propose


def test_true_drafts_are_all_accepted(target, draft):
    plain = greedy(target, PROMPT, 33)
    run = dflash_greedy(target, draft, PROMPT, 33, propose=oracle(PROMPT + plain))
    assert run.tokens == plain
    assert run.accepted == [7, 7, 7, 7]
    run = dflash_greedy(target, draft, PROMPT, 28, propose=oracle(PROMPT + plain))
    assert run.tokens == plain[:28]
    assert [tuple(step) for step in run.steps] == [(8, 7, 7), (8, 7, 7), (8, 7, 7), (3, 2, 2)]
    plain = sampled(target, PROMPT, 17, 0.7, 5)
    run = dflash_sampled(target, draft, PROMPT, 17, 0.7, 5, propose=oracle(PROMPT + plain))
    assert run.tokens == plain and run.accepted == [7, 7]


@pytest.mark.parametrize("wrong_at", range(7))
def test_drafts_are_accepted_up_to_the_planted_mistake(target, draft, wrong_at):
    plain = greedy(target, PROMPT, 20)
    run = dflash_greedy(target, draft, PROMPT, 20, propose=oracle(PROMPT + plain, wrong_at=wrong_at))
    assert run.tokens == plain
    assert all(accepted == wrong_at for accepted in run.accepted[:-1])


def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(target, draft):
    plain = greedy(target, PROMPT, 30)
    for stop in (plain[0], plain[4], plain[8], plain[12]):
        cut = plain[: plain.index(stop) + 1]
        assert greedy(target, PROMPT, 30, eos=[stop]) == cut
        assert dflash_greedy(target, draft, PROMPT, 30, eos=[stop]).tokens == cut
        run = dflash_greedy(target, draft, PROMPT, 30, eos=[stop], propose=oracle(PROMPT + plain))
        assert run.tokens == cut
        assert 1 + sum(step.n_tokens for step in run.steps) == len(cut)
        assert all(step.n_tokens - step.n_accepted in (0, 1) for step in run.steps)


# Comparison


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], []) is None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_margin_is_the_gap_of_the_two_best_and_larger_for_any_other_token(target, temperature):
    text = PROMPT + sampled(target, PROMPT, 12, temperature, 5)
    index = 14
    scores = perturbed(teacher_forced(target, text)[index - 1], index, temperature, 5)
    (best, second, third), (first_id, second_id, third_id) = scores.topk(3)
    assert first_id == text[index]
    gap = margin(target, text, index, temperature, 5, other=int(second_id))
    assert gap == pytest.approx(float(best - second), abs=1e-4)
    assert margin(target, text, index, temperature, 5, other=int(third_id)) == pytest.approx(
        float(best - third), abs=1e-4
    )
    swapped = [*text[:index], int(second_id), *text[index + 1 :]]
    assert margin(target, swapped, index, temperature, 5, other=int(first_id)) == pytest.approx(gap, abs=1e-6)
