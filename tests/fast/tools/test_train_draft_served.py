"""A draft says the same in training as when it is served, and its files, shape and mask token are as the server's."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers
from torch import Tensor

from app import demo
from app.config.error import ConfigError
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO, Checkpoint, find_folder
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.load.engine import Engine
from app.messages import Request
from app.text.tokenizer import Tokenizer
from tests.exhaustive.smollm2 import check_installed, load_reference
from tests.fast.engine.drafted import drafted_by
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.reference import Target, features, load_target
from tools.train_draft import checkpoint, mask_token
from tools.train_draft.model import Draft
from tools.train_draft.shape import TOP_K, Head, Shape, default_taps, shape_for

torch.set_num_threads(1)
HEADS: list[Head] = ["dflash", "dflash2", "dspark"]
KEPT = torch.arange(1, 97, 2)
"""Tokens of the target that a reduced vocabulary has."""


def shape_of(target: Path) -> DecoderConfig:
    return target_config(Checkpoint(target).config)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"), seed=4, family="llama").target


def small_shape(target: Path, head: Head, draft_vocab: int | None = None) -> Shape:
    wishes: dict[str, Any] = {"layers": 2, "block": 5, "taps": (0, 1, 2), "mask_token_id": 96, "rank": 6}
    return shape_for(shape_of(target), head=head, draft_vocab=draft_vocab, **wishes)


def loud(draft: Draft) -> Draft:
    """Make every weight count, also those that begin at zero or one."""
    noise = torch.Generator().manual_seed(3)
    for name, parameter in draft.named_parameters():
        size = 1.0 if "codebook" in name or "markov_w" in name else 1.5 * parameter.shape[-1] ** -0.5
        torch.nn.init.normal_(parameter, std=size if parameter.ndim > 1 else 0.3, generator=noise)
        if parameter.ndim == 1 and "norm" in name:
            parameter.data += 1
    return draft.requires_grad_(False)


def trained(folder: Path, target: Path) -> Draft:
    stored = checkpoint.read(folder, shape_of(target))
    draft = Draft(stored.shape)
    draft.load_state_dict(stored.state)
    return draft.requires_grad_(False)


def write_loud(folder: Path, target: Path, head: Head, reduced: bool) -> None:
    shape = small_shape(target, head, len(KEPT) if reduced else None)
    rows = load_target(target).head[KEPT]
    checkpoint.write(loud(Draft(shape)), folder, *((KEPT, rows) if reduced else (None, None)))


def hidden_by(engine: Engine) -> list[Tensor]:
    """Return where the hidden states [D * drafts, H] of all blocks to come are noted."""
    seen: list[Tensor] = []
    drafter = engine.core.runner.forward.drafter
    predicting = drafter.predicting

    def noted(*args: Any) -> Tensor:
        seen.append(hidden := predicting(*args))
        return hidden

    drafter.predicting = noted
    return seen


def path_of(draft: Draft, hidden: Tensor, head: Tensor, ids: Tensor, anchor: int) -> list[int]:
    """Return the target's tokens on the path through the best tokens of rows [n, H], by `Draft.pairs`."""
    token, path = anchor, []
    for row in hidden.split(1):
        logits = F.linear(row, head)[0]
        scores = logits + draft.pairs(row, torch.tensor([token]))
        if draft.path is not None:
            rest = torch.ones_like(logits, dtype=torch.bool).index_fill_(0, logits.topk(TOP_K).indices, False)
            scores = scores.masked_fill(rest, -torch.inf)
        path.append(token := int(ids[scores.argmax()]))
    return path


def check_alike(engine: Engine, request: Request, target: Path, draft: Path, reference: Target) -> int:
    """Hold all that an engine drafts against the training model. Return the number of blocks."""
    hidden, model = hidden_by(engine), trained(draft, target)
    blocks = drafted_by(engine.core, [request])
    by_block = torch.cat(hidden).unflatten(0, (len(blocks), -1))
    shape, ids, rows = model.shape, torch.arange(model.shape.vocab), reference.head
    if shape.draft_vocab < shape.vocab:
        ids, rows = KEPT, rows[KEPT].bfloat16().float()
    for block, served in zip(blocks, by_block, strict=True):
        *_, anchor = block.token_ids
        tapped = features(reference, block.token_ids, shape.taps)  # the anchor's own is there, and not seen
        embedded = F.embedding(torch.tensor([anchor] + [shape.mask_token_id] * (shape.block - 1)), reference.embedding)
        wanted = model(tapped[None], torch.tensor([[len(block.token_ids) - 1]]), embedded[None, None])[0, 0, 1:]
        torch.testing.assert_close(served, wanted, rtol=1e-3, atol=1e-3)
        assert block.drafts == path_of(model, wanted, rows, ids, anchor)
    return len(blocks)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", HEADS)
def test_the_server_drafts_what_training_says(tmp_path: Path, target: Path, head: Head, reduced: bool) -> None:
    write_loud(tmp_path, target, head, reduced)
    engine = make_engine(target, tmp_path, max_model_len=100, page_size=4, max_num_seqs=1)
    assert check_alike(engine, Request("0", tuple(range(3, 40, 3)), 12), target, tmp_path, load_target(target)) > 4


def test_the_demo_draft_says_the_same_in_training_as_when_served() -> None:
    engine = make_engine(DEMO / "target", DEMO / "draft", max_model_len=200, max_num_seqs=1)
    request = Request("0", tuple(demo.token_ids(1)[0])[:60], 24)
    assert check_alike(engine, request, DEMO / "target", DEMO / "draft", load_target(DEMO / "target")) > 2


@pytest.mark.exhaustive
def test_the_draft_of_smollm2_says_the_same_in_training_as_when_served() -> None:
    check_installed()
    target, draft = (find_folder("smollm2", role) for role in ("target", "draft"))
    engine = make_engine(target, draft, max_model_len=100, max_num_seqs=1)
    request = Request("0", (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198), 16)
    assert check_alike(engine, request, target, draft, load_reference(target)) > 2


@pytest.mark.parametrize("head", HEADS)
def test_a_block_sees_what_is_before_its_anchor_and_no_other_block(target: Path, head: Head) -> None:
    shape = small_shape(target, head)
    draft, noise = loud(Draft(shape)), torch.Generator().manual_seed(0)
    tapped = torch.randn(2, 30, 3 * shape.hidden, generator=noise)
    blocks = torch.randn(2, 2, shape.block, shape.hidden, generator=noise)
    anchors = torch.tensor([[5, 20], [0, 29]])
    both = draft(tapped, anchors, blocks)
    tapped[0, 5:] += 1
    blocks[:, 1] += 1
    changed = draft(tapped, anchors, blocks)
    torch.testing.assert_close(changed[:, 0], both[:, 0])
    assert ((changed[:, 1] - both[:, 1]).abs().amax((1, 2)) > 0.1).all()
    for block in (slice(0, 1), slice(1, 2)):
        torch.testing.assert_close(draft(tapped, anchors[:, block], blocks[:, block]), changed[:, block])


@pytest.mark.parametrize("head", HEADS)
def test_training_in_bfloat16_is_near_and_reaches_every_weight(target: Path, head: Head) -> None:
    shape = small_shape(target, head)
    draft, noise = loud(Draft(shape)).requires_grad_(True), torch.Generator().manual_seed(0)
    tapped = torch.randn(1, 30, 3 * shape.hidden, generator=noise)
    blocks = torch.randn(1, 2, shape.block, shape.hidden, generator=noise)
    anchors, before = torch.tensor([[5, 20]]), torch.arange(2 * shape.block)

    def scores(dtype: torch.dtype) -> Tensor:
        rows = draft(tapped.to(dtype), anchors, blocks.to(dtype)).flatten(0, 2)
        return rows.sum(1, keepdim=True) + draft.pairs(rows, before)

    wanted = scores(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = scores(torch.bfloat16)
    assert (found - wanted).abs().mean() < 0.1 * wanted.abs().mean()
    (found * torch.randn(found.shape, generator=noise)).sum().backward()
    assert [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.any()] == []


# Files


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", HEADS)
def test_a_draft_that_was_read_is_written_as_it_was(tmp_path: Path, target: Path, head: Head, reduced: bool) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    write_loud(first, target, head, reduced)
    stored = checkpoint.read(first, shape_of(target))
    rows = None if stored.target_ids is None else load_target(target).head[stored.target_ids]
    checkpoint.write(trained(first, target), again, stored.target_ids, rows)
    files = sorted(file.name for file in again.iterdir())
    assert files == ["config.json", "model.safetensors"]
    assert all((again / name).read_bytes() == (first / name).read_bytes() for name in files)


def test_a_kill_while_a_draft_is_written_leaves_the_one_before(tmp_path: Path, target: Path, monkeypatch: Any) -> None:
    write_loud(tmp_path, target, "dspark", reduced=False)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def killed(tensors: dict[str, Tensor], file: Path, **_: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        write_loud(tmp_path, target, "dspark", reduced=False)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    monkeypatch.undo()
    write_loud(tmp_path, target, "dspark", reduced=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, target: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out cannot be written: .*give another --out"):
        write_loud(tmp_path / "file" / "out", target, "dflash", reduced=False)


def config(**changes: Any) -> Callable[[Path], None]:
    """Return a change of a draft's config.json, `dflash_config` merged into it."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        raw |= changes | {"dflash_config": raw["dflash_config"] | changes.get("dflash_config", {})}
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def tensors(rewrite: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        rewrite(stored)
        save_file(stored, folder / "model.safetensors")

    return change


def mask_row(folder: Path) -> None:
    torch.save({}, folder / "mask_embedding.pt")


OTHER_DRAFTS: list[tuple[Callable[[Path], None], str]] = [
    (config(num_target_layers=7), "num_target_layers is 7, but this target has 4"),
    (config(dflash_config={"markov_head_type": "vanilla"}), "path is PathConfig(kind='vanilla'"),
    (config(dflash_config={"dspark_bonus_anchor": False}), "first_draft_row is 0, and here 1"),
    (config(layer_types=["sliding_attention"] * 2, sliding_window=9), "masks is (AttentionMask(causal=True, window=9)"),
    (config(attention_bias=True), "qkv_bias is True, and here False"),
    (config(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope is RopeConfig("),
    (config(dtype="float32"), "dtype is float32, and here bfloat16"),
    (config(dflash_config={"input_embedding_scale": 2.0}), "embedding_scale is 2.0, and here 1.0"),
    (config(dflash_config={"conv_kernel_size": 2, "conv_group_size": 8}), "path is PathConfig(kind='gated'"),
    (config(colour="red"), "keys that are unknown here and ignored: colour"),
    (tensors(lambda stored: stored.pop("fc.weight")), "tensor fc.weight is missing, and here [32, 96]"),
    (tensors(lambda stored: stored.update({"norm.weight": torch.ones(8)})), "tensor norm.weight is [8], and here [32]"),
    (
        tensors(lambda stored: stored.update({"embed_tokens.weight": torch.ones(97, 32)})),
        "tensor embed_tokens.weight is [97, 32], and here there is none",
    ),
    (mask_row, "it has mask_embedding.pt"),
]


@pytest.mark.parametrize(("change", "message"), OTHER_DRAFTS, ids=[message[:30] for _, message in OTHER_DRAFTS])
def test_another_draft_is_refused_by_what_differs(
    tmp_path: Path, target: Path, change: Callable[[Path], None], message: str
) -> None:
    write_loud(tmp_path, target, "dspark", reduced=False)
    change(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        checkpoint.read(tmp_path, shape_of(target))


def test_a_reduced_vocabulary_with_a_token_twice_is_refused(tmp_path: Path, target: Path) -> None:
    write_loud(tmp_path, target, "dflash", reduced=True)
    tensors(lambda stored: stored["d2t"][3:4].sub_(2))(tmp_path)
    with pytest.raises(ConfigError, match="its d2t does not lead to 48 different tokens of 97"):
        checkpoint.read(tmp_path, shape_of(target))


# Shapes


def test_a_shape_has_the_sizes_of_its_target_and_the_taps_of_published_drafts(target: Path) -> None:
    asked: dict[str, Any] = {"head": "dspark", "layers": 4, "block": 8, "mask_token_id": 3, "rank": 48}
    shape = shape_for(shape_of(DEMO / "target"), taps=None, draft_vocab=None, **asked)
    sizes = (shape.vocab, shape.draft_vocab, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.mlp)
    assert sizes == (2560, 2560, 192, 4, 2, 128, 384)
    assert (shape.taps, shape.rope_theta, shape.eps, shape.max_positions) == ((0, 1, 2, 3), 1e5, 1e-6, 2048)
    published = {24: (1, 6, 11, 16, 21), 30: (1, 8, 14, 21, 27), 36: (1, 9, 17, 25, 33), 64: (1, 16, 31, 46, 61)}
    assert {num_layers: default_taps(num_layers) for num_layers in published} == published
    for num_layers in range(2, 40):
        deep = replace(shape_of(target), num_layers=num_layers)
        assert shape_for(deep, taps=None, draft_vocab=None, **asked).num_target_layers == num_layers


WRONG_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"taps": (0, 3)}, "--taps 0,3: a draft reads layers 0 to 2, ascending and each once"),
    ({"taps": (2, 1)}, "--taps 2,1: a draft reads layers 0 to 2, ascending"),
    ({"taps": (1, 1)}, "--taps 1,1: a draft reads"),
    ({"taps": (-1, 1)}, "--taps -1,1: a draft reads"),
    ({"layers": 0}, "--layers 0: a draft has at least 1 layer"),
    ({"block": 1}, "--block 1: give 2 to 16"),
    ({"block": 17}, "--block 17: give 2 to 16"),
    ({"draft_vocab": 98}, "--draft-vocab 98: give 16 to 97"),
    ({"draft_vocab": 15}, "--draft-vocab 15: give 16 to 97"),
    ({"rank": 0}, "--rank 0: the tables of --head dspark have at least 1 column"),
    ({"head": "dflash2", "hidden": 40}, "--head dflash2: its convolutions have groups of 16 channels, and"),
    ({"num_layers": 1, "taps": None}, "a target of 1 layer: a draft reads a target of 2 layers or more"),
]


@pytest.mark.parametrize(("wishes", "message"), WRONG_SHAPES, ids=[message[:25] for _, message in WRONG_SHAPES])
def test_a_shape_that_cannot_be_served_is_refused(target: Path, wishes: dict[str, Any], message: str) -> None:
    asked = {"head": "dspark", "layers": 2, "block": 5, "taps": (0, 1), "draft_vocab": None, "rank": 6} | wishes
    config = shape_of(target)
    config = replace(config, hidden_size=asked.pop("hidden", config.hidden_size))
    config = replace(config, num_layers=asked.pop("num_layers", config.num_layers))
    with pytest.raises(ConfigError, match=re.escape(message)):
        shape_for(config, mask_token_id=96, **asked)


# Mask tokens

CHATML = """{% for m in messages %}<|im_start|>{{ '<|' ~ m.role ~ '|>' }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}{% if tools %}<|tool|>{% endif %}"""
IN_USE = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "<|tool|>", "<|user|>", "<|bos|>"]


def qwen_like(folder: Path, unused: list[str]) -> Tokenizer:
    """Return a tokenizer of 256 bytes and special tokens: IN_USE, and those that are `unused`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([*IN_USE, *unused])
    backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"chat_template": CHATML}))
    return Tokenizer(folder)


UNUSED: dict[str, list[str]] = {
    "<|vision_pad|>": ["<|box_start|>", "<|vision_pad|>", "<|image_pad|>"],
    "<|reserved_7|>": ["<|vision_pad|>", "<|reserved_7|>", "<|reserved_8|>"],
    "<mask>": ["<unused0>", "<mask>"],
    "<|box_start|>": ["<|box_start|>", "<|box_end|>"],
    "": [],
}


@pytest.mark.parametrize("wanted", UNUSED)
def test_the_mask_is_an_unused_special_token_or_a_row_without_a_token(tmp_path: Path, wanted: str) -> None:
    tokenizer = qwen_like(tmp_path, UNUSED[wanted])
    token, text = mask_token.choose(tokenizer, 300)
    assert text == wanted
    assert token == (tokenizer.backend.token_to_id(wanted) if wanted else tokenizer.max_id + 1)
    assert mask_token.choose(tokenizer, 300, str(token)) == (token, text)
    if text:
        assert mask_token.choose(tokenizer, 300, text) == (token, text)


def test_a_target_without_an_unused_token_is_refused(tmp_path: Path) -> None:
    tokenizer = qwen_like(tmp_path, [])
    with pytest.raises(ConfigError, match="no unused special token"):
        mask_token.choose(tokenizer, tokenizer.max_id + 1)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("<|im_end|>", "--mask-token <|im_end|>: '<|im_end|>' ends an answer; give an unused special token"),
        ("<|im_start|>", "'<|im_start|>' is written by the chat template"),
        ("<think>", "'<think>' is written by the chat template"),
        ("<|user|>", "'<|user|>' is written by the chat template"),
        ("<|tool|>", "'<|tool|>' is written by the chat template"),
        ("<|bos|>", "'<|bos|>' is the tokenizer's bos_token"),
        ("<|endoftext|>", "'<|endoftext|>' is the tokenizer's pad_token"),
        ("z", "'z' is a token of ordinary text"),
        ("<|nope|>", "--mask-token <|nope|>: the target's tokenizer has no such token"),
        ("-1", "--mask-token -1: the target's tokenizer has no such token"),
        ("300", "--mask-token 300: the target has the tokens 0 to 299"),
    ],
)
def test_a_mask_token_that_is_in_use_or_not_there_is_refused(tmp_path: Path, wanted: str, message: str) -> None:
    tokenizer = qwen_like(tmp_path, ["<|vision_pad|>"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        mask_token.choose(tokenizer, 300, wanted)


def test_the_demo_draft_has_the_mask_token_that_is_chosen() -> None:
    tokenizer = Tokenizer(DEMO / "target")
    assert mask_token.choose(tokenizer, 2560) == (3, "<|mask|>")
    assert checkpoint.read(DEMO / "draft", shape_of(DEMO / "target")).shape.mask_token_id == 3


@pytest.mark.exhaustive
def test_the_draft_of_smollm2_has_the_mask_token_that_is_chosen() -> None:
    check_installed()
    assert mask_token.choose(Tokenizer(find_folder("smollm2", "target")), 49152) == (16, "<empty_output>")
