"""Training rows and the trained model of the demo pair: what is supervised, where tokens stand, and who sees whom."""

import itertools
from typing import TypeVar

import pytest
import torch
from tokenizers import Tokenizer

from app.engine.checkpoint.files import DEMO
from tools.demo_pair import model, rows
from tools.demo_pair.losses import target_loss
from tools.demo_pair.model import Draft, Shape, Target
from tools.demo_pair.rows import TARGET_WEIGHTS, Batch, batches

Network = TypeVar("Network", Target, Draft)
SMALL = Shape(vocab=50, hidden=16, layers=2, head_dim=8, mlp=16, taps=(0,))
TOKENIZER = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


def first(count: int, worker: int = 0) -> list[Batch]:
    return list(itertools.islice(batches(TOKENIZER, "test", 1024, TARGET_WEIGHTS, worker=worker), count))


def test_rows_with_tools_begin_with_the_section_and_supervise_calls_and_answers_alone() -> None:
    with_tools = [batch for batch in first(48) if batch.positions is not None]
    assert 3 <= len(with_tools) < 24
    shown = [
        (ids[mask], ids[~mask]) for batch in with_tools for ids, mask in zip(batch.ids, batch.supervised, strict=True)
    ]
    texts = [tuple(TOKENIZER.decode(part.tolist(), skip_special_tokens=False) for part in parts) for parts in shown]
    assert all("# Tools" in rest[:120] and "<tool_response>" not in answers for answers, rest in texts)
    assert sum('<tool_call>\n{"name": "' in answers for answers, _ in texts) > len(texts) / 2


def test_positions_grow_leave_some_out_and_fit_the_model() -> None:
    positions = [batch.positions for batch in first(96) if batch.positions is not None]
    gaps = [p.diff() for p in positions]
    assert all((gap >= 1).all() and (gap > 1).sum() <= 1 for gap in gaps)
    assert all(p.min() >= 0 and p.max() < Shape.max_positions for p in positions)
    assert any(p.max() >= 1024 for p in positions) and any((gap == 1).all() for gap in gaps)


def test_workers_have_the_same_lengths_and_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TOOL_SHARE", 1.0)
    one, other = first(4), first(4, worker=1)
    assert [batch.ids.shape for batch in one] == [batch.ids.shape for batch in other]
    assert not any(torch.equal(a.ids, b.ids) for a, b in zip(one, other, strict=True))


def loud(network: Network) -> Network:
    """Make every matrix count, also those that begin at zero."""
    for parameter in network.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.7)
    return network


def small_target() -> Target:
    torch.manual_seed(0)
    target = Target(SMALL)
    return loud(target)


def test_queries_that_attend_in_parts_see_what_they_see_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = small_target(), torch.randint(SMALL.vocab, (2, 70))
    whole = target(ids)
    monkeypatch.setattr(model, "_QUERIES", 16)
    for part, wanted in zip(target(ids), whole, strict=True):
        torch.testing.assert_close(part, wanted)
    shorter, _ = target(ids[:, :40])
    torch.testing.assert_close(shorter, whole[0][:, :40])


def test_distances_count_and_not_positions_themselves() -> None:
    target, ids = small_target(), torch.randint(SMALL.vocab, (1, 30))
    supervised = torch.zeros_like(ids, dtype=torch.bool)
    supervised[:, 16:] = True
    torn = torch.arange(30)
    torn[15:] += 500
    plain, moved, jumped = (
        target_loss(target, Batch(ids, supervised, positions)) for positions in (None, torch.arange(30) + 500, torn)
    )
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-4)
    assert (jumped - plain).abs() > 0.002


def test_the_draft_stands_where_its_anchors_stand() -> None:
    target, draft = small_target(), loud(Draft(SMALL))
    ids, anchors = torch.randint(SMALL.vocab, (1, 30)), torch.tensor([[5, 20]])
    _, features = target(ids)
    blocks = torch.randn(1, 2, SMALL.block, SMALL.hidden)
    plain = draft(features, anchors, blocks)
    torch.testing.assert_close(draft(features, anchors, blocks, torch.arange(30) + 300), plain, rtol=1e-3, atol=1e-3)
    torn = torch.arange(30)
    torn[10:] += 300
    moved = draft(features, anchors, blocks, torn)
    torch.testing.assert_close(moved[:, 0], plain[:, 0])
    assert (moved[:, 1] - plain[:, 1]).abs().max() > 0.01
