"""A config.json is refused in a sentence, or its shape is small: nothing as large as its numbers is made."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.fields import MOST
from app.engine.checkpoint.quantised import block_size, rotation_file
from app.engine.checkpoint.read import _layers
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.errors import UnsupportedError

Json = dict[str, Any]
BASE: Json = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DELTA = {
    **{f"linear_num_{kind}_heads": 2 for kind in ("key", "value")},
    **{f"linear_{kind}_head_dim": 16 for kind in ("key", "value")},
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
TARGETS: dict[str, Json] = {
    "qwen3": BASE | {"model_type": "qwen3", "rope_scaling": YARN, "quantization_config": FP8},
    "llama": BASE | {"model_type": "llama", "rope_scaling": LLAMA3},
    "qwen3_moe": BASE | EXPERTS | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "gpt_oss": BASE
    | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_scaling": YARN}
    | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2, "swiglu_limit": 7.0},
    "qwen3_5": {"model_type": "qwen3_5", "text_config": BASE | DELTA | {"rope_parameters": {"rope_theta": 1e6}}},
    "qwen3_next": BASE | DELTA | EXPERTS | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 32},
}
INNER = {"target_layer_ids": [0, 1], "mask_token_id": 4}
DRAFTS: dict[str, Json] = {
    "z-lab": BASE
    | {"model_type": "qwen3", "block_size": 16, "num_target_layers": 4, "dflash_config": INNER}
    | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 128, "use_sliding_window": True},
    "dflash2": BASE
    | {"block_size": 16, "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 16}
    | {"dflash_config": INNER | {"logit_scale": 1.0, "final_logit_softcapping": 30.0}},
    "dspark": BASE | {"block_size": 16, "markov_rank": 8, "markov_head_type": "gated", **INNER},
    "speculators": {"speculators_model_type": "dflash", "transformer_layer_config": BASE, "block_size": 16}
    | {"aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 4, "draft_vocab_size": 32, "target_hidden_size": 64},
}
TARGET = target_config(TARGETS["qwen3"])
Reader = Callable[[Json], DecoderConfig]
READERS: list[tuple[str, Json, Reader]] = [
    *((name, raw, target_config) for name, raw in TARGETS.items()),
    *((name, raw, lambda raw: draft_config(raw, TARGET).decoder) for name, raw in DRAFTS.items()),
]
HOSTILE: list[Any] = [
    *(-1, 0, 2, 10**6, MOST, MOST + 1, 10**9, 10**12, 2**63, 10**400, True),
    *(0.0, -0.0, 0.5, 1e-300, 1e-13, 1e13, 1e300, math.nan, math.inf, -math.inf),
    *(None, "", "x" * 10_000, [], {}, [0] * 10_000, ["full_attention"] * 10_000, {str(i): i for i in range(1000)}),
    *([[]], [{}], [None], [10**12], {"a": {}}),
]


def places(raw: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in raw.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def with_value(raw: Json, path: tuple[str, ...], value: Any) -> Json:
    raw = deepcopy(raw)
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return raw


@pytest.mark.parametrize(("name", "raw", "read"), READERS, ids=[name for name, *_ in READERS])
def test_a_field_of_any_value_is_refused_in_a_sentence_or_makes_a_small_shape(
    name: str, raw: Json, read: Reader
) -> None:
    assert _layers(read(raw)), "the config is sound"
    tracemalloc.start()
    for path in places(raw):
        for value in HOSTILE:
            changed = with_value(raw, path, value)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                decoder = read(changed)
            except UnsupportedError as error:
                assert len(str(error)) < 3000
            else:
                assert decoder.num_heads * decoder.head_dim <= 2**20 and decoder.num_layers <= 1024, path
                assert decoder.max_position_embeddings <= MOST, path
                assert len(_layers(decoder)) < 10_000
            assert tracemalloc.get_traced_memory()[1] - before < 10_000_000, (path, value)
    tracemalloc.stop()


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_what_else_is_read_of_a_config_is_refused_in_a_sentence_or_sound(tmp_path: Path, value: Any) -> None:
    for method in (value, {"quant_method": "fp8", "weight_block_size": value}, {"weight_block_size": [value, value]}):
        try:
            rows, columns = block_size({"quantization_config": method})
        except UnsupportedError:
            continue
        assert 1 <= rows <= MOST and 1 <= columns <= MOST
    for description in ({"optional": value}, {"optional": {"quarot": {"rotation_map": {"global_rotation": value}}}}):
        with suppress(UnsupportedError):
            assert rotation_file(tmp_path, description) is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "num_hidden_layers",
            10**9,
            "num_hidden_layers must be a positive whole number, at most 1024, found 1000000000",
        ),
        ("head_dim", 10**9, "head_dim must be a positive whole number, at most 1024"),
        ("num_attention_heads", 10**12, "num_attention_heads must be a positive whole number, at most 1024"),
        ("vocab_size", 2**31, f"vocab_size must be a positive whole number, at most {MOST}"),
        ("rope_theta", math.nan, "rope_theta must be a positive number, from 1e-12 to 1e+12, found nan"),
        ("rms_norm_eps", 10**400, "rms_norm_eps must be a positive number"),
        ("rope_scaling", YARN | {"factor": 1e9}, "factor"),
    ],
)
def test_the_sentence_has_the_field_the_limit_and_what_was_found(field: str, value: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=r"^target: ") as caught:
        target_config(TARGETS["qwen3"] | {field: value})
    assert said in str(caught.value)


def test_a_rotation_outside_of_its_folder_is_not_read(tmp_path: Path) -> None:
    folder, inside = tmp_path / "model", Path("optional") / "quarot.safetensors"
    (folder / "optional").mkdir(parents=True)
    for file in (folder / inside, tmp_path / "secret"):
        file.touch()

    def told(name: str) -> Json:
        return {"optional": {"quarot": {"rotation_map": {"global_rotation": name}}}}

    assert rotation_file(folder, told(str(inside))) == folder / inside
    for name in ("../secret", "optional/../../secret", str(tmp_path / "secret"), "a" * 5000, "a\0", "."):
        with pytest.raises(UnsupportedError, match="the file of the rotation is missing"):
            rotation_file(folder, told(name))
