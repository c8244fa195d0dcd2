"""Compiles every kernel that the CUDA backend launches for a model of published sizes, for sm_90 and without a GPU.

    python -m tests.devices.cuda.compiled qwen3-8b qwen3-4b qwen3-0.6b

The backend's own calls are made, on tensors without memory; in place of a launch Triton compiles what would have been
launched, so that block sizes, types and divisibility are those of serving. Prints a JSON object a kernel.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from app.engine.cuda import experts, products
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.cuda.gated_delta_prompts import NARROW
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv, ProjectedRows
from app.engine.device.moe import ExpertWeights, MoeConfig
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep, GatedDeltaWeights, LayerState
from app.engine.quantised import PackedFp4, QuantisedWeight
from tools.lab.random_weights import BLOCK_SIZE, DRAFT_LAYERS, TARGETS

SM_90 = GPUTarget("cuda", 90, 32)
SIZES = [(2, 1), (2, 16), (33, 32), (33, 512), (65, 64), (65, 1024)]
"""(sequences, rows) of decode steps: plain and whole blocks, of 1, 32 and 64 sequences and one of padding."""
MORE_ATTENTION = [(40, 8, 128, torch.bfloat16), (64, 8, 128, torch.bfloat16)]
MORE_ATTENTION += [(32, 8, 64, torch.float16), (32, 8, 128, torch.float32)]
MORE_ATTENTION += [(24, 4, 256, torch.bfloat16), (16, 2, 256, torch.bfloat16), (16, 2, 256, torch.float32)]
"""(heads, KV heads, head size, type) of models that are not among TARGETS."""
MASKS = [AttentionMask(causal=True), AttentionMask(causal=False)]
WINDOWED = [AttentionMask(causal, 2048) for causal in (True, False)]
SINKS = [(64, 8, 64, torch.bfloat16)]
"""Attention with sinks, of gpt-oss. It is compiled without them first, so a kernel that is new has them."""
EXPERTS = [
    (2048, MoeConfig(128, 8, intermediate_size=768, norm_topk_prob=True)),
    (2048, MoeConfig(256, 8, intermediate_size=512, norm_topk_prob=True)),
    (2048, MoeConfig(512, 10, intermediate_size=512, norm_topk_prob=True)),
    (2880, MoeConfig(32, 4, intermediate_size=2880, norm_topk_prob=True, has_bias=True, swiglu_limit=7.0)),
]
"""Hidden sizes and experts of Qwen3-30B-A3B, Qwen3.6-35B-A3B, Qwen3-Next-80B-A3B and gpt-oss-20b."""
GATED_DELTA = [(16, 48, 128), (4, 4, 256)]
"""(heads of q and k, heads of v, head size) of Qwen3.5-27B, and the largest head."""
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


class NoGpu:
    """Driver that answers Triton's questions before a compilation like an H200."""

    def get_current_target(self) -> GPUTarget:
        return SM_90

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> list[Any]:
    """Let launches compile only. Return the list that gets the compiled kernels."""
    compiled: list[Any] = []
    launch = triton.JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        kernel = launch(self, *args, **options | {"warmup": True})
        compiled.append(kernel)
        return kernel

    driver.set_active(NoGpu())
    triton.JITFunction.run = run
    return compiled


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def launch_all(config: dict[str, Any], backend: CudaBackend) -> None:
    """Every kernel of a step, for every size of SIZES."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv = LayerKv(*(empty(4096, 16, kv_heads, dim) for _ in range(2)))
    for num_seqs, rows in SIZES:
        table = numbers(num_seqs, 100)
        lens = [1] * (num_seqs - 1) + [0] if rows < num_seqs else [0] * (num_seqs - 1) + [rows]
        meta = AttentionMetadata(numbers(num_seqs + 1), numbers(num_seqs), table, lens, [], 16, dict.fromkeys(MASKS))
        rotation = (empty(rows, 1, dim), empty(rows, 1, dim))
        qkv = empty(rows, heads + 2 * kv_heads, dim)
        for norms in ((None, None), (empty(dim), empty(dim))):
            q = backend.qkv_into_kv(ProjectedRows(qkv, *norms, 1e-6, rotation, kv, numbers(rows)))
        for mask in MASKS if rows > num_seqs else MASKS[:1]:
            backend.attention(q, kv, meta, mask)
        backend.add_rms_norm(empty(rows, hidden), empty(rows, hidden), empty(hidden), 1e-6)
        backend.rms_norm(empty(rows, hidden), empty(hidden), 1e-6)
        backend.gated_mlp(empty(rows, hidden), empty(2 * inner, hidden), empty(hidden, inner))
        groups = hidden // 16
        kernels = empty(2, 2, groups, 16), empty(rows, 1, 2, 2, groups, 1)
        backend.convolve(lambda x: x, empty(rows, hidden), *kernels)
        context, slot_mapping = empty(rows * DRAFT_LAYERS, 2 * kv_heads, dim), numbers(rows * DRAFT_LAYERS)
        norms = empty(dim), empty(DRAFT_LAYERS, dim)
        backend.context_into_kv(ProjectedRows(context, *norms, 1e-6, rotation, kv, slot_mapping))
        backend.positions_and_slots(numbers(rows), numbers(num_seqs), numbers(rows), table, 16)
        backend.embed_blocks(numbers(num_seqs), 151669, BLOCK_SIZE, empty(config["vocab_size"], hidden))
        choices, drafts = empty(rows, dtype=torch.int64), numbers(num_seqs, BLOCK_SIZE - 1)
        for some in (drafts, None):
            backend.verify(choices, some, *(numbers(num_seqs) for _ in range(3)))
        verified = empty(33, BLOCK_SIZE + 1, dtype=torch.int64)
        backend.advance_by_accepted(verified, numbers(num_seqs), numbers(rows), *(numbers(num_seqs) for _ in range(3)))


def launch_products_of_few_rows(backend: CudaBackend) -> None:
    """Products of 16 and of 32 rows, in parts and not, with biases."""
    for dtype, (out, size) in product((torch.bfloat16, torch.float16), ((6144, 4096), (4096, 12288))):
        for rows, bias in product((1, 16, products.FEW_ROWS), (None, empty(out, dtype=dtype))):
            backend.linear(empty(rows, size, dtype=dtype), empty(out, size, dtype=dtype), bias)


def launch_fixed_products() -> None:
    """Products whose tiles are the same for any rows, in splits of programs and of one, for all types, with biases."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight, bias = empty(4096, 4096, dtype=dtype), empty(4096, dtype=dtype)
        assert products.product_of(weight, 132).splits > 1
        for rows, some in product((16, 512), (None, bias)):
            products.linear(empty(rows, 4096, dtype=dtype), weight, some, 132)


def launch_products_in_8_bits(backend: CudaBackend, config: dict[str, Any]) -> None:
    """Products by weights in blocks of 128 and with a scale a row, for few rows and for many, whole and in splits, and
    with fixed tiles; and what quantises rows for them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    fixed = InvariantCudaBackend(torch.device("cpu"))
    fixed.multiprocessors = backend.multiprocessors
    for kind, in_blocks in ((torch.float8_e4m3fn, True), (torch.int8, False)):
        weights = []
        for out, size in ((2 * inner, hidden), (hidden, inner)):
            scales = empty(out, size // 128 if in_blocks else 1, dtype=torch.float32)
            weight = QuantisedWeight(empty(out, size, dtype=kind), scales, torch.bfloat16)
            weights.append(backend.pack_quantised(weight))
        for rows in (1, 16, 32, 63, 128, 512):
            for weight in weights:
                backend.linear(empty(rows, weight.data.shape[1]), weight)
                fixed.linear(empty(rows, weight.data.shape[1]), weight)
            x, norm = empty(rows, hidden), empty(hidden)
            for residual, readers in product((None, x), (weights[:1], [weights[0], norm])):
                backend.norm_for(x, residual, norm, 1e-6, readers)
            backend.gated_mlp(x, *weights)


def launch_quantised_experts(backend: CudaBackend) -> None:
    """Experts of Qwen3-30B-A3B in blocks of 128 and with a scale a row, of few rows each and of many."""
    hidden, moe = EXPERTS[0]
    router = empty(moe.num_experts, hidden, dtype=torch.float32)
    shapes = [(moe.num_experts, 2 * moe.intermediate_size, hidden), (moe.num_experts, hidden, moe.intermediate_size)]
    for kind, groups in ((torch.float8_e4m3fn, 128), (torch.int8, 0)):
        weights = []
        for count, out, size in shapes:
            scales = empty(count, out, size // (groups or size), dtype=torch.float32)
            weight = QuantisedWeight(empty(count, out, size, dtype=kind), scales, torch.bfloat16)
            weights.append(backend.pack_quantised(weight))
        for rows in (1, 16, 1024):
            backend.moe(empty(rows, hidden), ExpertWeights(router, *weights), moe)


def launch_packed_experts(backend: CudaBackend) -> None:
    """Experts of gpt-oss in mxfp4, whole and for a rank that begins inside of a block, for few rows and for many."""
    hidden, moe = EXPERTS[-1]
    count = moe.num_experts
    router = empty(count, hidden, dtype=torch.float32), empty(count, dtype=torch.float32)
    for inner, skipped in ((2880, 0), (720, 16)):
        biases = [empty(*shape, dtype=torch.float32) for shape in ((count, 2 * inner), (count, hidden))]
        weights = []
        for out, size, before in ((2 * inner, hidden, 0), (hidden, inner, skipped)):
            data, scales = (empty(count, out, -(-(before + size) // 32) * n, dtype=torch.uint8) for n in (16, 1))
            weights.append(PackedFp4(data, scales.mT, torch.bfloat16, before, size))
        for rows in (1, 128, 129):
            backend.moe(empty(rows, hidden), ExpertWeights(router[0], *weights, router[1], *biases), moe)


def launch_fixed_attention() -> None:
    """Attention whose parts have one size, over many programs and in one."""
    backend = InvariantCudaBackend(torch.device("cpu"))
    backend.multiprocessors = 132
    for heads, kv_heads, dim, dtype in [(32, 8, 128, torch.bfloat16), *MORE_ATTENTION]:
        kv = LayerKv(*(empty(4096, 16, kv_heads, dim, dtype=dtype) for _ in range(2)))
        for rows, mask in product((16, 2048), (*MASKS, *WINDOWED)) if dim <= 128 else ():
            meta = AttentionMetadata(numbers(2), numbers(1), numbers(1, 100), [rows], [], 16, {mask: None})
            backend.attention(empty(rows, heads, dim, dtype=dtype), kv, meta, mask)


def launch_attention(backend: CudaBackend, shapes: list[tuple[int, int, int, torch.dtype]], *, sinks: bool) -> None:
    for heads, kv_heads, dim, dtype in shapes:
        given = empty(heads, dtype=torch.float32) if sinks else None
        kv = LayerKv(*(empty(4096, 16, kv_heads, dim, dtype=dtype) for _ in range(2)))
        for num_seqs, rows in SIZES[1:2] if dim < 256 else SIZES[2:4]:
            meta = AttentionMetadata(
                numbers(num_seqs + 1),
                numbers(num_seqs),
                numbers(num_seqs, 100),
                [0] * (num_seqs - 1) + [rows],
                [],
                16,
                dict.fromkeys([*MASKS, *WINDOWED]),
            )
            for mask in (MASKS[0], *WINDOWED):
                backend.attention(empty(rows, heads, dim, dtype=dtype), kv, meta, mask, given)
            rotation, norms = [empty(rows, 1, dim, dtype=dtype)] * 2, [empty(dim, dtype=dtype)] * 2
            qkv = empty(rows, heads + 2 * kv_heads, dim, dtype=dtype)
            backend.qkv_into_kv(ProjectedRows(qkv, *norms, 1e-6, rotation, kv, numbers(rows)))


def launch_gated_delta(backend: CudaBackend, *, narrow: bool) -> None:
    for (k_heads, v_heads, dim), dtype in product(GATED_DELTA, (torch.bfloat16, torch.float32)):
        if narrow != (dim * dtype.itemsize <= NARROW):
            continue
        channels = (2 * k_heads + v_heads) * dim
        width = channels + 2 * v_heads
        gates = (empty(v_heads, dtype=torch.float32) for _ in range(2))
        weights = GatedDeltaWeights.of(empty(channels, 4, dtype=dtype), *gates)
        matrix, conv = empty(9, v_heads, dim, dim, dtype=torch.float32), empty(9, 3, channels, dtype=dtype)
        memory = LayerState(matrix, conv, empty(9, BLOCK_SIZE, width, dtype=dtype), numbers(9))
        for num_seqs, rows in SIZES[1:4]:
            inputs, z = empty(rows, width + v_heads * dim, dtype=dtype).split_with_sizes([width, v_heads * dim], dim=1)
            slots = [empty(num_seqs, dtype=torch.int64) for _ in range(3)]
            own = *(numbers(num_seqs) for _ in range(2)), numbers(num_seqs, min(rows, BLOCK_SIZE)), numbers(rows)
            o = backend.commit_and_verify(GatedDeltaStep(inputs, weights, memory, *slots[:2], *own))
            in_8_bits = QuantisedWeight(empty(1, dtype=torch.float8_e4m3fn), empty(1), torch.bfloat16)
            for reader in (empty(1), in_8_bits) if dtype == torch.bfloat16 else (empty(1),):
                backend.gated_norm(o, z, empty(dim, dtype=torch.float32), 1e-6, reader)
                backend.sigmoid_mul(empty(rows, v_heads * dim, dtype=dtype), z, reader)
            own = *(numbers(num_seqs) for _ in range(2)), numbers(num_seqs + 1)
            backend.commit_prompts(GatedDeltaPrompts(inputs, weights, memory, *slots, *own, [], []))


def launch_experts() -> None:
    for hidden, moe in EXPERTS:
        for dtype in (torch.bfloat16, torch.float32):
            count, inner = moe.num_experts, moe.intermediate_size
            shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
            gate_up, down, *biases = (empty(*shape, dtype=dtype) for shape in (*shapes, *(s[:2] for s in shapes)))
            router, router_bias = (empty(*shape, dtype=torch.float32) for shape in ((count, hidden), (count,)))
            weights = ExpertWeights(router, gate_up, down, *((router_bias, *biases) if moe.has_bias else ()))
            for rows in (1, 16, 256):
                experts.mixture(empty(rows, hidden, dtype=dtype), weights, moe)
                experts.add_shared_expert(*(empty(n, hidden, dtype=dtype) for n in (rows, rows, rows, 1)))


def resources(kernel: Any) -> dict[str, Any]:
    """Resources of the compiled kernel, read by cuobjdump from the cubin: bytes, and registers of a thread."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return {
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": used["REG"],
        "stack": used["STACK"],
        "local": used["LOCAL"],
        "warps": kernel.metadata.num_warps,
        "wgmma": "wgmma" in kernel.asm["ptx"],
    }


def multiplying_loop(kernel: Any) -> list[str]:
    """The instructions of the shortest loop of the compiled kernel that multiplies tiles, or none."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ )?([\w.]+) ?(.*?);", done.stdout)
    loops = []
    for at, name, operands in lines:
        target = re.search(r"0x([0-9a-f]+)$", operands.strip()) if name.startswith("BRA") else None
        if target and int(target[1], 16) < int(at, 16):
            body = [one.split(".")[0] for place, one, _ in lines if int(target[1], 16) <= int(place, 16) <= int(at, 16)]
            loops += [body] if any("GMMA" in one for one in body) else []
    return min(loops, key=len, default=[])


def report(models: list[str]) -> Iterator[dict[str, Any]]:
    compiled, backend = compile_only(), CudaBackend(torch.device("cpu"))
    backend.multiprocessors = 132
    seen = set()
    for model in ["few rows", *models, "others", "sinks", "fixed", "eight bits", "quantised", "packed", "wide"]:
        if model in TARGETS:
            launch_all(TARGETS[model], backend)
        elif model == "sinks":
            launch_attention(backend, SINKS, sinks=True)
        elif model == "wide":
            launch_gated_delta(backend, narrow=False)
        elif model == "eight bits":
            launch_products_in_8_bits(backend, TARGETS["qwen3-8b"])
        elif model == "quantised":
            launch_quantised_experts(backend)
        elif model == "few rows":
            launch_products_of_few_rows(backend)
        elif model == "packed":
            launch_packed_experts(backend)
        elif model == "fixed":
            launch_fixed_products()
            launch_fixed_attention()
        else:
            launch_attention(backend, [*MORE_ATTENTION, *SINKS], sinks=False)
            launch_experts()
            launch_gated_delta(backend, narrow=True)
        while compiled:
            kernel = compiled.pop()
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                loop = {"loop": multiplying_loop(kernel)} if model in ("eight bits", "quantised") else {}
                yield {"model": model} | resources(kernel) | loop


if __name__ == "__main__":
    for found in report(sys.argv[1:]):
        print(json.dumps(found), flush=True)
