"""A draft says the same in training as when it is served, and its files are those that the server reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from app import demo
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO, Checkpoint
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.load.engine import Engine
from app.messages import Request
from tests.fast.engine.drafted import drafted_by
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.reference import features, load_target
from tools.train_draft import checkpoint
from tools.train_draft.model import Draft
from tools.train_draft.shape import TOP_K, Head, Shape, shape_for

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
    checkpoint.write(loud(Draft(shape)), shape, folder, *((KEPT, rows) if reduced else (None, None)))


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


def check_alike(
    engine: Engine, requests: list[Request], target: Path, draft: Path, *, head: Tensor | None = None
) -> int:
    """Hold all that an engine drafts against the training model. Return the number of blocks."""
    hidden, model, reference = hidden_by(engine), trained(draft, target), load_target(target)
    blocks = drafted_by(engine.core, requests)
    by_block = torch.cat(hidden).unflatten(0, (len(blocks), -1))
    shape, rows = model.shape, reference.head
    ids = torch.arange(shape.vocab) if shape.draft_vocab == shape.vocab else KEPT
    if shape.draft_vocab < shape.vocab:
        rows = load_file(draft / "model.safetensors")["lm_head.weight"].float()
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
    assert check_alike(engine, [Request("0", tuple(range(3, 40, 3)), 12)], target, tmp_path) > 4


def test_the_shipped_demo_draft_says_the_same_in_training_as_when_served() -> None:
    engine = make_engine(DEMO / "target", DEMO / "draft", max_model_len=200, max_num_seqs=1)
    request = Request("0", tuple(demo.token_ids(1)[0])[:60], 24)
    assert check_alike(engine, [request], DEMO / "target", DEMO / "draft") > 2
