"""The best logit of a row, chosen where logits are made, is PyTorch's argmax of them: ties, NaN and all."""

import math

import pytest
import torch
import torch.nn.functional as F

from app.engine.cuda import products, timed_launches
from app.engine.cuda.backend import CudaBackend
from app.engine.cuda.invariant import InvariantCudaBackend
from app.engine.cuda.products import Product
from app.engine.sampling.sampler import Sampler
from app.engine.sequence import NOT_FINITE

torch.set_num_threads(1)

CPU = torch.device("cpu")
HIDDEN, VOCAB = 64, 300
WAYS = [Product(64, 32, 1), Product(128, 32, 2), Product(64, 64, 1)]


def numbers(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(rows)
    return torch.randn(rows, HIDDEN, generator=noise).to(dtype), torch.randn(VOCAB, HIDDEN, generator=noise).to(dtype)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_it_is_the_argmax_of_the_same_products_logits(way: Product, rows: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, lm_head = numbers(rows, dtype)
        expected = products.linear(x, lm_head, way).float().argmax(dim=-1)
        assert torch.equal(products.choose(x, lm_head, way, NOT_FINITE), expected)
    x, lm_head = numbers(rows)
    assert torch.equal(products.choose(x, lm_head, way, NOT_FINITE), F.linear(x, lm_head).argmax(dim=-1))


def test_ties_go_to_the_lowest_id_also_those_that_rounding_makes() -> None:
    x, lm_head = numbers(4)
    lm_head[200] = lm_head[7] = lm_head[70] = lm_head[199] = 3 * lm_head[F.linear(x[0], lm_head).argmax()]
    assert products.choose(x[:1], lm_head, WAYS[0], NOT_FINITE).tolist() == [7]
    apart = torch.full((2, HIDDEN), 1.0)
    apart[1, 0] += 2**-6  # 64 + 2^-6 is no bfloat16
    for turned in (apart, apart.flip(0)):
        chosen = products.choose(torch.ones(1, HIDDEN, dtype=torch.bfloat16), turned.bfloat16(), WAYS[0], NOT_FINITE)
        assert chosen.tolist() == [0]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told_and_disturbs_no_other(bad: float) -> None:
    x, lm_head = numbers(5)
    expected = F.linear(x, lm_head).argmax(dim=-1)
    lm_head, x = torch.cat((lm_head, torch.zeros(1, HIDDEN))), x.clone()
    x[3] = torch.full((HIDDEN,), bad)
    chosen = products.choose(x, lm_head, WAYS[0], NOT_FINITE)
    assert chosen[3] == NOT_FINITE and torch.equal(chosen[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
    assert products.choose(x, lm_head, WAYS[0], 0)[3] == 0, "a draft is a token"


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_row_whose_logits_are_all_minus_infinity_is_told() -> None:
    x, lm_head = torch.ones(1, HIDDEN), torch.full((70, HIDDEN), -math.inf)
    assert products.choose(x, lm_head, WAYS[0], NOT_FINITE).tolist() == [NOT_FINITE]


def test_a_sampler_takes_it_where_it_was_timed_and_for_few_rows() -> None:
    backend = CudaBackend(CPU)
    sampler = Sampler(VOCAB, backend)
    x, lm_head = numbers(70)
    assert backend.choose(x[:3], lm_head, NOT_FINITE) is None
    backend._choices = {(VOCAB, HIDDEN, 16): WAYS[0]}
    found = backend.choose(x[:3], lm_head, NOT_FINITE)
    assert found is not None and torch.equal(found, sampler.choose(x[:3], lm_head))
    assert backend.choose(x, lm_head, NOT_FINITE) is None and backend.choose(x[:17], lm_head, NOT_FINITE) is None
    expected = F.linear(x, lm_head).argmax(dim=-1)
    for rows in (0, 3, 70):
        assert torch.equal(sampler.choose(x[:rows], lm_head), expected[:rows])
        assert torch.equal(sampler.propose(x[:rows], lm_head), expected[:rows])


def test_under_batch_invariant_any_rows_are_chosen_from_the_same_logits() -> None:
    backend = InvariantCudaBackend(CPU)
    x, lm_head = numbers(70, torch.bfloat16)
    for multiprocessors in (1, 1000):
        backend._multiprocessors, backend._fixed = multiprocessors, {}
        expected = backend.linear(x, lm_head).float().argmax(dim=-1)
        assert torch.equal(backend.choose(x, lm_head, NOT_FINITE), expected)
        assert torch.equal(backend.choose(x[5:8], lm_head, NOT_FINITE), expected[5:8])
    assert backend.choose(x[:0], lm_head, NOT_FINITE).shape == (0,)


def test_its_ways_are_timed_behind_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    _, lm_head = numbers(16, torch.bfloat16)
    monkeypatch.setattr(products, "CHOICE_WAYS", WAYS)
    question = timed_launches.choice(lm_head, 16)
    for way in question.ways:
        torch.testing.assert_close(question.run(way), question.reference(), atol=0.3, rtol=0.02)
    asked = timed_launches.of_engine([], {"o": [lm_head], "lm_head": [lm_head]}, 4, 16, 132)
    assert [key.most_rows for key in asked if isinstance(key, timed_launches.OfChoice)] == [16, 1, 64, 32]
