"""The gated delta rule in chunks equals substitution token by token in fp64, also where keys are nearly equal."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device import gated_delta
from app.engine.device.gated_delta import commit_and_verify, commit_prompts, delta_rule, l2norm, last_rows, short_conv
from app.engine.device.recurrent import GatedDeltaStep
from tests.fast.engine.delta_layers import CLOSE, SMALL, Layer
from tests.fast.engine.delta_suite import DeltaSuite, PromptSuite

torch.set_num_threads(1)
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 6, 8, 12


def inputs(num_seqs: int, num_rows: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_seqs, *shape, generator=draw)

    return {
        "q": normal(num_rows, K_HEADS, K_DIM),
        "k": normal(num_rows, K_HEADS, K_DIM),
        "v": normal(num_rows, V_HEADS, V_DIM),
        "log_decay": -normal(num_rows, V_HEADS).abs() / 4,
        "beta": normal(num_rows, V_HEADS).sigmoid(),
        "state": normal(V_HEADS, K_DIM, V_DIM),
    }


def substituted(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and state in fp64, one row after the other."""
    q, k, v, log_decay, beta, state = (x.double() for x in (q, k, v, log_decay, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(V_HEADS // K_HEADS, dim=2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        state = state * log_decay[:, t].exp()[..., None, None]
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("shkv,shk->shv", state, k[:, t]))
        state = state + torch.einsum("shk,shv->shkv", k[:, t], d)
        outputs.append(torch.einsum("shkv,shk->shv", state, q[:, t]) * K_DIM**-0.5)
    return torch.stack(outputs, dim=1), state


def assert_close(found: Tensor, wanted: Tensor, allowed: float = 1e-5) -> None:
    assert found.dtype == torch.float32
    error = float((found.double() - wanted).abs().max() / wanted.abs().max())
    assert error < allowed, f"differs by {error:.2g} of the largest number"


@pytest.mark.parametrize("num_rows", [1, 2, 16, 63, 64, 65, 130])
def test_rows_in_chunks_are_rows_one_by_one(num_rows: int):
    given = inputs(2, num_rows)
    for found, wanted in zip(delta_rule(**given), substituted(**given), strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("nearly", [0.0, 1e-3])
@pytest.mark.parametrize("num_rows", [16, 64])
def test_the_solve_keeps_its_digits_on_repeated_tokens(num_rows: int, nearly: float):
    """Keys are equal or nearly so, nothing decays and beta is almost 1: then all numbers of the system are near 1."""
    given = inputs(1, num_rows)
    given["k"] = given["k"][:, :1] + nearly * given["k"]
    given["log_decay"] *= 1e-4
    given["beta"] = 1 - given["beta"] / 100
    for found, wanted in zip(delta_rule(**given), substituted(**given), strict=True):
        assert_close(found, wanted)


def test_one_formula_serves_any_cut_of_the_rows():
    given = inputs(1, 40)
    state, parts = given.pop("state"), []
    whole = delta_rule(**given, state=state)
    for rows in torch.arange(40).split([1, 16, 1, 7, 15]):
        o, state = delta_rule(**{name: x[:, rows] for name, x in given.items()}, state=state)
        parts.append(o)
    assert_close(torch.cat(parts, dim=1), whole[0].double())
    assert_close(state, whole[1].double())


def test_rows_without_decay_and_beta_leave_the_state_as_it_is():
    given = inputs(2, 16)
    for name in ("log_decay", "beta"):
        given[name][:, 5:] = 0.0
    short = {name: x if name == "state" else x[:, :5] for name, x in given.items()}
    torch.testing.assert_close(delta_rule(**given)[1], delta_rule(**short)[1], rtol=1e-6, atol=1e-6)


def test_strong_decay_does_not_overflow():
    given = inputs(1, 64)
    given["log_decay"] *= 1000
    for found, wanted in zip(delta_rule(**given), substituted(**given), strict=True):
        assert_close(found, wanted)


def test_a_vector_of_zeros_has_a_norm():
    assert l2norm(torch.zeros(3, 4)).eq(0).all()


def test_the_convolution_reaches_three_rows_back():
    draw = torch.Generator().manual_seed(1)
    before, rows, weight = (torch.randn(*shape, generator=draw) for shape in ((2, 3, 5), (2, 7, 5), (5, 4)))
    x = torch.cat((before, rows), dim=1)
    wanted = torch.stack([sum(weight[:, j] * x[:, t + j] for j in range(4)) for t in range(7)], dim=1)
    torch.testing.assert_close(short_conv(before, rows, weight.t()), torch.nn.functional.silu(wanted))


def test_the_last_rows_are_those_before_the_first_that_does_not_count():
    before, rows = torch.tensor([[[1], [2], [3]]] * 4), torch.tensor([[[4], [5], [6], [7]]] * 4)
    found = last_rows(before, rows, torch.tensor([0, 1, 3, 4]))
    assert found.squeeze(2).tolist() == [[1, 2, 3], [2, 3, 4], [4, 5, 6], [5, 6, 7]]


class TestCommitAndVerify(DeltaSuite):
    run = staticmethod(commit_and_verify)


class TestWithCountsOnTheHost(TestCommitAndVerify):
    def layer(self, *shape: GatedDeltaConfig, **sizes: Any) -> Layer:
        return super().layer(*shape, can_wait=True, **sizes)


class TestCommitPrompts(PromptSuite):
    run = staticmethod(commit_prompts)


class TestPromptsWithCountsOnTheHost(TestCommitPrompts):
    def layer(self, *shape: GatedDeltaConfig, **sizes: Any) -> Layer:
        return super().layer(*shape, can_wait=True, **sizes)


@pytest.mark.parametrize("can_wait", [False, True])
def test_the_other_layers_of_a_forward_take_the_places_that_the_first_found(
    monkeypatch: pytest.MonkeyPatch, can_wait: bool
) -> None:
    """The first layer has counted its own slots on by then, and a later forward asks again. A layer that a failed step
    has not reached has other slots to commit."""
    asked, find = list[int](), gated_delta._places
    monkeypatch.setattr(gated_delta, "_places", lambda *step: asked.append(1) or find(*step))
    shared: dict[str, Any] = {}

    def run(step: GatedDeltaStep) -> Tensor:
        return commit_and_verify(step._replace(shared=shared))

    layers = [Layer(SMALL, run, can_wait=can_wait) for _ in range(3)]
    num_tokens = torch.stack([layer.memory.num_tokens for layer in layers])
    for index, layer in enumerate(layers):
        layer.memory = replace(layer.memory, num_tokens=num_tokens[index], of_layers=num_tokens, index=index)
    num_tokens.fill_(40)
    num_tokens[2] = 39
    for starts, num_asked in (([42, 41, 0], 1), ([43, 42, 2], 2)):
        shared.clear()
        for layer in layers:
            rows, counts = layer.rows(6), [3, 2, 1]
            wanted, slots = layer.wanted(rows, [3, 1, 5], starts, counts)
            torch.testing.assert_close(layer.found(rows, [3, 1, 5], starts, counts), wanted, **CLOSE)
            torch.testing.assert_close(layer.state["matrix"], slots["matrix"], **CLOSE)
        assert len(asked) == num_asked
