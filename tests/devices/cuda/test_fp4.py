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
from tests.devices.cuda.engines import DENSE, GRAPHS, engine, requests, use_kernels
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import GPT_OSS, Pair, make_pair

torch.set_num_threads(1)
BF16 = torch.bfloat16
MOE = MoeConfig(6, 3, intermediate_size=40, norm_topk_prob=True, has_bias=True, swiglu_limit=0.5)
HIDDEN = 72


def experts_of(
    out: int, columns: int, skipped: int = 0, count: int = 6, scales: tuple[int, int] = (118, 126)
) -> PackedFp4:
    noise, blocks = torch.Generator().manual_seed(out + skipped), -(-(skipped + columns) // FP4_BLOCK)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=noise).to(torch.uint8)

    return PackedFp4(drawn(0, 256, count, out, 16 * blocks), drawn(*scales, count, blocks, out), BF16, skipped, columns)


def run_ptx(text: str, given: int) -> list[int]:
    """Return the results of a block of PTX's prmt, shl, and, and lop3 of one word."""
    words = {"$4": given}

    def value(name: str) -> int:
        return words[name] if name in words else int(name, 0)

    for line in re.findall(r"(\w+)\.b32 ([^;]+);", text):
        operation, (to, *named) = line[0], line[1].split(", ")
        if operation == "reg":
            continue
        a, b, *more = map(value, named)
        if operation == "prmt":
            both = (a | b << 32).to_bytes(8, "little")
            words[to] = int.from_bytes(bytes(both[more[0] >> 4 * i & 7] for i in range(4)), "little")
        elif operation == "lop3":
            assert more[1] == 0xEA  # (a & b) | c
            words[to] = a & b | more[0]
        else:
            assert operation in ("shl", "and")
            words[to] = a << b & 0xFFFFFFFF if operation == "shl" else a & b
    return [words[f"${i}"] for i in range(4)]


def bits_to_float(bits: Any) -> Tensor:
    return torch.from_numpy((np.asarray(bits, dtype=np.uint32) << 16).view(np.float32))


def test_the_instructions_of_a_gpu_take_every_byte_apart_exactly() -> None:
    """The text that is compiled, run word by word. Each byte is in each place of a word once."""
    numbers = PackedFp4(
        torch.arange(256, dtype=torch.uint8).view(1, 16, 16), torch.full((1, 1, 16), 127), torch.float32, 0, 32
    )
    low, high = (half.flatten() for half in numbers.dequantised()[0].chunk(2, dim=-1))
    for byte in range(256):
        word = [(byte + 77 * i) % 256 for i in range(4)]
        found = run_ptx(fp4.E2M1.value, int.from_bytes(bytes(word), "little"))
        halves = bits_to_float([bits for pair in found for bits in (pair & 0xFFFF, pair >> 16)]) * 2.0**126
        assert halves.tolist() == [*low[word].tolist(), *high[word].tolist()]
        assert halves.signbit().tolist() == [*low[word].signbit().tolist(), *high[word].signbit().tolist()]


@InterpretedFunction
def write_halves(w_ptr, scale_ptr, out_ptr, N: tl.constexpr):
    rows, byte = tl.arange(0, N)[:, None], tl.arange(0, 16)[None, :]
    low, high = fp4.halves(tl.load(w_ptr + rows * 16 + byte), tl.load(scale_ptr + rows))
    tl.store(out_ptr + rows * 32 + byte, low)
    tl.store(out_ptr + rows * 32 + 16 + byte, high)


def test_every_number_times_every_scale_that_is_taken_has_its_bits() -> None:
    """Subnormal ones too. A larger scale, NaN among them, is not taken."""
    scales = torch.arange(fp4.LARGEST_SCALE + 1).repeat_interleave(16)[: 16 * 128 + 16]
    n = 4096
    scales = torch.cat((scales, torch.zeros(n - len(scales), dtype=torch.int64))).to(torch.uint8)
    data = torch.arange(256, dtype=torch.uint8).repeat(n // 16).view(1, n, 16)
    weight, out = PackedFp4(data, scales.view(1, 1, n), BF16, 0, 32), torch.empty(n, 32)
    write_halves[1,](data, scales, out, N=n)
    wanted = weight.dequantised()[0]
    assert torch.equal(out.to(BF16).view(torch.int16), wanted.view(torch.int16))
    assert torch.equal(out, wanted.float())  # so bfloat16 holds each exactly
    factors = (np.arange(129, dtype=np.int16) + 126) << 7  # as on a GPU
    assert bits_to_float(factors).tolist() == [2.0 ** (e - 1) for e in range(129)]


@pytest.mark.parametrize("limit", [None, 0.5], ids=str)
@pytest.mark.parametrize("rows", [1, 30, 40])
def test_a_mixture_is_that_of_the_numbers(rows: int, limit: float | None) -> None:
    """In tiles for few pairs and for many, with columns that end inside of a block, or begin there in a rank."""
    moe, noise = replace(MOE, swiglu_limit=limit), torch.Generator().manual_seed(rows)
    inner = moe.intermediate_size
    x = torch.randn(rows, HIDDEN, generator=noise).to(BF16)
    router, *biases = (
        torch.randn(*shape, generator=noise) for shape in ((6, HIDDEN), (6,), (6, 2 * inner), (6, HIDDEN))
    )
    for skipped in (0, 8, 31):
        packed = experts_of(2 * inner, HIDDEN), experts_of(HIDDEN, inner, skipped)
        dense = (replace(weight, dtype=torch.float32).dequantised() for weight in packed)
        found = CudaBackend(torch.device("cpu")).moe(x, ExpertWeights(router, *packed, *biases), moe)
        wanted = mixture(x.float(), ExpertWeights(router, *dense, *biases), moe)
        assert found.dtype == BF16 and found.isfinite().all()
        torch.testing.assert_close(found.float(), wanted, atol=3e-2 * float(wanted.abs().max()), rtol=3e-2)


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
    plain, drafting = engine(pair, draft=False, dtype="bfloat16"), engine(pair, dtype="bfloat16", **GRAPHS)
    for layer in drafting.core.runner.forward.target.layers:
        assert {type(weight) for weight in (layer.mixture[1].gate_up, layer.mixture[1].down)} == {PackedFp4}
    monkeypatch.setattr(PackedFp4, "dequantised", None)
    asked = requests(count=1, max_tokens=6)
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
