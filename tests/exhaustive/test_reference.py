"""The references agree with themselves, with Transformers, and notice the mistakes they are there to catch."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, apply_rotary_pos_emb

from tests.exhaustive.live import load_transformers
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.reference import (
    ReferenceDraft,
    features,
    greedy,
    mix,
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
        expected = model(rows, attention_mask=nothing_masked, position_ids=positions, cache=cache)[0][0]
        logits = target.lm_head(expected)[1:]
    torch.testing.assert_close(draft.block_hidden(context, text[-1], n), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(draft.block_logits(context, text[-1], n), logits, atol=1e-4, rtol=1e-5)


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


@pytest.mark.parametrize(
    ("seed", "position", "hashes"),
    [
        (0, 0, [0x22BEAA4B, 0xD4B4DE36, 0xC6E47D63]),
        (0x0123456789ABCDEF, 4095, [0x43F55BD1, 0x31F4E28C, 0x26069CDD]),
    ],
)
def test_the_hash_is_the_one_that_was_agreed(seed, position, hashes):
    assert mix(0) == 0 and token_hashes(seed, position, 3) == hashes


# Decoding


# Comparison
