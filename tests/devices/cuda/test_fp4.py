"""Experts in mxfp4 stay packed: their numbers by bits, both products against dequantised ones, and texts on and off."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from safetensors.torch import load_file, save_file
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from app.engine.cuda import fp4
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, mixture
from app.engine.quantised import FP4_BLOCK, PackedFp4
from tests.devices.cuda.engines import DENSE, engine, requests, use_kernels
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import GPT_OSS, Pair, make_pair

torch.set_num_threads(1)
BF16 = torch.bfloat16
MOE = MoeConfig(6, 3, intermediate_size=40, norm_topk_prob=True, has_bias=True, swiglu_limit=0.5)
UNITS = torch.full((1, 16, 2), 127, dtype=torch.uint8)


def experts_of(
    out: int, columns: int, skipped: int = 0, count: int = 6, scales: tuple[int, int] = (118, 126)
) -> PackedFp4:
    noise, blocks = torch.Generator().manual_seed(out + skipped), -(-(skipped + columns) // FP4_BLOCK)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=noise).to(torch.uint8)

    return PackedFp4(drawn(0, 256, count, out, 16 * blocks), drawn(*scales, count, blocks, out), BF16, skipped, columns)


def run_ptx(text: str, given: int) -> list[int]:
    """Return the results of a block of PTX's shl, shr, and, and lop3."""
    words = {"$4": given}

    def value(name: str) -> int:
        return words[name] if name in words else int(name, 0)

    for line in re.findall(r"(\w+)\.b32 ([^;]+);", text):
        operation, (to, *named) = line[0], line[1].split(", ")
        if operation == "reg":
            continue
        a, b, *more = map(value, named)
        if operation == "lop3":
            assert more[1] == 0xEA  # (a & b) | c
            words[to] = a & b | more[0]
        else:
            assert operation in ("shl", "shr", "and")
            words[to] = a << b & 0xFFFFFFFF if operation == "shl" else a >> b if operation == "shr" else a & b
    return [words[f"${i}"] for i in range(4)]


def pairs(rows: Tensor) -> Tensor:
    """Return each row and the next one, which is the first after the last."""
    return torch.stack((rows, rows.roll(-1, 0)), dim=1)


def bits_to_float(bits: Any) -> Tensor:
    return torch.from_numpy((np.asarray(bits, dtype=np.uint32) << 16).view(np.float32))


def every_word() -> tuple[Tensor, Tensor]:
    """Return words of 16 bits with every number in each of their places, and those numbers in fp32 [words, 4]."""
    weight = PackedFp4(torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 2, 256), UNITS, torch.float32, 0, 512)
    weight.data[0, 1] = weight.data[0, 0].roll(1)
    words = weight.data.view(torch.int16).flatten()
    return words, weight.dequantised().view(32, 4, 8).mT.reshape(-1, 4)


def test_the_instructions_of_a_gpu_take_every_word_apart_exactly() -> None:
    """The text that is compiled, run on two words at a time, each of which is in both places."""
    words, wanted = every_word()
    for (low, high), numbers in zip(pairs(words), pairs(wanted), strict=True):
        found = run_ptx(fp4.E2M1.value, (int(low) & 0xFFFF) | (int(high) & 0xFFFF) << 16)
        for i, bits in enumerate(found):
            halves = bits_to_float([bits & 0xFFFF, bits >> 16]) * 2.0**126
            assert torch.equal(halves, numbers[:, i]) and torch.equal(halves.signbit(), numbers[:, i].signbit())


@InterpretedFunction
def write_numbers(w_ptr, scale_ptr, out_ptr, N: tl.constexpr):
    rows, word = tl.arange(0, N)[:, None], tl.arange(0, 8)[None, :]
    found = fp4.numbers(tl.load(w_ptr + rows * 8 + word), tl.load(scale_ptr + rows))
    tl.store(out_ptr + rows * 32 + word, found[0])
    tl.store(out_ptr + rows * 32 + word + 8, found[1])
    tl.store(out_ptr + rows * 32 + word + 16, found[2])
    tl.store(out_ptr + rows * 32 + word + 24, found[3])


def test_every_number_times_every_scale_that_is_taken_has_its_bits() -> None:
    """Subnormal ones too. A larger scale, NaN among them, is not taken."""
    count = 32 * (fp4.LARGEST_SCALE + 1)  # of blocks: all words with each scale
    scales = torch.arange(count).div(32, rounding_mode="floor").to(torch.uint8)
    data = every_word()[0].repeat(count // 32)
    rows = 1 << count.bit_length()
    padded = (torch.nn.functional.pad(x, (0, rows * n - len(x))) for x, n in ((data, 8), (scales, 1)))
    out = torch.empty(rows, 32)
    write_numbers[1,](*padded, out, N=rows)
    weight = PackedFp4(data.view(torch.uint8).view(1, count, 16), scales.view(1, 1, count), BF16, 0, 32)
    wanted = weight.dequantised()[0]
    assert torch.equal(out[:count].to(BF16).view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(out[:count], wanted.float())  # so bfloat16 holds each exactly
    factors = (np.arange(fp4.LARGEST_SCALE + 1, dtype=np.int16) + 126) << 7  # as on a GPU
    assert bits_to_float(factors).tolist() == [2.0 ** (e - 1) for e in range(fp4.LARGEST_SCALE + 1)]


def check_mixture(rows: int, hidden: int, moe: MoeConfig, *skipped: int) -> None:
    noise, inner = torch.Generator().manual_seed(rows), moe.intermediate_size
    x = torch.randn(rows, hidden, generator=noise).to(BF16)
    shapes = (6, hidden), (6,), (6, 2 * inner), (6, hidden)
    router, *biases = (torch.randn(*shape, generator=noise) for shape in (shapes if moe.has_bias else shapes[:1]))
    for first in skipped:
        packed = experts_of(2 * inner, hidden), experts_of(hidden, inner, first)
        dense = (replace(weight, dtype=torch.float32).dequantised() for weight in packed)
        found = CudaBackend(torch.device("cpu")).moe(x, ExpertWeights(router, *packed, *biases), moe)
        wanted = mixture(x.float(), ExpertWeights(router, *dense, *biases), moe)
        assert found.dtype == BF16 and found.isfinite().all()
        torch.testing.assert_close(found.float(), wanted, atol=3e-2 * float(wanted.abs().max()), rtol=3e-2)


@pytest.mark.parametrize("changes", [{}, {"swiglu_limit": None, "has_bias": False}], ids=["gpt-oss", "plain"])
@pytest.mark.parametrize("rows", [1, 30, 40])
def test_a_mixture_is_that_of_the_numbers(rows: int, changes: dict[str, Any]) -> None:
    """In tiles for few pairs and for many, with columns that end inside of a block, or begin there in a rank."""
    check_mixture(rows, 72, replace(MOE, **changes), 0, 8, 31)


@pytest.mark.parametrize("rows", [3, 40])
def test_so_it_is_in_the_tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A program takes several tiles of K, the last of which is not whole, and scales of the next one."""
    monkeypatch.setattr(fp4, "INTERPRETED", False)
    check_mixture(rows, 296, replace(MOE, num_experts_per_tok=3, intermediate_size=152), 0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_bfloat16_and_scales_whose_product_it_holds_stay_packed(dtype: torch.dtype) -> None:
    backend, weight = CudaBackend(torch.device("cpu")), experts_of(8, 32)
    assert backend.multiplies(weight) and not backend.multiplies(replace(weight, dtype=dtype))
    for scale in (fp4.LARGEST_SCALE + 1, 255):
        weight.scales[-1, -1, -1] = scale
        assert not backend.multiplies(weight)


@pytest.mark.parametrize(("capability", "multiplied"), [((8, 9), False), ((9, 0), True)])
def test_before_hopper_experts_are_widened(
    capability: tuple[int, int], multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CudaBackend(torch.device("cpu"))
    monkeypatch.setattr(backend, "capability", capability)
    assert backend.multiplies(experts_of(8, 32)) is multiplied


def packed_pair(folder: Path) -> Pair:
    """A random pair, found by trying seeds, of whose drafts some are accepted in texts that wander."""
    return make_pair(folder, **DENSE | GPT_OSS | {"seed": 1, "experts": 4, "experts_per_tok": 2, "mxfp4": True})


def test_drafts_change_no_token_of_a_target_whose_experts_stay_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts too are read without a dequantised copy."""
    use_kernels(monkeypatch)
    pair = packed_pair(tmp_path)
    plain, drafting = engine(pair, draft=False, dtype="bfloat16"), engine(pair, dtype="bfloat16")
    for layer in drafting.core.runner.forward.target.layers:
        assert {type(weight) for weight in (layer.mixture[1].gate_up, layer.mixture[1].down)} == {PackedFp4}
    monkeypatch.setattr(PackedFp4, "dequantised", None)
    asked = requests(count=1, max_tokens=4)
    off, on = run_engine(plain, asked), run_engine(drafting, asked)
    assert on.texts == off.texts and on.verify_steps > 0 and on.acceptance_length > 1.2


def test_a_scale_that_bfloat16_does_not_hold_leaves_one_weight_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer multiplies by the others as they are."""
    use_kernels(monkeypatch)
    pair = packed_pair(tmp_path)
    file, name = pair.target / "model.safetensors", "model.layers.1.mlp.experts.gate_up_proj_scales"
    tensors = load_file(file)
    tensors[name][0, 0, 0], tensors[name.replace("scales", "blocks")][0, 0, 0] = 129, 0
    save_file(tensors, file)
    core = engine(pair, draft=False, dtype="bfloat16").core
    kinds = [
        isinstance(weight, PackedFp4)
        for layer in core.runner.forward.target.layers
        for weight in (layer.mixture[1].gate_up, layer.mixture[1].down)
    ]
    assert kinds == [True, True, False, True]
    backend = core.runner.backend
    assert backend.widened_bytes == 2 * 2 * tensors[name.replace("scales", "blocks")].numel()
    assert core.run(requests(max_tokens=2))
