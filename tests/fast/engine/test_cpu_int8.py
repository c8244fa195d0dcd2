"""Products by int8 on a CPU: those of rows that are rounded to int8 as well, with the same bits everywhere."""

import shutil

import pytest
import torch
from torch import Tensor

from app.engine.cpu import decoder, library, linear
from app.engine.cpu.backend import CpuBackend
from app.engine.quantised import QuantisedWeight, Weight
from app.messages import Request
from tests.fast.engine.lossless import LUCKY, make_engine, random_prompts, run_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.quantised import FORMATS, quantise

pytestmark = pytest.mark.skipif(not shutil.which(library.compiler()), reason="there is no g++")
BACKEND = CpuBackend(torch.device("cpu"))
GROUP = 32
"""Numbers of a row that are rounded by one scale, as in int8.cpp."""
SHAPES = [(1, 4), (5, 8), (16, 64), (17, 60), (48, 132), (100, 1020), (63, 1536)]
"""[out, in]: with and without outputs that fill no panel, and numbers that fill no group."""


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(out: int, size: int, dtype: torch.dtype, seed: int = 1) -> QuantisedWeight:
    """Return numbers with -128, which files may have, and scales."""
    noise = torch.Generator().manual_seed(seed)
    data = torch.randint(-128, 128, (out, size), generator=noise).to(torch.int8)
    return QuantisedWeight(data, torch.rand(out, 1, generator=noise) + 0.1, dtype)


def packed(weight: QuantisedWeight) -> Weight:
    own = BACKEND.pack_linear(weight)
    assert isinstance(own, QuantisedWeight)
    return own


def over(numerator: float | Tensor, denominator: float | Tensor) -> Tensor:
    """Return a quotient in float32, rounded once: PyTorch multiplies by a number's inverse."""
    return torch.div(*torch.broadcast_tensors(torch.as_tensor(numerator), torch.as_tensor(denominator)))


def expected(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Return the product by whole numbers, whose sums float64 rounds where the operator does."""
    sums = torch.zeros(len(x), len(weight.data))
    for first in range(0, x.shape[1], GROUP):
        own, numbers = x[:, first : first + GROUP].float(), weight.data[:, first : first + GROUP].long()
        largest = own.abs().amax(1, keepdim=True).clamp(min=1e-30)
        rounded = (own.double() * over(127.0, largest).double()).round().long()
        assert rounded.abs().max() <= 127
        sums = ((rounded @ numbers.T).double() * over(largest, 127.0).double() + sums.double()).float()
    result = sums.double() * weight.scales[:, 0].double()
    return (result if bias is None else result + bias.double()).float().to(x.dtype)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_a_product_is_that_of_whole_numbers_with_the_bits_of_an_oracle(dtype, out, size):
    """So the instructions that a processor has change no bit: each sums whole numbers."""
    x, weight, bias = drawn(13, size, dtype=dtype), weight_of(out, size, dtype), drawn(out, dtype=dtype, seed=2)
    x[1] *= 1e30
    x[2] *= 1e-20
    x[3, : size // 2] = 0
    x[4] = 3  # each becomes 127
    x[5, ::2] = -3
    own = packed(weight)
    for added in (None, bias):
        assert torch.equal(BACKEND.linear(x, own, added), expected(x, weight, added))


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_thread(dtype):
    for out, size in ((33, 132), (577, 580)):
        x, own = drawn(300, size, dtype=dtype), packed(weight_of(out, size, dtype))
        whole = BACKEND.linear(x, own)
        try:
            for threads in (1, 2, 3):
                linear.set_up(threads=threads)
                for rows in (*range(1, 18), 33, 299, 300):
                    for first in {0, 300 - rows}:
                        assert torch.equal(BACKEND.linear(x[first : first + rows], own), whole[first : first + rows])
        finally:
            linear.set_up(threads=1)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_so_has_a_row_of_an_expert(dtype):
    weights = [weight_of(40, 96, dtype, seed) for seed in range(3)]
    data, scales = (torch.stack([getattr(weight, name) for weight in weights]) for name in ("data", "scales"))
    x, own = drawn(70, 96, dtype=dtype), packed(QuantisedWeight(data, scales, dtype))
    found = BACKEND.grouped(x, own, torch.tensor([3, 3, 70], dtype=torch.int32))
    assert torch.equal(found, torch.cat((expected(x[:3], weights[0]), expected(x[3:], weights[2]))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["dense", "experts"])
def test_a_text_is_the_same_with_drafts_in_any_batch_and_layer_by_layer(tmp_path, monkeypatch, dtype, shape):
    pair = make_pair(tmp_path, **LUCKY, experts=8 if shape == "experts" else 0)
    asked = [Request(str(i), prompt.token_ids, 24) for i, prompt in enumerate(random_prompts(pair.vocab_size, 4))]

    def texts(draft, **settings):
        settings = {"quantization": "int8", "dtype": dtype, "page_size": 16, "max_model_len": 256} | settings
        return run_engine(make_engine(pair.target, draft, **settings), asked).texts

    wanted = texts(None, max_num_seqs=1)
    assert texts(None, max_num_seqs=4) == texts(pair.draft, max_num_seqs=4) == wanted
    monkeypatch.setattr(decoder, "can_run", lambda layers: False)
    assert texts(pair.draft, max_num_seqs=4) == wanted


@pytest.mark.parametrize("how", FORMATS)
def test_so_is_a_text_of_a_target_that_its_files_quantise(tmp_path, how):
    pair = make_pair(tmp_path / "pair", **LUCKY)
    target, _ = quantise(pair.target, tmp_path, how)
    asked = [Request(str(i), prompt.token_ids, 24) for i, prompt in enumerate(random_prompts(pair.vocab_size, 4))]

    def texts(draft, max_num_seqs):
        settings = {"dtype": "bfloat16", "page_size": 4, "max_model_len": 256, "max_num_seqs": max_num_seqs}
        return run_engine(make_engine(target, draft, **settings), asked).texts

    assert texts(None, 4) == texts(pair.draft, 4) == texts(None, 1)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 30), ("auto", 1)])
def test_a_forward_by_int8_is_one_operator_however_many_rows_pytorch_multiplies_faster(
    tmp_path, monkeypatch, quantization, most
):
    pair, rows = make_pair(tmp_path, **LUCKY), []
    call = decoder.Decoder.__call__
    monkeypatch.setattr(decoder.Decoder, "__call__", lambda self, x, *rest: rows.append(len(x)) or call(self, x, *rest))
    engine = make_engine(pair.target, quantization=quantization, page_size=16, max_num_seqs=1)
    rows.clear()
    engine.core.runner.backend.use_operators(1)
    engine.core.run([Request("r", tuple(i % pair.vocab_size for i in range(30)), max_tokens=3)])
    linear.set_up(most_rows=linear.ALL_ROWS)
    assert max(rows) == most


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 31, 32, 131])
def test_a_row_with_what_is_not_finite_is_nan_and_no_other_row_is(dtype, bad, place):
    x, weight = drawn(9, 132, dtype=dtype), weight_of(33, 132, dtype)
    wanted = expected(x, weight)
    x[4, place] = bad
    found = BACKEND.linear(x, packed(weight))
    assert found[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_zeros_stay_zeros_and_large_numbers_finite(dtype):
    weight = QuantisedWeight(torch.ones(33, 64, dtype=torch.int8), torch.full((33, 1), 2.0**-8), dtype)
    x = torch.zeros(4, 64, dtype=dtype)
    x[1] = torch.finfo(dtype).max / 128
    x[2] = torch.finfo(dtype).tiny
    found = BACKEND.linear(x, packed(weight))
    assert not found[[0, 2, 3]].any() and found[1].isfinite().all() and found[1].all()


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
def test_no_rows_are_no_outputs(dtype):
    assert BACKEND.linear(torch.empty(0, 64, dtype=dtype), packed(weight_of(33, 64, dtype))).shape == (0, 33)


def test_rows_of_which_no_4_numbers_lie_side_by_side_are_widened():
    weight = weight_of(33, 66, torch.float32)
    own = BACKEND.pack_linear(weight)
    assert isinstance(own, Tensor)
    assert torch.equal(own, weight.dequantised())
    with pytest.raises(RuntimeError, match="pack_int8 takes"):
        library.operators(torch.float32).pack_int8(weight.data)


def test_the_operator_refuses_what_it_does_not_compute():
    own = packed(weight_of(33, 64, torch.bfloat16))
    operator = library.operators(torch.bfloat16).linear_int8
    for x in (drawn(3, 68, dtype=torch.bfloat16), drawn(3, 64, dtype=torch.float32)):
        with pytest.raises(RuntimeError, match="linear_int8 takes"):
            operator(x, own.data, own.scales, None)
    with pytest.raises(RuntimeError, match="linear_int8 takes"):  # 66 numbers end in the middle of 4
        operator(drawn(3, 66, dtype=torch.bfloat16), own.data.new_ones(33, 66), own.scales, None)
