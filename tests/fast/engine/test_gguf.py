"""A target in a GGUF file computes what its original computes, and its weights are what ggml makes of them."""

import base64
import hashlib
import json
import math
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint
from app.engine.checkpoint.gguf import BLOCKS, GGUF_FILE, read_header
from app.engine.checkpoint.shapes import Llama3Scaling, RopeDivisors
from app.engine.errors import UnsupportedError
from app.engine.load.engine import build_engine
from app.engine.load.loader import CheckpointWeights
from app.engine.models.rope import frequencies
from app.engine.models.weights import Part
from app.engine.quantised import QuantisedWeight
from app.messages import Request
from tests import UNTIMED
from tests.fast.engine.feeder import Feeder, assert_logits_close, random_checkpoint
from tests.fast.engine.gguf_models import (
    CONVERTED,
    ORIGINALS,
    QUANTISED,
    YARN,
    Quantise,
    as_type,
    dequantised,
    to_gguf,
    write_original,
)
from tests.fast.engine.lossless import LUCKY, make_engine, random_prompts, run_engine
from tests.fast.engine.pairs import FAMILIES, LLAMA3, Pair, make_pair
from tests.fast.engine.thread_ranks import ThreadRanks

torch.set_num_threads(1)

CPU = torch.device("cpu")
Json = dict[str, Any]
LINEAR = {"rope_type": "linear", "factor": 3.0}
SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, Json] = {
    **{f"{family}, theta": {"family": family, "rope_theta": 1e6} for family in ORIGINALS},
    **{f"{family}, linear": {"family": family, "rope_scaling": LINEAR} for family in ORIGINALS},
    **{f"{family}, yarn": {"family": family, "rope_scaling": YARN} for family in ORIGINALS},
    **{f"{family}, tied": {"family": family, "tied": True} for family in ORIGINALS},
    **{f"{family}, biases": {"family": family, "biases": True} for family in ("llama", "qwen3")},
    "llama, yarn by defaults": {"family": "llama", "rope_scaling": SHORT_YARN},
    "llama, llama3": {"family": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama, mha": {"family": "llama", "head_dim": 8, "num_kv_heads": 4},
    "qwen2, no key_length": {"family": "qwen2", "head_dim": 8},
}


def logits(folder: Path, token_ids: list[int], chunk: int = 7, **settings: Any) -> Tensor:
    feeder = Feeder(make_engine(folder, **{"page_size": 4, "max_model_len": 256, "max_num_seqs": 4} | settings))
    return feeder.logits(feeder.feed_whole(token_ids, chunk))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_original_to_the_bit(tmp_path: Path, shape: str) -> None:
    checkpoint = random_checkpoint(tmp_path, **SHAPES[shape])
    folder = to_gguf(checkpoint.folder, tmp_path / "gguf")
    assert torch.equal(*(logits(each, checkpoint.prompts[1]) for each in (folder, checkpoint.folder)))


def test_llama3s_divisors_are_its_formula_at_3000_tokens_too(tmp_path: Path) -> None:
    """The divisors of a published model are rounded to fp32, which moves a few frequencies by their last bit."""
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes: Json = {"num_layers": 2, "taps": (0,), "head_dim": 64, "max_position_embeddings": 4096}
    scaling = {"rope_type": "llama3", "factor": 32.0, **bands}
    pair = make_pair(tmp_path, family="llama", rope_theta=5e5, rope_scaling=scaling, **sizes)
    text = [i * 40503 % 65521 % 97 for i in range(3000)]
    settings = {"chunk": 1000, "max_model_len": 3200, "page_size": 16, "max_num_seqs": 1}
    folders = to_gguf(pair.target, tmp_path / "gguf"), pair.target
    assert_logits_close(*(logits(folder, text, **settings) for folder in folders))
    rope, wanted = (target_config(Checkpoint(folder).config).rope for folder in folders)
    assert isinstance(rope.scaling, RopeDivisors) and isinstance(wanted.scaling, Llama3Scaling)
    torch.testing.assert_close(frequencies(rope, 64), frequencies(wanted, 64), rtol=2**-23, atol=0)


# Files of llama.cpp's converter


@pytest.mark.parametrize("family", ORIGINALS)
def test_files_are_written_here_as_by_the_converter(tmp_path: Path, family: str) -> None:
    kind = {"bf16": "BF16", "f16": "F16", "q8_0": "Q8_0"}[ORIGINALS[family][1]]
    made = to_gguf(write_original(tmp_path, family), tmp_path / "gguf", as_type(kind)) / GGUF_FILE
    (metadata, tensors), (wanted, wanted_tensors) = content(made), content(CONVERTED / f"{family}.gguf")
    assert tensors == wanted_tensors
    assert metadata == wanted


def content(file: Path) -> tuple[Json, Json]:
    """Return the metadata of the architecture, and the shape, the type and the bytes of all tensors."""
    header, whole = read_header(file), file.read_bytes()
    metadata = {key: value for key, value in header.metadata.items() if not key.startswith(("general.", "tokenizer."))}
    tensors = {t.name: (t.shape, t.type, whole[t.offset : t.offset + t.nbytes]) for t in header.tensors.values()}
    return metadata, tensors


@pytest.mark.parametrize("family", ORIGINALS)
def test_logits_of_the_converters_file_are_those_of_the_original(tmp_path: Path, family: str) -> None:
    original, folder = write_original(tmp_path, family), tmp_path / "gguf"
    folder.mkdir()
    (folder / GGUF_FILE).symlink_to(CONVERTED / f"{family}.gguf")
    if ORIGINALS[family][1] == "q8_0":
        original = dequantised(original, tmp_path / "twin", as_type("Q8_0"))
    text = [i * 40503 % 65521 % 32 for i in range(200)]
    assert torch.equal(*(logits(each, text) for each in (folder, original)))


# Types


@cache
def blocks(kind: str) -> tuple[Any, str]:
    """Return some blocks of a type, a row each, and the SHA-256 of what ggml makes of them."""
    recorded = json.loads(QUANTISED.read_text())[kind]
    size = next(size for name, _, size in BLOCKS.values() if name == kind)
    stored = np.frombuffer(base64.b64decode(recorded["blocks"]), dtype=np.uint8)
    return stored.reshape(-1, size), recorded["sha256"]


def of_blocks(kind: str) -> Quantise:
    """Return a function that makes matrices of a type's recorded blocks, in an order of each size's own."""
    if kind == "F32":
        return as_type(kind)
    stored, (_, block, _) = blocks(kind)[0], next(each for each in BLOCKS.values() if each[0] == kind)

    def chosen(matrix: Tensor) -> Any:
        order = np.arange(matrix.numel() // block) * 40503 % 65521 % len(stored)
        return GGMLQuantizationType[kind], stored[order].reshape(len(matrix), -1)

    return chosen


TYPES = [name for name, _, _ in BLOCKS.values()]


@pytest.mark.parametrize("kind", TYPES[1:])
def test_weights_are_ggmls_own_to_the_bit(tmp_path: Path, kind: str) -> None:
    recorded, digest = blocks(kind)
    stored = recorded.reshape(2, -1)
    pair = make_pair(tmp_path, vocab_size=2, hidden_size=512, num_layers=2, taps=(0,))

    def quantise(matrix: Tensor) -> Any:
        return (GGMLQuantizationType[kind], stored) if len(matrix) == 2 else as_type("F32")(matrix)

    folder = to_gguf(pair.target, tmp_path / "gguf", quantise)
    weights = CheckpointWeights(Checkpoint(folder), CPU, torch.float32)
    assert hashlib.sha256(weights.get("embed_tokens.weight", 2, 512).numpy()).hexdigest() == digest


@pytest.mark.parametrize("family", ORIGINALS)
@pytest.mark.parametrize("kind", TYPES)
def test_the_matrix_of_types_and_families(tmp_path: Path, kind: str, family: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 40}
    pair = make_pair(tmp_path, family=family, num_layers=2, taps=(0,), **sizes)
    folder = to_gguf(pair.target, tmp_path / "gguf", of_blocks(kind))
    twin = dequantised(pair.target, tmp_path / "twin", of_blocks(kind))
    assert {t.type for t in read_header(folder / GGUF_FILE).tensors.values()} == {"F32", kind}
    text = [i * 40503 % 65521 % 40 for i in range(20)]
    found, wanted = (logits(each, text, chunk=20) for each in (folder, twin))
    assert torch.equal(found, wanted) and found.std() > 0.01


# Parts, ranks, drafts, int8


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "pair", **LUCKY | FAMILIES["Llama 3.1"])


def opened(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> CheckpointWeights:
    return CheckpointWeights(Checkpoint(folder), CPU, dtype, **more)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_the_part_of_the_whole_and_larger_ones_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("app.engine.load.gguf._ROWS", 7)
    target = make_pair(tmp_path, biases=True, intermediate_size=96, family="llama").target
    folder = to_gguf(target, tmp_path / "gguf", as_type(kind))
    weights, wide = opened(folder, dtype), opened(dequantised(target, tmp_path / "twin", as_type(kind)), dtype)
    for name, shape, axis in (("mlp.up_proj.weight", (96, 32), 0), ("mlp.down_proj.weight", (32, 96), 1)):
        whole = weights.get(f"layers.1.{name}", *shape)
        assert whole.dtype == dtype and torch.equal(whole, wide.get(f"layers.1.{name}", *shape))
        for ranges in ((range(40),), (range(3, 50),), (range(8, 20), range(60, 96))):
            part = Part(axis, ranges)
            found = weights.get(f"layers.1.{name}", *shape, part=part)
            assert found.is_contiguous() and torch.equal(found, part.of(whole))
    bias = weights.get("layers.1.self_attn.v_proj.bias", 32)
    part = Part(0, (range(16, 32),))
    assert torch.equal(weights.get("layers.1.self_attn.v_proj.bias", 32, part=part), part.of(bias))


def test_a_part_of_the_rows_reads_no_other_and_a_file_cut_off_meanwhile_is_refused(tmp_path: Path) -> None:
    folder = to_gguf(make_pair(tmp_path).target, tmp_path / "gguf")
    weights, name, shape = opened(folder), "layers.3.mlp.up_proj.weight", (64, 32)
    place = read_header(folder / GGUF_FILE).tensors["blk.3.ffn_up.weight"]
    os.truncate(folder / GGUF_FILE, place.offset + place.nbytes // 2)
    assert weights.get(name, *shape, part=Part(0, (range(16, 32),))).shape == (16, 32)
    with pytest.raises(UnsupportedError, match=f"{GGUF_FILE} was cut off while it was read; download it again"):
        weights.get(name, *shape)


def test_progress_ends_at_its_total_and_never_passes_it(tmp_path: Path, pair: Pair) -> None:
    told: list[tuple[int, int]] = []
    folder = to_gguf(pair.target, tmp_path / "gguf", as_type("Q4_0"))

    def open_and_note(*given: Any) -> CheckpointWeights:
        return CheckpointWeights(*given[:3], lambda *done: told.append(done), given[4])

    build_engine(EngineConfig(folder, device="cpu", max_num_seqs=1, **UNTIMED), open_weights=open_and_note)
    assert all(before <= after <= total for (before, _), (after, total) in pairwise(told))
    assert told[-2] == told[-1] and len(told) > 30


def texts(target: Path, pair: Pair, draft: bool, **settings: Any) -> tuple[list[list[int]], int]:
    """Return the texts of some prompts, and the tokens that came without a step of their own."""
    engine = make_engine(target, pair.draft if draft else None, max_num_seqs=4, max_model_len=256, **settings)
    prompts = random_prompts(pair.vocab_size, 6)
    run = run_engine(engine, [Request(str(i), prompt.token_ids, max_tokens=40) for i, prompt in enumerate(prompts)])
    return run.texts, run.verify_tokens - run.verify_steps


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_dflash_changes_no_token(tmp_path: Path, pair: Pair, kind: str) -> None:
    folder = to_gguf(pair.target, tmp_path / "gguf", as_type(kind))
    twin = dequantised(pair.target, tmp_path / "twin", as_type(kind))
    with_drafts, accepted = texts(folder, pair, draft=True)
    assert with_drafts == texts(folder, pair, draft=False)[0] == texts(twin, pair, draft=False)[0]
    assert accepted == texts(twin, pair, draft=True)[1] > 0


def test_target_and_draft_look_one_rotation_up_though_other_dims_of_each_turn_together(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, family="llama")
    forward = make_engine(to_gguf(pair.target, tmp_path / "gguf"), pair.draft).core.runner.forward
    assert forward.drafter is not None and forward.drafter.rotary is forward.rotary


@pytest.mark.parametrize("family", ["Llama 3.1", "Qwen2.5", "Qwen3, biases"])
def test_ranks_choose_what_one_rank_chooses(tmp_path: Path, family: str) -> None:
    pair = make_pair(tmp_path, vocab_size=96, **FAMILIES[family] | {"num_kv_heads": 2, "head_dim": 16})
    folder = to_gguf(pair.target, tmp_path / "gguf", as_type("Q8_0"))
    requests = [Request(str(i), tuple(range(3 + i, 40 + i)), max_tokens=12) for i in range(3)]
    config = EngineConfig(
        folder, pair.draft, device="cpu", dtype="float32", max_num_seqs=4, tensor_parallel_size=2, **UNTIMED
    )
    ranks = ThreadRanks(config)
    found = ranks.engine.core.run(requests)
    ranks.close()
    assert found == make_engine(folder, pair.draft, max_num_seqs=4).core.run(requests)


def test_int8_rounds_the_widened_weights_of_products(tmp_path: Path, pair: Pair) -> None:
    folder = to_gguf(pair.target, tmp_path / "gguf", as_type("Q4_0"))
    twin = dequantised(pair.target, tmp_path / "twin", as_type("Q4_0"))
    settings: Json = {"quantization": "int8"}
    target = make_engine(folder, **settings).core.runner.forward.target
    assert isinstance(target.layers[0].attention.qkv, QuantisedWeight)
    assert texts(folder, pair, draft=False, **settings)[0] == texts(twin, pair, draft=False, **settings)[0]


# Memory


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_memory_is_refused_by_the_widened_weights_before_any_is_read(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch, dtype: str, itemsize: int
) -> None:
    folder = to_gguf(pair.target, tmp_path / "gguf", as_type("Q4_0"))
    header = read_header(folder / GGUF_FILE)
    count = sum(math.prod(tensor.shape) for name, tensor in header.tensors.items() if name != "rope_freqs.weight")
    assert opened(folder, getattr(torch, dtype)).num_bytes(lambda weight: False, to=None) == itemsize * count
    monkeypatch.setattr("app.engine.cpu.backend.CpuBackend.memory", lambda self: (itemsize * count - 1, 1 << 40))
    monkeypatch.setattr(CheckpointWeights, "get", lambda *args, **how: pytest.fail("weights are read"))
    told = f"too few: .*; of a GGUF file they take {itemsize} bytes a weight, whatever its types"
    with pytest.raises(UnsupportedError, match=told):
        make_engine(folder, dtype=dtype)
