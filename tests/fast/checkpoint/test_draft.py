"""Every dialect of a DFlash checkpoint is understood, and a draft that would run wrongly is refused by its field."""

import json
import math
import re
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.config.engine import EngineConfig
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import read_config
from app.engine.checkpoint.read import check_checkpoints
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.dflash.report import report
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine, build_engine
from app.messages import Request
from tests import UNTIMED
from tests.fast.engine.pairs import Pair, make_pair

torch.set_num_threads(1)

Json = dict[str, Any]


class _No:
    """A field that is left out."""

    def __repr__(self) -> str:
        return "NO"


NO = _No()
"""A field that is not there."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), seed=5)


@pytest.fixture(scope="module")
def target(pair: Pair) -> DecoderConfig:
    return target_config(read_config(pair.target))


def changed(raw: Json, changes: Json) -> Json:
    """A copy with some fields changed; "dflash_config.x" is the field x inside it."""
    raw = deepcopy(raw)
    for path, value in changes.items():
        *outer, field = path.split(".")
        inner = raw
        for name in outer:
            inner = inner[name]
        if value is NO:
            inner.pop(field, None)
        else:
            inner[field] = value
    return raw


def build(pair: Pair, block_size: int | None = None, dtype: str = "float32") -> Engine:
    wishes = {"block_size": block_size, "max_model_len": 64, "max_num_seqs": 2, "page_size": 4}
    return build_engine(EngineConfig(pair.target, pair.draft, device="cpu", dtype=dtype, **UNTIMED | wishes))


# Dialects


@pytest.mark.parametrize(
    "dialect",
    [
        {},
        {"block_size": NO, "dflash_config.block_size": 8},
        {"rope_theta": NO, "rope_scaling": NO, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_theta": 10000, "rope_scaling": {"type": "default"}},
        {"dflash_config.mask_token_id": NO, "mask_token_id": 96},
        {"target_hidden_size": 32, "draft_vocab_size": 97},
        {"num_target_layers": NO, "vocab_size": NO},
        {"layer_types": NO, "use_sliding_window": NO, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": NO, "sliding_window": 2048},
        {"block_size": 16, "dflash_config.block_size": 8},
        {"num_target_layers": NO, "dflash_config.num_target_layers": 4},
        {"is_causal": False, "dflash_config.causal": True},
        {"is_causal": None, "quantization_config": None, "final_logit_softcapping": 30.0, "logit_scale": 0.25},
        {"block_size": NO, "dspark_block_size": 8, "dspark_config": {}},
        {"block_size": None, "dflash_config.dspark_block_size": 8},
        {"selector_rank": None, "conv_kernel_size": None, "model_type": "qwen3_5_text"},
        {"dflash_config.use_aux_hidden_state": True, "dflash_config.head_dim": 16, "enable_confidence_head": True},
        {"dflash_config.projector_type": "dflash2", "dflash_config.attention_mode": "mha"},
        {"output_multiplier": 0.19, "dflash_config.causal_head": False, "dflash_config.input_embedding_scale": 1.0},
        {"dflash_config.num_anchors": 512, "dflash_config.markov_rank": 0, "architectures": ["DFlash2DraftModel"]},
        {"partial_rotary_factor": 0.25, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        {"attn_output_gate": True, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
        {"jetspec_config": None, "use_swa": False, "attention_sink_bias": False, "sample_from_anchor": False},
        {"num_experts": 8, "num_local_experts": 4, "moe_intermediate_size": 16, "n_routed_experts": 8},
        {"model_type": NO, "architectures": NO},
        {"torch_dtype": NO, "dtype": "float32"},
    ],
    ids=str,
)
def test_every_dialect_is_read_as_the_same_draft(pair, target, dialect):
    raw = read_config(pair.draft)
    expected = draft_config(raw, target)
    assert (expected.block_size, expected.target_layer_ids, expected.mask_token_id) == (8, (1, 2), 96)
    assert (expected.decoder.num_layers, expected.decoder.rope.theta) == (2, 10000.0)
    assert draft_config(changed(raw, dialect), target) == expected


def test_keys_that_differ_in_both_places_are_told_once_and_the_inner_one_is_used(pair, target):
    raw = changed(read_config(pair.draft), {"use_swa": True, "dflash_config.use_swa": False, "block_size": 16})
    config = draft_config(changed(raw, {"dflash_config.block_size": 8}), target)
    assert config.block_size == 8
    assert sorted(config.warnings) == [
        "block_size is 16 in config.json and 8 in its dflash_config, which is used",
        "use_swa is True in config.json and False in its dflash_config, which is used",
    ]


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_theta": 5e5},
        {"rope_theta": NO, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}},
    ],
    ids=str,
)
def test_rope_theta_is_read_from_either_place(pair, target, dialect):
    assert draft_config(changed(read_config(pair.draft), dialect), target).decoder.rope.theta == 5e5


@pytest.mark.parametrize(
    "dialect",
    [{"shards": 3}, {"draft_prefix": "model."}, {"block_size_in": "dflash_config", "rope_dialect": "rope_parameters"}],
    ids=str,
)
def test_every_dialect_of_files_drafts_the_same(tmp_path, pair, dialect):
    def drafts(pair: Pair) -> list[list[int]]:
        """All that the draft proposes: a random one is hardly ever right, so the text says nothing about it."""
        runner, seen = (core := build(pair).core).runner, []
        propose = runner.forward.drafter.propose
        runner.forward.drafter.propose = lambda *inputs: seen.append(out := propose(*inputs)) or out
        core.run([Request("r", (5, 9, 2, 60), 24)])
        return torch.cat(seen).tolist()

    expected = drafts(pair)
    assert len({tuple(block) for block in expected}) > 5
    assert drafts(make_pair(tmp_path, seed=5, **dialect)) == expected
    assert drafts(make_pair(tmp_path, seed=5, **dialect, rope_theta=100.0)) != expected


@pytest.mark.parametrize(
    ("draft_layers", "target_layers", "taps"),
    [(5, 36, (1, 9, 17, 25, 33)), (5, 64, (1, 16, 31, 46, 61)), (5, 24, (1, 6, 11, 16, 21)), (1, 8, (4,))],
)
def test_taps_that_no_checkpoint_names_are_those_of_the_published_ones(tmp_path, draft_layers, target_layers, taps):
    pair = make_pair(
        tmp_path, num_layers=target_layers, draft_layers=draft_layers, taps=taps, name_taps=False, hidden_size=8,
        intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    config = draft_config(read_config(pair.draft), target_config(read_config(pair.target)))
    assert config.target_layer_ids == taps


@pytest.mark.parametrize(
    ("changes", "wanted", "block"),
    [
        ({}, None, 8),
        ({}, 2, 2),
        ({}, 8, 8),
        ({}, 9, r"num_speculative_tokens 8 is outside 1\.\.7: .* block_size 8"),
        ({}, 1, r"num_speculative_tokens 0 is outside 1\.\.7"),
        ({"sample_from_anchor": True}, None, 9),
        ({"sample_from_anchor": True}, 9, 9),
        ({"sample_from_anchor": True, "block_size": 16}, None, 16),
        ({"sample_from_anchor": True, "block_size": 16}, 17, 17),
        ({"block_size": 16}, None, 16),
        ({"sample_from_anchor": True}, 10, r"num_speculative_tokens 9 is outside 1\.\.8: .* block_size 8"),
        ({"block_size": NO}, 5, 5),
        ({"block_size": NO}, 1, "config.json names no block_size; give --num-speculative-tokens"),
    ],
)
def test_the_block_is_the_trained_one_or_a_smaller_one_that_is_asked_for(pair, target, changes, wanted, block):
    raw = changed(read_config(pair.draft), changes)
    if isinstance(block, int):
        config = draft_config(raw, target, wanted)
        assert config.block_size == block
        assert report(config)["block"].startswith(f"{block - 1} drafts, the first from row {config.first_draft_row}")
        return
    with pytest.raises(UnsupportedError, match=block):
        draft_config(raw, target, wanted)


def test_more_taps_than_draft_layers_are_fine(pair, target):
    raw = changed(read_config(pair.draft), {"dflash_config.target_layer_ids": [0, 1, 2]})
    assert draft_config(raw, target).target_layer_ids == (0, 1, 2)


# Refusals

REFUSED_KEYS = (
    *("layer_fusion_weights", "k_proj_target", "g_proj", "down_h", "down_g"),
    *("q_a_rank", "q_b_rank", "kv_a_rank", "kv_b_rank"),
)
VARIANTS: list[tuple[Json, str]] = [
    ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 'linear_attention'"),
    ({"layer_types": ["full_attention"]}, "layer_types must name num_hidden_layers = 2"),
    ({"layer_types": [{}, "full_attention"]}, "layer_types has {}"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"use_sliding_window": NO, "layer_types": NO, "sliding_window": 2048}, "sliding_window"),
    ({"layer_types": NO, "dflash_config.swa_window_size": 2048}, "sliding_window"),
    ({"use_swa": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, "use_swa"),
    ({"dflash_config.use_swa": True}, "sliding_window"),
    ({"is_causal": "no"}, "is_causal"),
    ({"dflash_config.causal": 1}, "causal"),
    ({"sample_from_anchor": "yes"}, "sample_from_anchor"),
    ({"dflash_config.conv_kernel_size": 4}, "conv_kernel_size = 4 is not"),
    ({"dflash_config.conv_kernel_size": 2}, "conv_group_size is missing"),
    ({"dflash_config.conv_group_size": 5}, "hidden_size 32 is no multiple of conv_group_size 5"),
    ({"dflash_config.selector_top_k": 8}, "selector_rank is missing"),
    ({"dflash_config.selector_rank": 8, "dflash_config.selector_top_k": 98}, "98 candidates .* found 97"),
    ({"dflash_config.selector_rank": 8, "markov_rank": 8}, "markov_rank = 8 is not"),
    ({"dflash_config.selector_bias": True}, "key selector_bias = True is not DFlash's; give a draft of"),
    ({"output_multiplier": -0.19}, "output_multiplier"),
    ({"input_embedding_scale": 0}, "input_embedding_scale"),
    ({"markov_rank": 256, "markov_head_type": "mamba"}, "markov_head_type = 'mamba' is not"),
    ({"markov_rank": -1}, "markov_rank must be"),
    ({"dflash_config.dspark_backbone_conv_enabled": True}, "dspark_backbone_conv_enabled = True is not"),
    ({"dflash_config.dspark_block_size": 9, "dflash_config.block_size": 8}, "dspark_block_size is 9, and block_size"),
    ({"dspark_block_size": 9}, "dspark_block_size is 9, and block_size is 8"),
    ({"dflash_config.dspark_depth": 2}, "key dspark_depth = 2 is not DFlash's"),
    ({"dflash_config.projector_type": "domino"}, "projector_type = 'domino' is not"),
    ({"dflash_config.attention_mode": "mla"}, "attention_mode = 'mla' is not"),
    ({"sample_from_anchor": True, "dspark_bonus_anchor": True}, "dspark_bonus_anchor are both True"),
    ({"dflash_config.warmth": 3}, "warmth = 3, whose meaning is not known"),
    ({"is_causal": False, "dflash_config.causal_head": True}, "causal_head is true, and is_causal"),
    ({"lilicorr_enabled": True}, "key lilicorr_enabled = True is not DFlash's"),
    ({"xpress_num_passes": 6}, "key xpress_num_passes = 6 is not DFlash's"),
    ({"kv_lora_rank": 512}, "key kv_lora_rank = 512 is not DFlash's"),
    *(({key: 4}, f"key {key} = 4 is not DFlash's") for key in REFUSED_KEYS),
    ({"dflash_config": NO, "target_layer_ids": [1, 2], "mask_token_id": 96}, "nothing tells whether row 0"),
    ({"dflash_config.shift_label": True}, "key shift_label = True is not DFlash's"),
    ({"jetspec_config": {"tree": 4}}, "key jetspec_config = .* is not DFlash's"),
    ({"attention_sink_bias": True}, "key attention_sink_bias = True is not DFlash's"),
    (
        {"attention_value_scale": 0.6, "gru_size": 8, "use_gru": False},
        "keys attention_value_scale = 0.6, gru_size = 8 are not",
    ),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"logit_scale": -2.0}, "logit_scale"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ({"speculators_model_type": "eagle3"}, "'eagle3'"),
    ({"speculators_model_type": "dspark", "transformer_layer_config": {}}, "aux_hidden_state_layer_ids"),
    (
        {
            "speculators_model_type": "dflash2",
            "transformer_layer_config": {},
            "sample_from_anchor": True,
            "aux_hidden_state_layer_ids": [1],
        },
        "sample_from_anchor = True is not",
    ),
    ({"architectures": ["Gemma4DSparkModel"]}, "architectures"),
    ({"architectures": ["MuseGlimmerAssistantModel"]}, "architectures"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": math.inf}}, "factor must be a positive number"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type = \['yarn'\]"),
    ({"model_type": "llama"}, "model_type"),
    ({"architectures": ["Eagle3Model"]}, "architectures"),
    ({"dflash_config": NO}, "dflash_config"),
    ({"dflash_config": None}, "dflash_config"),
]
MISFITS: list[tuple[Json, str]] = [
    ({"hidden_size": 64}, "hidden_size is 64, .* 32"),
    ({"target_hidden_size": 64}, "target_hidden_size is 64, .* 32"),
    ({"num_target_layers": 5}, "num_target_layers is 5, .* 4"),
    ({"vocab_size": 96}, "vocab_size is 96, .* 97"),
    ({"draft_vocab_size": 98}, "draft_vocab_size is 98, .* 97"),
    ({"hidden_size": 64, "target_hidden_size": 48}, "target_hidden_size is 48, .* 32"),
    ({"dflash_config.target_layer_ids": [2, 1]}, "target_layer_ids .*ascend"),
    ({"dflash_config.target_layer_ids": [1, 1]}, "target_layer_ids .*ascend"),
    ({"dflash_config.target_layer_ids": [-1, 1]}, r"target_layer_ids .*0\.\.2"),
    ({"dflash_config.target_layer_ids": [1, 4]}, r"target_layer_ids .*0\.\.2"),
    ({"dflash_config.target_layer_ids": [1, 3]}, "target_layer_ids .*the last layer"),
    ({"dflash_config.target_layer_ids": "1,2"}, "target_layer_ids"),
    ({"dflash_config.target_layer_ids": []}, r"target_layer_ids must be a list .*\[\]"),
    ({"dflash_config.target_layer_ids": [1.0, 2.0]}, "target_layer_ids"),
    ({"dflash_config.target_layer_ids": NO}, r"target_layer_ids must .*0\.\.2.* found \[1, 1\], the default"),
    ({"dflash_config.mask_token_id": 97}, "mask_token_id .*97"),
    ({"dflash_config.mask_token_id": -1}, "mask_token_id .*97"),
    ({"dflash_config.mask_token_id": NO}, "config.json names no mask_token_id, and no mask_token"),
    ({"dflash_config.mask_token_id": NO, "mask_token_id": 99}, ": mask_token_id must be .* found 99"),
    ({"dflash_config.mask_token_id": "<mask>"}, "mask_token_id '<mask>' is in no tokenizer.json"),
    ({"dflash_config.mask_token_id": NO, "dflash_config.mask_token": "<mask>"}, "mask_token '<mask>' is in no tokeniz"),
    ({"block_size": NO}, "block_size; give --num-speculative-tokens"),
    ({"block_size": 1}, "block_size"),
    ({"block_size": "16"}, "block_size"),
    ({"rope_theta": "abc"}, "rope_theta"),
    ({"rope_scaling": "x"}, "rope_scaling"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"layer_types": 5}, "layer_types"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": NO}, "num_attention_heads"),
    ({"num_attention_heads": 3}, "num_attention_heads 3 .*num_key_value_heads 2"),
    ({"head_dim": 15}, "head_dim 15"),
]


@pytest.mark.parametrize(("changes", "names"), VARIANTS + MISFITS, ids=[str(c) for c, _ in VARIANTS + MISFITS])
def test_a_draft_that_would_run_wrongly_is_refused_by_field(pair, target, changes, names):
    with pytest.raises(UnsupportedError, match=f"draft.*{names}"):
        draft_config(changed(read_config(pair.draft), changes), target)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "mixtral"}, "'mixtral' is not supported yet; supported: 'qwen3' .dense Qwen3., "),
        ({"model_type": NO}, "model_type"),
        ({"use_sliding_window": True}, ": use_sliding_window = True is"),
        ({"use_sliding_window": NO, "sliding_window": 9}, ": sliding_window = 9 is"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = .*is not supported"),
        ({"layer_types": 5}, "layer_types = 5 is not supported"),
        ({"num_local_experts": 8}, ": num_local_experts = 8 is"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        (
            {"quantization_config": {"ignore": ["lm_head"], "quant_method": "awq"}},
            ": quantization_config.quant_method = 'awq' is",
        ),
        ({"vocab_size": NO}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
    ],
    ids=str,
)
def test_a_target_that_would_run_wrongly_is_refused_by_field(pair, changes, names):
    with pytest.raises(UnsupportedError, match=f"target.*{names}"):
        target_config(changed(read_config(pair.target), changes))


# Files


VARIANT_TENSORS = [
    "layers__0__attention_conv__base_kernel",
    "candidate_selector__predecessor_codebook",
    "markov_head__w1",
    "confidence_head__proj__weight",
    "logit_head__markov__weight",
    "prefix_gru__weight_ih_l0",
    "lilicorr__token_proj__weight",
    "xpress__in_proj__weight",
    "layer_fusion_weights",
    "layers__0__self_attn__k_proj_target__weight",
    "layers__0__self_attn__kv_a_proj_with_mqa__weight",
    "layers__0__self_attn__sinks",
    "layers__0__self_attn__attention_sink_bias",
    "aux_hidden_norms__0__weight",
    "encoder__fc__weight",
    "layers__0__mlp__experts__0__up_proj__weight",
]


@pytest.fixture
def own(tmp_path: Path) -> Pair:
    """A pair of the test's own, to be damaged."""
    return make_pair(tmp_path, seed=5)


def edit(folder: Path, *, drop: str = "", **tensors: torch.Tensor) -> None:
    """Leave out a tensor and put in others; "__" in a keyword stands for a dot."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if name != drop}
    assert not drop or len(kept) < len(load_file(file))
    save_file(kept | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, file)


@pytest.mark.parametrize(("where", "tensor"), [("target", "lm_head.weight"), ("draft", "fc.weight")])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named_with_its_folder(own, where, tensor):
    folder = getattr(own, where)
    edit(folder, drop=tensor)
    with pytest.raises(UnsupportedError, match=f"{folder}.*{tensor} is missing"):
        build(own)
    edit(folder, **{tensor.replace(".", "__"): torch.zeros(3, 96)})
    with pytest.raises(UnsupportedError, match=rf"{tensor} has shape \[3, 96\], but config.json wants \["):
        build(own)


def test_a_bias_that_the_config_leaves_out_is_told_with_its_key(own):
    edit(own.draft, layers__0__self_attn__q_proj__bias=torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"q_proj\.bias is a bias, but attention_bias .* is not true"):
        build(own)


def test_biases_beside_tensors_of_another_variant_are_not_blamed_on_the_config(own):
    edit(own.draft, layers__0__self_attn__q_proj__bias=torch.zeros(4), markov_head__w1=torch.zeros(4))
    with pytest.raises(UnsupportedError, match=r"draft: 2 tensors, such as .*bias, are not DFlash's, and .* has them"):
        build(own)


@pytest.mark.parametrize("tensor", ["layers__0__gate__weight", "fc__bias", *VARIANT_TENSORS])
def test_a_draft_with_tensors_of_another_variant_is_refused_before_any_weight_is_read(own, tensor):
    """Run without them it would say the right text, and lose its acceptance silently."""
    edit(own.draft, **{tensor: torch.zeros(4)})
    read: list[str] = []
    config = EngineConfig(own.target, own.draft, device="cpu", dtype="float32", max_model_len=64, **UNTIMED)
    with pytest.raises(UnsupportedError, match=rf"tensor {re.escape(tensor.replace('__', '.'))} is not DFlash's"):
        build_engine(config, on_progress=lambda stage, done, total: read.append(stage))
    assert not read


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"dflash_config.markov_rank": 8}, "markov_head.markov_w1.weight"),
        ({"dflash_config.selector_rank": 8}, "candidate_selector.hidden_projection.weight"),
        ({"dflash_config.conv_group_size": 8}, "layers.0.attention_conv.base_kernel"),
    ],
    ids=str,
)
def test_a_head_without_its_tensors_is_refused_before_any_weight_is_read(own, keys, names):
    (own.draft / "config.json").write_text(json.dumps(changed(read_config(own.draft), keys)))
    (own.target / "tokenizer.json").write_text("{}")
    config = EngineConfig(own.target, own.draft, device="cpu", dtype="float32", max_model_len=64, **UNTIMED)
    read: list[str] = []
    with pytest.raises(UnsupportedError, match=f"{names} is missing"):
        build_engine(config, on_progress=lambda stage, done, total: read.append(stage))
    with pytest.raises(UnsupportedError, match=f"{names} is missing"):
        check_checkpoints(config)
    assert not read


@pytest.mark.parametrize(
    ("where", "tensor"),
    [("draft", "layers__2__mlp__up_proj__weight"), ("target", "model__layers__4__mlp__up_proj__weight")],
)
def test_layers_that_the_config_does_not_count_are_refused(own, where, tensor):
    edit(getattr(own, where), **{tensor: torch.zeros(64, 32)})
    with pytest.raises(UnsupportedError, match=tensor.replace("__", ".").removeprefix("model.")):
        build(own)


def test_a_tied_target_may_carry_its_head_twice(tmp_path):
    pair = make_pair(tmp_path, seed=5, tied=True)
    plain = build(pair).core.run([Request("r", (5, 9), 8)])
    edit(pair.target, lm_head__weight=load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"].clone())
    assert build(pair).core.run([Request("r", (5, 9), 8)]) == plain


@pytest.mark.parametrize("where", ["target", "draft"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_the_engine_refuses_files_that_are_missing_by_itself(own, where, file):
    """It may be built from folders that no command line has checked."""
    (getattr(own, where) / file).unlink()
    with pytest.raises(UnsupportedError, match=f"{getattr(own, where)}.*{file}"):
        build(own)


def test_a_refusal_by_config_comes_before_any_weight_is_read(own):
    (own.target / "model.safetensors").write_bytes(b"not weights")
    raw = read_config(own.draft)
    (own.draft / "config.json").write_text(json.dumps(changed(raw, {"jetspec_config": {"tree": 4}})))
    with pytest.raises(UnsupportedError, match="jetspec_config"):
        build(own)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (None, "cannot be read"),
        ({"embedding": torch.ones(32)}, "cannot be read"),
        ({"embedding": torch.ones(31), "mask_token_id": 96}, "has 31 numbers"),
        ({"embedding": torch.ones(32), "mask_token_id": 95}, "of token 95, and the draft needs 32 numbers of token 96"),
    ],
    ids=str,
)
def test_an_embedding_of_the_mask_that_does_not_fit_is_refused(own, content, names):
    file = own.draft / "mask_embedding.pt"
    torch.save(content, file) if content else file.write_bytes(b"")
    with pytest.raises(UnsupportedError, match=f"mask_embedding.pt .*{names}"):
        build(own)


def test_a_draft_given_as_the_target_is_told_so(own):
    raw = read_config(own.draft)
    raw |= raw.pop("dflash_config") | {"markov_rank": 0}
    (own.target / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError, match="is a DFlash draft: give it as --draft-model"):
        build(own)


@pytest.mark.parametrize(("limit", "is_told"), [(63, True), (64, False)])
def test_a_draft_for_a_shorter_context_is_told_at_the_start(own, caplog, limit, is_told):
    raw = read_config(own.draft)
    (own.draft / "config.json").write_text(json.dumps(changed(raw, {"max_position_embeddings": limit})))
    build(own)
    assert is_told == any(f"allows {limit} positions, and --max-model-len is 64" in said for said in caplog.messages)


@pytest.mark.parametrize(("dtype", "is_told"), [("float16", True), ("bfloat16", False)])
def test_a_draft_in_float16_is_told_at_the_start(own, caplog, dtype, is_told):
    """lmdeploy's issue 4789: 0.06 of 15 drafts were accepted in float16, where features overflow."""
    build(own, dtype=dtype)
    assert is_told == any("features overflow in float16" in said for said in caplog.messages)


@pytest.mark.parametrize(
    ("d2t", "why"),
    [
        (torch.ones(48, dtype=torch.int64), None),
        (torch.arange(1, 49), "d2t and t2d name other tokens"),  # tokens in the place of distances
        (torch.zeros(48, dtype=torch.int64).index_fill(0, torch.tensor(47), 49), "d2t and t2d"),
        (torch.zeros(48, dtype=torch.int64).index_fill(0, torch.tensor(47), 50), "d2t leads to tokens 0 to 97"),
        (torch.full((48,), -1), "d2t leads to tokens -1 to 46"),
    ],
)
def test_a_d2t_that_leads_elsewhere_is_refused(tmp_path, d2t, why):
    """No draft would be right, or the first one would end the engine."""
    pair = make_pair(tmp_path, seed=5, own_head=True)
    raw = changed(read_config(pair.draft), {"draft_vocab_size": 48})
    (pair.draft / "config.json").write_text(json.dumps(raw))
    t2d = torch.zeros(97, dtype=torch.bool).index_fill_(0, torch.arange(1, 49), True)
    edit(pair.draft, lm_head__weight=torch.randn(48, 32), d2t=d2t, t2d=t2d)
    with pytest.raises(UnsupportedError, match=why) if why else nullcontext():
        build(pair)
