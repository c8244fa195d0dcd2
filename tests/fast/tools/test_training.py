"""Training of a pair: its models are the served ones, its losses know positions, and a stopped run can be resumed."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from app import demo
from app.engine.checkpoint.files import DEMO
from tests.fast.engine.reference import ReferenceDraft, features, load_target
from tools.demo_pair import model
from tools.demo_pair.loop import Plan, train
from tools.demo_pair.losses import Batch, block_embeddings, draft_loss, target_loss
from tools.demo_pair.model import Draft, Shape, Target
from tools.demo_pair.muon import optimizers, orthogonal

Network = TypeVar("Network", Target, Draft)
SMALL = Shape(vocab=50, hidden=16, layers=2, head_dim=8, mlp=16, taps=(0,))


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


@torch.no_grad()
def test_the_shipped_weights_say_the_same_in_training_as_in_the_reference() -> None:
    target, draft = Target(Shape()), Draft(Shape())
    target.load_state_dict(load_file(DEMO / "target" / "model.safetensors"))
    draft.load_state_dict(load_file(DEMO / "draft" / "model.safetensors"))
    text, anchor = list(demo.token_ids(1)[0]), 12
    _, tapped = target(torch.tensor([text]))
    wanted = features(their_target := load_target(DEMO / "target"), text, Shape.taps)
    torch.testing.assert_close(tapped[0], wanted, rtol=1e-3, atol=1e-3)
    reference = ReferenceDraft(DEMO / "draft", their_target)
    anchors = torch.tensor([[anchor]])
    blocks = block_embeddings(target, torch.tensor([text]), anchors, reference.mask_token_id)
    block = reference.block_hidden(wanted[:anchor], text[anchor], anchor + 1)
    torch.testing.assert_close(draft(tapped, anchors, blocks)[0, 0], block, rtol=1e-3, atol=1e-3)


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


def written(target: Target, choice: int) -> Tensor:
    """Return a text `[1, T]` whose tokens from 8 on are the target's best (0) or second best (1) choice each."""
    ids = torch.randint(SMALL.vocab, (1, 8))
    for _ in range(40):
        hidden, _ = target(ids)
        ids = torch.cat((ids, target.logits(hidden[:, -1]).topk(2).indices[:, choice : choice + 1]), 1)
    return ids


@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark"])
def test_a_draft_learns_the_targets_own_text_and_no_other(head: str) -> None:
    target, draft = small_target(), Draft(replace(SMALL, head=head))
    steps = optimizers(draft, muon_lr=0.02, adam_lr=0.02)

    def loss(ids: Tensor) -> Tensor:
        supervised = (torch.arange(ids.shape[1]) >= 8).expand_as(ids)
        return draft_loss(target, draft, Batch(ids, supervised), 0, torch.Generator().manual_seed(0))

    own = written(target, choice=0)
    first = loss(own).item()
    for _ in range(30):
        loss(own).backward()
        for optimiser in steps:
            optimiser.step()
            optimiser.zero_grad()
    assert loss(own).item() < first / 2
    assert loss(written(target, choice=1)).item() == 0.0, "the target would have written none of it"


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
def test_muons_updates_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.5 and values.max() < 1.3


def test_rates_rise_hold_and_fall_by_steps_or_by_the_clock() -> None:
    plan = Plan(100, seconds=1000.0, warm_up=10, decay=0.5)
    assert [plan.factor(step, 0.0) for step in (0, 9, 50, 75)] == pytest.approx([0.1, 1.0, 1.0, 0.5])
    assert plan.factor(20, 750.0) == pytest.approx(0.5) and 0 < plan.factor(99, 999.0) < 0.05


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(1))

    def trained(state: Path, stops_at: int | None = None) -> Tensor:
        torch.manual_seed(0)
        network = torch.nn.Linear(4, 4)
        seen = itertools.count()

        def batches(first: int) -> Iterator[Batch]:
            return (Batch(row, row > 0) for row in rows[first:])

        def loss(batch: Batch) -> Tensor:
            if next(seen) == stops_at:
                raise KeyboardInterrupt
            return (network(batch.ids) - 1).square().mean()

        train("tiny", network, loss, batches, Plan(len(rows), warm_up=1, save_every_s=-1.0), state)
        return network.weight.detach()

    whole = trained(tmp_path / "whole.pt")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "stopped.pt", stops_at=3)
    assert torch.equal(trained(tmp_path / "stopped.pt"), whole)
