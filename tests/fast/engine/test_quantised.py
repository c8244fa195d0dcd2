"""A quantised target has the text of its dense twin, whose weights were dequantised apart from the engine's code."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.checkpoint.read import check_checkpoints
from app.engine.cpu import decoder
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import ExpertWeights
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.load.engine import Engine
from app.engine.load.loader import CheckpointWeights, target_class
from app.engine.quantised import QuantisedWeight
from app.messages import Request
from tests import UNTIMED
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import LUCKY, make_engine, random_prompts, run_engine
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.quantised import FORMATS, bytes_of, is_linear, quantise, static
from tests.fast.engine.thread_ranks import ThreadRanks

CPU = torch.device("cpu")
SHAPES: dict[str, Any] = {
    "dense": (make_pair, {}),
    "experts": (make_pair, {"experts": 8}),
    "hybrid": (make_hybrid_pair, {}),
    "Next": (make_hybrid_pair, {"experts": 8, "grouped": True, "fused": False}),
}
FOR_FOUR = {"seed": 5, "vocab_size": 4, "num_kv_heads": 2}
UNTIED = LUCKY | {"tied": False, "own_head": False}
SETTINGS = {"page_size": 4, "max_model_len": 256, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products by int8 round no rows, as elsewhere than on a CPU: a text is then that of a dense twin."""
    monkeypatch.setattr(CpuBackend, "pack_quantised", TorchBackend.pack_quantised)
    monkeypatch.setattr(CpuBackend, "linear", TorchBackend.linear)
    monkeypatch.setattr(decoder, "can_run", lambda layers: False)


def requests(vocab: int) -> list[Request]:
    return [Request(str(i), prompt.token_ids, 24) for i, prompt in enumerate(random_prompts(vocab, 3))]


def texts(target: Path, draft: Path | None, vocab: int) -> list[list[int]]:
    return run_engine(make_engine(target, draft, **SETTINGS), requests(vocab)).texts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", FORMATS)
def test_a_quantised_target_has_the_text_of_its_dense_twin(tmp_path: Path, how: str, shape: str) -> None:
    make, sizes = SHAPES[shape]
    pair = make(tmp_path / "pair", seed=3, **sizes)
    quantised, dense = quantise(pair.target, tmp_path, how)
    wanted = texts(dense, None, pair.vocab_size)
    assert texts(quantised, None, pair.vocab_size) == wanted
    assert texts(quantised, pair.draft, pair.vocab_size) == wanted


@contextmanager
def ranks_of(size: int, target: Path, draft: Path | None, **wishes: Any) -> Iterator[Engine]:
    """Yield an engine whose ranks must verify alike."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tensor_parallel_size": size, **wishes}
    ranks = ThreadRanks(EngineConfig(target, draft, **UNTIMED | SETTINGS | settings))
    yield ranks.engine
    ranks.close()
    ranks.check_alike()


def texts_of_ranks(size: int, target: Path, draft: Path | None, vocab: int) -> list[list[int]]:
    with ranks_of(size, target, draft) as engine:
        return run_engine(engine, requests(vocab)).texts


SHARED = [(2, shape) for shape in ("dense", "hybrid", "experts")] + [(4, "dense")]


@pytest.mark.parametrize(("size", "shape"), SHARED)
@pytest.mark.parametrize("how", ["fp8 in blocks", "W8A8 static", "some layers plain", "int8 by row"])
def test_ranks_have_the_text_of_one(tmp_path: Path, how: str, size: int, shape: str) -> None:
    """Columns of a rank begin inside of a block, and so do its rows where four ranks have two KV heads."""
    make, sizes = SHAPES[shape]
    pair = make(tmp_path / "pair", seed=3, vocab_size=96, **sizes)
    quantised, dense = quantise(pair.target, tmp_path, how)
    wanted = texts(dense, None, pair.vocab_size)
    assert texts_of_ranks(size, quantised, pair.draft, pair.vocab_size) == wanted


def experts_of(engine: Engine) -> list[ExpertWeights]:
    return [layer.mixture[1] for layer in engine.core.runner.forward.target.layers]


@pytest.mark.parametrize(
    ("how", "is_kept"), [("int8 by row", (1, 1)), ("some layers plain", (1, 0)), ("fp8 by row", (0, 0))]
)
def test_experts_in_int8_by_row_stay_so(tmp_path: Path, how: str, is_kept: tuple[int, int]) -> None:
    """The C++ operators have no products by FP8, and int8 would be other numbers."""
    pair = make_pair(tmp_path / "pair", seed=3, experts=8)
    engine = make_engine(quantise(pair.target, tmp_path, how)[0], None, **SETTINGS)
    for own in experts_of(engine):
        assert (isinstance(own.gate_up, QuantisedWeight), isinstance(own.down, QuantisedWeight)) == is_kept
        assert all(
            weight.data.dtype == torch.int8 for weight in (own.gate_up, own.down) if not isinstance(weight, Tensor)
        )
    backend, stored = engine.core.runner.backend, load_file(tmp_path / "dense" / "model.safetensors")
    linears = [tensor for name, tensor in stored.items() if is_linear(name)]
    if how != "some layers plain":
        kept = sum(tensor.numel() + 4 * len(tensor) for tensor in linears) if all(is_kept) else 0
        widened = 0 if all(is_kept) else 4 * sum(tensor.numel() for tensor in linears)
        assert (backend.quantised_bytes, backend.widened_bytes) == (kept, widened)


def test_experts_of_which_some_are_plain_are_widened(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3, experts=8)
    quantised, dense = quantise(pair.target, tmp_path, "int8 by row")
    name, tensors = "model.layers.1.mlp.experts.3.up_proj", load_file(quantised / "model.safetensors")
    numbers = tensors[f"{name}.weight"].float() * tensors.pop(f"{name}.weight_scale")
    save_file(tensors | {f"{name}.weight": numbers}, quantised / "model.safetensors")
    engine = make_engine(quantised, pair.draft, **SETTINGS)
    kinds = [isinstance(own.gate_up, QuantisedWeight) for own in experts_of(engine)]
    assert kinds == [i != 1 for i in range(len(kinds))]
    assert run_engine(engine, requests(pair.vocab_size)).texts == texts(dense, None, pair.vocab_size)


@pytest.mark.parametrize("as_bits", [False, True])
def test_quant_bias_holds_the_biases_of_attention(tmp_path: Path, as_bits: bool) -> None:
    pair = make_pair(tmp_path / "pair", seed=5, family="qwen2", head_dim=8, vocab_size=96)
    stored = load_file(pair.target / "model.safetensors")
    quantised, dense = dict(stored), dict(stored)
    for name in stored:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            stem = name.removesuffix(".weight")
            bias = quantised.pop(f"{stem}.bias")
            parts, twin = static(stem, stored[name].double(), bias, as_bits)
            quantised |= parts
            unit = stored[name].double().abs().amax(1).div(127).float() * parts[f"{stem}.input_scale"]
            dense |= {name: twin.float(), f"{stem}.bias": (bias / unit).round() * unit}
    for folder, tensors in (("quantised", quantised), ("dense", dense)):
        copied(pair.target, tmp_path / folder, tensors)
    wanted = texts(tmp_path / "dense", None, pair.vocab_size)
    assert texts(tmp_path / "quantised", pair.draft, pair.vocab_size) == wanted
    assert texts_of_ranks(4, tmp_path / "quantised", pair.draft, pair.vocab_size) == wanted


def copied(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if "safetensors" not in file.name:
            (to / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


LINEAR = "layers.1.mlp.down_proj"


def drop_the_scale(tensors: Any) -> None:
    del tensors[f"model.{LINEAR}.weight_scale"]


def offset(tensors: Any) -> None:
    tensors[f"model.{LINEAR}.weight_offset"] += 1


def wrong_scale(tensors: Any) -> None:
    tensors[f"model.{LINEAR}.weight_scale"] = torch.ones(5, 1)


def bias_of_a_norm(tensors: Any) -> None:
    tensors["model.layers.0.input_layernorm.bias"] = torch.ones(4)


def bias_in_the_mlp(tensors: Any) -> None:
    tensors[f"model.{LINEAR}.quant_bias"] = torch.full((len(tensors[f"model.{LINEAR}.weight"]),), 5, dtype=torch.int32)
    tensors[f"model.{LINEAR}.input_offset"] = torch.zeros(1)
    tensors[f"model.{LINEAR}.deq_scale"] = torch.ones(len(tensors[f"model.{LINEAR}.weight"]))


def fused_experts(tensors: Any) -> None:
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(2, 2, 2, dtype=torch.int8)


def lone_deq_scale(tensors: Any) -> None:
    tensors[f"model.{LINEAR}.deq_scale"] = tensors.pop(f"model.{LINEAR}.weight_scale").flatten()


def lone_quant_bias(tensors: Any) -> None:
    tensors[f"model.{LINEAR}.quant_bias"] = torch.ones(4, dtype=torch.int32)


def flat(tensors: Any) -> None:
    tensors[f"model.{LINEAR}.weight"] = tensors[f"model.{LINEAR}.weight"].flatten()


def two_biases(tensors: Any) -> None:
    bias_in_the_mlp(tensors)
    tensors[f"model.{LINEAR}.bias"] = torch.ones(len(tensors[f"model.{LINEAR}.weight"]))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (drop_the_scale, rf"{LINEAR}\.weight_scale is missing, and {LINEAR}\.weight is I8"),
        (offset, rf"{LINEAR}\.weight_offset is not 0"),
        (wrong_scale, rf"{LINEAR}\.weight_scale is \[5, 1\]"),
        (
            bias_of_a_norm,
            r"input_layernorm\.bias is of weights that are quantised \(msModelSlim with biases",
        ),
        (bias_in_the_mlp, rf"{LINEAR}\.quant_bias"),
        (fused_experts, r"mlp\.experts\.gate_up_proj is I8, and only weights of single linears"),
        (lone_deq_scale, rf"{LINEAR}\.input_scale is missing"),
        (lone_quant_bias, rf"{LINEAR}\.deq_scale is missing"),
        (flat, rf"tensor {LINEAR}\.weight has shape \[\d+\], but config\.json wants"),
        (two_biases, rf"{LINEAR}\.bias together with {LINEAR}\.quant_bias is not supported yet"),
    ],
)
def test_what_cannot_be_read_is_refused_by_the_name_of_its_tensor(tmp_path: Path, change: Any, told: str) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    quantised, _ = quantise(pair.target, tmp_path, "W8A8 dynamic")
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(UnsupportedError, match=told):
        make_engine(quantised, None, **SETTINGS)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq' is not supported yet"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format = 'pack-quantized'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a block has two sizes"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            r"config_groups\.group_0: num_bits = 4",
        ),
    ],
)
def test_other_methods_are_refused_by_their_name(tmp_path: Path, method: Any, told: str) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    config = json.loads((pair.target / "config.json").read_text())
    (pair.target / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    with pytest.raises(UnsupportedError, match=told):
        make_engine(pair.target, None, **SETTINGS)


@pytest.mark.parametrize("kind", ["W4A8_DYNAMIC", "W8A8_MXFP8", "C8"])
def test_an_unknown_type_of_the_description_is_refused(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    quantised, _ = quantise(pair.target, tmp_path, "W8A8 dynamic")
    described = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", f"model.{LINEAR}.weight": kind}
    (quantised / "quant_model_description.json").write_text(json.dumps(described))
    for place in (quantised, quantised / "model.safetensors"):
        with pytest.raises(
            UnsupportedError, match=f"{quantised}: the description says {kind} of model.{LINEAR}.weight"
        ):
            len(Checkpoint(place).tensors)


@pytest.mark.parametrize("name", ["quant_model_weights.safetensors", "quant_model_weight_w8a8.safetensors", "shards"])
def test_old_and_new_names_of_files_are_found(tmp_path: Path, name: str) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    quantised, _ = quantise(pair.target, tmp_path, "W8A8 dynamic")
    single = quantised / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    if name == "shards":
        stem, names = "quant_model_weight_w8a8_dynamic", sorted(tensors)
        shards = {f"{stem}-0000{i + 1}-of-2.safetensors": names[i::2] for i in range(2)}
        for shard, own in shards.items():
            save_file({key: tensors[key] for key in own}, quantised / shard)
        homes = {key: shard for shard, own in shards.items() for key in own}
        (quantised / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    else:
        save_file(tensors, quantised / name)
    assert len(Checkpoint(quantised).tensors) == len(tensors)


def test_int8_rounds_experts_too(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3, experts=8)
    _, dense = quantise(pair.target, tmp_path, "int8 by row")
    engine = make_engine(pair.target, pair.draft, quantization="int8", **SETTINGS)
    assert all(isinstance(own.down, QuantisedWeight) for own in experts_of(engine))
    assert run_engine(engine, requests(pair.vocab_size)).texts == texts(dense, None, pair.vocab_size)


def test_int8_rounds_the_weights_of_products_alone(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    _, dense = quantise(pair.target, tmp_path, "int8 by row")
    engine = make_engine(pair.target, pair.draft, quantization="int8", **SETTINGS)
    assert run_engine(engine, requests(pair.vocab_size)).texts == texts(dense, None, pair.vocab_size)
    target = engine.core.runner.forward.target
    weights = [target.layers[0].attention.qkv, target.layers[0].attention.o, target.layers[0].down]
    assert {weight.data.dtype for weight in weights} == {torch.int8}
    draft = engine.core.runner.forward.drafter.model
    assert {p.dtype for p in (target.embedding, target.lm_head, *draft.parameters())} == {torch.float32}


def rotated(pair: Pair, to: Path, seed: int = 0) -> Path:
    """Return the target with a residual stream turned by an orthogonal matrix, and norms that are ones. A hybrid
    stores norms less 1."""
    config = json.loads((pair.target / "config.json").read_text())
    one = 1.0 if "linear_num_key_heads" in config else 0.0
    tensors = {name: tensor.double() for name, tensor in load_file(pair.target / "model.safetensors").items()}
    hidden = tensors["model.norm.weight"].shape[0]
    torch.manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(hidden, hidden, dtype=torch.float64))[0]
    norms = {
        READERS_OF_ATTENTION: "input_layernorm",
        READERS_OF_THE_MLP: "post_attention_layernorm",
    }
    for name in tensors:
        layer, linear = name.rpartition(".layers.")[2].partition(".")[::2]
        if linear.endswith(WRITERS):
            tensors[name] = rotation.T @ tensors[name]
        for readers, norm in norms.items():
            if linear.endswith(readers):
                tensors[name] = tensors[name] * (one + tensors[f"model.layers.{layer}.{norm}.weight"]) @ rotation
    tensors["model.embed_tokens.weight"] @= rotation
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * (one + tensors["model.norm.weight"]) @ rotation
    for name in tensors:
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
            tensors[name] = torch.full_like(tensors[name], 1.0 - one)
    copied(pair.target, to, {name: tensor.float() for name, tensor in tensors.items()})
    (to / "optional").mkdir()
    save_file({"global_rotation": rotation.float().contiguous()}, to / "optional" / "quarot.safetensors")
    described = {"optional": {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}}
    (to / "quant_model_description.json").write_text(json.dumps({"is_rot_used": True} | described))
    return to


READERS_OF_ATTENTION = tuple(f"{name}.weight" for name in "q_proj k_proj v_proj".split())
READERS_OF_ATTENTION += tuple(f"in_proj_{name}.weight" for name in "qkv z b a qkvz ba".split())
READERS_OF_THE_MLP = ("gate_proj.weight", "up_proj.weight", "mlp.gate.weight", "shared_expert_gate.weight")
WRITERS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
HYBRID = UNTIED | {"vocab_size": 6, "seed": 1}
ROTATED: dict[str, Any] = {
    "dense": (make_pair, UNTIED),
    "experts": (make_pair, UNTIED | {"experts": 8}),
    "hybrid": (make_hybrid_pair, HYBRID),
    "Next": (make_hybrid_pair, HYBRID | {"experts": 8, "grouped": True, "fused": False}),
    "hybrid with experts": (make_hybrid_pair, HYBRID | {"experts": 8, "fused": False}),
}


def accepted(engine: Engine, vocab: int) -> list[tuple[int, int]]:
    """Return the verified and the accepted drafts of each step of each request."""
    steps: list[tuple[int, int]] = []

    def note(step: Any) -> None:
        steps.extend((delta.steps[0].n_verified, delta.steps[0].n_accepted) for delta in step.deltas)

    run_engine(engine, requests(vocab), note)
    return steps


@pytest.mark.parametrize("own", [{}, {"own_head": True}, {"own_embedding": True, "own_head": True}])
@pytest.mark.parametrize("shape", ROTATED)
def test_drafts_of_a_rotated_target_are_those_of_its_original(tmp_path: Path, shape: str, own: Any) -> None:
    make, sizes = ROTATED[shape]
    pair = make(tmp_path / "pair", **sizes | own)
    target = rotated(pair, tmp_path / "rotated")
    settings: dict[str, Any] = {"verify": "full", **SETTINGS}
    wanted = accepted(make_engine(pair.target, pair.draft, **settings), pair.vocab_size)
    assert sum(kept for _, kept in wanted) > 5
    given = {} if own else {"draft_head_from": str(pair.target)}
    assert accepted(make_engine(target, pair.draft, **settings, **given), pair.vocab_size) == wanted


@pytest.mark.parametrize("own", [{}, {"own_embedding": True, "own_head": True}])
@pytest.mark.parametrize(("size", "shape"), [(2, "dense"), (2, "hybrid"), (2, "Next"), (4, "dense")])
def test_so_they_are_on_ranks(tmp_path: Path, size: int, shape: str, own: Any) -> None:
    """Four ranks have each of two KV heads twice."""
    make, sizes = ROTATED[shape]
    pair = make(tmp_path / "pair", **sizes | own | ({"vocab_size": 6, "seed": 1} if size == 2 else FOR_FOUR))
    target = rotated(pair, tmp_path / "rotated")
    wanted = accepted(make_engine(pair.target, pair.draft, verify="full", **SETTINGS), pair.vocab_size)
    assert sum(kept for _, kept in wanted) > 3
    given = {} if own else {"draft_head_from": str(pair.target)}
    with ranks_of(size, target, pair.draft, verify="full", **given) as engine:
        assert accepted(engine, pair.vocab_size) == wanted


@pytest.mark.parametrize("shards", [1, 2])
def test_of_an_original_on_a_hub_only_the_file_of_the_last_norm_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    pair = make_pair(tmp_path / "pair", **UNTIED)
    target, hub, cache = rotated(pair, tmp_path / "rotated"), tmp_path / "hub", tmp_path / "cache"
    shutil.copytree(pair.target, hub)
    if shards > 1:
        tensors = load_file(hub / "model.safetensors")
        (hub / "model.safetensors").unlink()
        homes = {name: f"model-{1 + (name == 'model.norm.weight')}.safetensors" for name in tensors}
        for shard in set(homes.values()):
            save_file({name: tensors[name] for name in tensors if homes[name] == shard}, hub / shard)
        (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))

    def download(name: str, allow_patterns: list[str], revision: str | None) -> str:
        assert (name, revision) == ("some-org/original", None)
        cache.mkdir(exist_ok=True)
        for file in hub.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, cache)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    given = (str(pair.target), "some-org/original")
    engines = [make_engine(target, pair.draft, verify="full", draft_head_from=name, **SETTINGS) for name in given]
    wanted, found = (accepted(engine, pair.vocab_size) for engine in engines)
    assert found == wanted
    fetched = {"model.safetensors"} if shards == 1 else {"model.safetensors.index.json", "model-2.safetensors"}
    assert {file.name for file in cache.iterdir()} == fetched


@pytest.mark.parametrize(
    ("home", "said"),
    [
        (None, r"original/model\.safetensors: tensor norm\.weight is missing"),
        ("absent.safetensors", "1 of 1 shards named by model.safetensors.index.json are missing: absent.safetensors"),
        ("../model.safetensors", "'../model.safetensors' is not the name of a file in its folder"),
        (5, "1 of 1 shards named by model.safetensors.index.json are missing: 5"),
    ],
)
def test_an_original_without_the_last_norm_is_refused_by_its_file(tmp_path: Path, home: Any, said: str) -> None:
    pair = make_pair(tmp_path / "pair", **UNTIED)
    target, original = rotated(pair, tmp_path / "rotated"), tmp_path / "original"
    copied(pair.target, original, {"model.embed_tokens.weight": torch.ones(2, 2)})
    if home:
        (original / "model.safetensors").unlink()
        (original / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": home}}))
    with pytest.raises(UnsupportedError, match=said):
        make_engine(target, pair.draft, draft_head_from=str(original), **SETTINGS)


def test_a_draft_that_borrows_a_rotated_head_needs_the_original(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", **UNTIED)
    target = rotated(pair, tmp_path / "rotated")
    with pytest.raises(UnsupportedError, match="Give the model's original in bfloat16 as --draft-head-from"):
        make_engine(target, pair.draft, **SETTINGS)


def test_a_rotation_that_is_not_there_leaves_plain_decoding(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", **UNTIED)
    target = rotated(pair, tmp_path / "rotated")
    (target / "optional" / "quarot.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="No draft can read its features without it"):
        make_engine(target, pair.draft, **SETTINGS)
    assert texts(target, None, pair.vocab_size) == texts(pair.target, None, pair.vocab_size)


def test_a_bias_of_one_projection_alone_is_added(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    quantised, dense = quantise(pair.target, tmp_path, "W8A8 static")
    name, tensors = "model.layers.0.self_attn.q_proj", load_file(quantised / "model.safetensors")
    tensors[f"{name}.quant_bias"] += 50
    save_file(tensors, quantised / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    twin = load_file(dense / "model.safetensors")
    for weight in [
        key for key in twin if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
    ]:
        twin[weight.replace(".weight", ".bias")] = torch.zeros(len(twin[weight]))
    twin[f"{name}.bias"] = 50 * tensors[f"{name}.deq_scale"]
    save_file(twin, dense / "model.safetensors")
    assert texts(quantised, pair.draft, pair.vocab_size) == texts(dense, None, pair.vocab_size)


def test_a_name_of_a_quantisation_needs_a_checkpoint_that_is_quantised(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    (pair.target / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"--quantization fp8: no tensor of .* is quantised; give int8"):
        check_checkpoints(EngineConfig(pair.target, quantization="fp8"))
    quantised, _ = quantise(pair.target, tmp_path, "fp8 in blocks")
    check_checkpoints(EngineConfig(quantised, quantization="fp8"))


def test_a_vision_tower_does_not_look_quantised(tmp_path: Path) -> None:
    pair = make_hybrid_pair(tmp_path / "pair", seed=3)
    file = next(pair.target.glob("*.safetensors"))
    save_file(load_file(file) | {"model.visual.merger.norm.bias": torch.ones(4)}, file)
    for index in pair.target.glob("*.index.json"):
        homes = json.loads(index.read_text())
        homes["weight_map"]["model.visual.merger.norm.bias"] = file.name
        index.write_text(json.dumps(homes))
    assert texts(pair.target, None, pair.vocab_size)


def test_the_original_of_a_target_that_is_not_rotated_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    with pytest.raises(UnsupportedError, match="--draft-head-from: it is for drafts of a target that is rotated"):
        make_engine(pair.target, pair.draft, draft_head_from=str(pair.target), **SETTINGS)


def test_bytes_in_8_bits_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair(tmp_path / "pair", seed=3, hidden_size=128, intermediate_size=2048)
    with caplog.at_level("INFO"):
        backend = make_engine(pair.target, None, quantization="int8", **SETTINGS).core.runner.backend
    stored = load_file(pair.target / "model.safetensors")
    wanted = sum(tensor.numel() + 4 * len(tensor) for name, tensor in stored.items() if is_linear(name))
    assert (backend.quantised_bytes, backend.widened_bytes) == (wanted, 0)
    assert f"target: {wanted >> 20} MiB of weights stay quantised" in caplog.text


MEMORY: list[tuple[str, str, dict[str, Any]]] = [
    (shape, how, {}) for shape in SHAPES for how in ("fp8 in blocks", "W8A8 mix", "some layers plain")
]
MEMORY += [(shape, "", {"quantization": "int8"}) for shape in ("dense", "experts", "Next")]


@pytest.mark.parametrize(("shape", "how", "settings"), MEMORY, ids=str)
def test_the_memory_that_is_checked_is_that_of_the_weights_that_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: str, how: str, settings: dict[str, Any]
) -> None:
    """It is told before they are loaded. Tensors of a vision tower are left out."""
    make, sizes = SHAPES[shape]
    more = {"multimodal": True} if shape == "hybrid" else {}
    pair = make(tmp_path / "pair", seed=3, **sizes, **more)
    folder = quantise(pair.target, tmp_path, how)[0] if how else pair.target
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        count = CheckpointWeights.num_bytes
        patch.setattr(CheckpointWeights, "num_bytes", lambda *a, **b: counted.append(count(*a, **b)) or counted[-1])
        with caplog.at_level("INFO"):
            target = make_engine(folder, None, **SETTINGS, **settings).core.runner.forward.target
    assert counted == [bytes_of(target)]
    told = [record.message for record in caplog.records if "weights" in record.message]
    assert told[0].startswith(f"the weights take {counted[0] >> 20} MiB ({counted[0] >> 20} MiB of {folder}), and ")


class KeepsAll(TorchBackend):
    def multiplies(self, weight: QuantisedWeight) -> bool:
        return True


@pytest.mark.parametrize("how", ["fp8 in blocks", "fp8 by row", "fp8 by tensor", "W8A8 static"])
@pytest.mark.parametrize("shape", SHAPES)
def test_so_it_is_of_a_device_that_multiplies_by_all_formats(tmp_path: Path, shape: str, how: str) -> None:
    make, sizes = SHAPES[shape]
    folder, _ = quantise(make(tmp_path / "pair", seed=3, **sizes).target, tmp_path, how)
    weights, backend = CheckpointWeights(Checkpoint(folder), CPU, torch.float32, kept=("I8", "F8_E4M3")), KeepsAll(CPU)
    target = target_class((config := target_config(read_config(folder))).model_type)(config, weights, backend)
    assert backend.quantised_bytes > 0 == backend.widened_bytes
    assert weights.num_bytes(backend.multiplies, to=None) == bytes_of(target)


def test_a_draft_is_counted_as_numbers(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=3)
    quantised, _ = quantise(pair.target, tmp_path, "int8 by row")
    stored = load_file(quantised / "model.safetensors")
    weights = CheckpointWeights(Checkpoint(quantised), torch.device("cpu"), torch.float32)
    numbers = sum(tensor.numel() for name, tensor in stored.items() if not name.endswith("scale"))
    assert weights.num_bytes(lambda weight: False, to=None) == 4 * numbers
