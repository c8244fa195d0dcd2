"""Costs of a step of Qwen3-8B on an Ascend device, task by task, and the speed that these figures predict.

Weights are random, so only times are of interest. Checked against torch_npu's schemas, meta kernels and host checks on
CPU; not run on an Ascend device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch_npu
from torch import Tensor

from app.check.collectives import seconds_each
from app.engine.device.base import (
    AttentionMask,
    AttentionMetadata,
    Backend,
    ProjectedRows,
    Rotation,
)
from app.engine.device.comparison import Attention, Inputs, Lens, Paged, Prepared, difference
from app.engine.device.factory import make_backend
from app.engine.device.moe import ExpertWeights, MoeConfig
from app.engine.npu import nz
from app.engine.quantised import QuantisedWeight
from tools.report.npu_questions import FULL, PAGE, answered
from tools.report.part import Options, Part, Result
from tools.report.timing import seconds_in_a_graph

EPS = 1e-6
DRAFTS, ACCEPTANCE = 8, 5.25
"""Drafts a step, and the acceptance length that vllm-ascend published with its speeds (expected.py)."""
BATCH, PROMPT, ANSWER = 16, 3500, 1500
EXPERTS = MoeConfig(128, 8, intermediate_size=768, norm_topk_prob=True)


@dataclass(frozen=True, slots=True)
class CostSizes:
    """Sizes of Qwen3-8B and its draft, and of Qwen3-30B-A3B's experts. `weights` layers take turns, so that no cache
    holds them."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 151936
    layers: int = 36
    draft_layers: int = 5
    taps: int = 5
    experts: MoeConfig = EXPERTS
    experts_hidden: int = 2048
    weights: int = 4
    kv: int = PROMPT + ANSWER // 2
    chunk: int = 2048
    batches: tuple[int, ...] = (1, 16, 32)
    widths: tuple[int, ...] = (4, 8, 16)
    calls: int = 20
    repeats: int = 10

    @property
    def products(self) -> dict[str, tuple[int, ...]]:
        """Name -> [out, in] of the weights of a layer."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden),
            "o": (self.hidden, self.heads * self.dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def paged(self, lens: Lens, *, causal: bool = True, window: int | None = None) -> Paged:
        return Paged(lens, self.heads, self.kv_heads, self.dim, AttentionMask(causal, window), PAGE)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer, and the rows that it computes. Its attention reads and writes the pages of `attend`."""

    at: Inputs
    sizes: CostSizes
    attend: Attention
    rotation: Rotation
    slots: Tensor
    weights: dict[str, Tensor]

    @classmethod
    def made(cls, at: Inputs, sizes: CostSizes, attend: Attention) -> "Layer":
        rows, norms = len(attend.q), {"norm": (sizes.hidden,), "head_norm": (sizes.dim,)}
        weights = {name: _random(at.backend, *shape) for name, shape in (sizes.products | norms).items()}
        slots = at.scattered(rows, len(attend.kv.k) * PAGE)
        return cls(at, sizes, attend, at.rotation(rows, sizes.dim), slots, weights)

    def tasks(self) -> dict[str, tuple[Prepared, int]]:
        """Return each operator of the layer as a call, and how often the layer has it."""
        backend, w, e = self.at.backend, self.weights, self.sizes
        rows = len(self.slots)
        x, inner = self.at.normal(rows, e.hidden), self.at.normal(rows, 2 * e.intermediate)
        gated = self.at.normal(rows, e.intermediate)
        qkv = self.at.normal(rows, e.heads + 2 * e.kv_heads, e.dim)
        q, k, v = (part.contiguous() for part in qkv.split_with_sizes([e.heads, e.kv_heads, e.kv_heads], dim=1))
        strided = qkv[:, : e.heads], qkv[:, e.heads : e.heads + e.kv_heads]
        norm, head_norm = w["norm"], w["head_norm"]
        return {
            "residual and norm": (lambda: backend.add_rms_norm(x, x, norm, EPS)[0], 2),
            "QKV projection": (lambda: backend.linear(x, w["qkv"]), 1),
            "norm of q": (lambda: backend.rms_norm(strided[0], head_norm, EPS), 1),
            "norm of k": (lambda: backend.rms_norm(strided[1], head_norm, EPS), 1),
            "RoPE of q and k": (
                lambda: torch_npu.npu_apply_rotary_pos_emb(q, k, *self.rotation, layout="TND")[0],
                1,
            ),
            "copy of V": (lambda: qkv[:, -e.kv_heads :].clone(memory_format=torch.contiguous_format), 1),
            "K/V write": (lambda: backend.write_kv(k, v, self.attend.kv, self.slots) or k, 1),  # type: ignore[func-returns-value]
            "attention": (self.attend, 1),
            "output projection": (lambda: backend.linear(q.flatten(1), w["o"]), 1),
            "gate and up projection": (lambda: backend.linear(x, w["gate_up"]), 1),
            "SwiGLU": (lambda: torch_npu.npu_swiglu(inner), 1),
            "down projection": (lambda: backend.linear(gated, w["down"]), 1),
        }

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        backend, w = self.at.backend, self.weights
        normed, residual = backend.add_rms_norm(x, residual, w["norm"], EPS)
        qkv = backend.linear(normed, w["qkv"]).view(len(x), -1, self.sizes.dim)
        norms = w["head_norm"], w["head_norm"]
        backend.qkv_into_kv(ProjectedRows(qkv, *norms, EPS, self.rotation, self.attend.kv, self.slots))
        attended = backend.linear(self.attend().flatten(1), w["o"])
        normed, residual = backend.add_rms_norm(attended, residual, w["norm"], EPS)
        return backend.gated_mlp(normed, w["gate_up"], w["down"]), residual


def parts(options: Options) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    return [Part(name, partial(answered, ask, opened, CostSizes())) for name, ask in QUESTIONS.items()]


def graph_ms(
    backend: Backend, run: Callable[[], object], sizes: CostSizes, metas: Sequence[AttentionMetadata] = ()
) -> float:
    """Return milliseconds of one `run` on the device, from calls in a graph."""

    return 1e3 * seconds_in_a_graph(backend, run, metas, calls=sizes.calls, repeats=sizes.repeats)


def inputs(backend: Backend) -> Inputs:
    return Inputs(backend, torch.bfloat16, torch.bfloat16)


def norms(backend: Backend, sizes: CostSizes) -> Result:
    """Time the norms of q and k as slices of the projection, and as separate tensors that are copied first."""
    rows, at = BATCH * (1 + DRAFTS), inputs(backend)
    qkv, weight = at.normal(rows, sizes.heads + 2 * sizes.kv_heads, sizes.dim), at.normal(sizes.dim)
    q, k = qkv[:, : sizes.heads], qkv[:, sizes.heads : sizes.heads + sizes.kv_heads]
    own = q.contiguous(), k.contiguous()
    ways: dict[str, Callable[[], object]] = {
        "strided": lambda: [backend.rms_norm(x, weight, EPS) for x in (q, k)],
        "contiguous": lambda: [backend.rms_norm(x, weight, EPS) for x in own],
        "copied first": lambda: [backend.rms_norm(x.contiguous(), weight, EPS) for x in (q, k)],
    }
    ms = {name: graph_ms(backend, run, sizes) for name, run in ways.items()}
    hidden = ms["strided"] - ms["contiguous"]
    return {"found": f"Strided q and k cost {1e3 * hidden:.4g} us more a layer than contiguous ones.", "ms": ms}


def mixed(backend: Backend, sizes: CostSizes) -> Result:
    """Time attention of a mixed step: one call over ragged rows, and one for blocks and one for a prompt with a cat."""
    at, blocks, prompt = inputs(backend), [(1 + DRAFTS, sizes.kv)] * BATCH, [(sizes.chunk, sizes.chunk)]
    one, first, second = (sizes.paged(lens)(at) for lens in ([*blocks, *prompt], blocks, prompt))

    def ms(run: Callable[[], object]) -> float:
        return 1e3 * seconds_each(backend, run, sizes.calls, sizes.repeats)

    taken = {"one call": ms(one), "two calls": ms(lambda: torch.cat((first(), second())))}
    return {"found": f"One call takes {taken['one call']:.4g} ms, two {taken['two calls']:.4g} ms.", "ms": taken}


def gap(backend: Backend, sizes: CostSizes) -> Result:
    """Time tasks of one number in a graph, each waiting for the one before: little but what starting a task costs."""
    x = torch.zeros(1, device=backend.device)
    us = 1e3 * graph_ms(backend, lambda: x.neg_(), sizes)
    return {"found": f"A task in a graph takes {us:.4g} us at least.", "us": us}


def tasks(backend: Backend, sizes: CostSizes) -> Result:
    """Time each operator of a layer of the target in a graph, for 16 sequences of 9 rows."""
    at = inputs(backend)
    layer = Layer.made(at, sizes, sizes.paged([(1 + DRAFTS, sizes.kv)] * BATCH)(at))
    return _timed(backend, sizes, layer.tasks(), "The tasks of a layer take", [layer.attend.meta])


def around(backend: Backend, sizes: CostSizes) -> Result:
    """Time the work of a step outside the layers in a graph, for 16 sequences of 9 rows."""
    at, e, rows = inputs(backend), sizes, BATCH * (1 + DRAFTS)
    head, fc = _random(backend, e.vocab, e.hidden), _random(backend, e.hidden, e.taps * e.hidden)
    hidden, logits, norm = at.normal(rows, e.hidden), at.normal(rows, e.vocab), at.normal(e.hidden)
    features, tapped = [hidden] * e.taps, at.normal(rows, e.taps * e.hidden)
    tables = backend.rotary_tables(torch.rand(e.kv, e.dim // 2), torch.bfloat16)
    positions, choices, drafts = (at.integers(0, e.kv, *shape) for shape in ((rows,), (rows,), (BATCH, DRAFTS)))
    context = (
        at.normal(rows * e.draft_layers, 2 * e.kv_heads, e.dim),
        at.normal(e.dim),
        at.normal(e.draft_layers, e.dim),
    )
    slots = at.scattered(rows * e.draft_layers, -(-rows * e.draft_layers // PAGE) * PAGE)
    rotation, pages = at.rotation(rows, e.dim), at.pages(len(slots), PAGE, e.kv_heads, e.dim)
    first, lengths, each = at.int32(range(0, rows, 1 + DRAFTS)), at.int32([DRAFTS] * BATCH), at.int32(range(BATCH))
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "embeddings": (lambda: backend.embed_blocks(each, 0, 1 + DRAFTS, head), 2),
        "cos and sin": (lambda: backend.rotation_at(tables, positions), 2),
        "final norm": (lambda: backend.rms_norm(hidden, norm, EPS), 2),
        "lm_head": (lambda: backend.linear(hidden, head), 2),
        "choice": (lambda: logits.max(dim=-1), 2),
        "features": (lambda: torch.cat(features, dim=-1), 1),
        "fc": (lambda: backend.linear(tapped, fc), 1),
        "context KV": (lambda: backend.context_into_kv(ProjectedRows(*context, EPS, rotation, pages, slots)), 1),
        "verify": (lambda: backend.verify(choices, drafts, first, lengths, each), 1),
    }
    return _timed(backend, sizes, calls, "The work around the layers takes")


def _timed(
    backend: Backend,
    sizes: CostSizes,
    calls: Mapping[str, tuple[Callable[[], object], int]],
    begin: str,
    metas: Sequence[AttentionMetadata] = (),
) -> Result:
    """Return the microseconds of each call in a graph, how often a step has it, and milliseconds of all."""
    cases: list[Result] = [
        {"task": name, "times": count, "us": 1e3 * graph_ms(backend, call, sizes, metas)}
        for name, (call, count) in calls.items()
    ]
    whole = sum(case["times"] * case["us"] for case in cases) / 1e3
    return {"found": f"{begin} {whole:.4g} ms one by one.", "ms": whole, "cases": cases}


def int8_products(backend: Backend, sizes: CostSizes, orders: Mapping[str, Callable[[Tensor], Tensor]]) -> Result:
    """Time the four products of a layer in int8, with the quantisation of their rows, by the order of weights."""
    at, taken = inputs(backend), {}
    for name, order in orders.items():
        calls = []
        for out, inner in sizes.products.values():
            weight = torch.randint(-127, 128, (out, inner), dtype=torch.int8, device=backend.device)
            scale = torch.ones(out, device=backend.device)
            calls.append(partial(_int8_product, at.normal(BATCH * (1 + DRAFTS), inner), order(weight), scale))
        taken[name] = graph_ms(backend, partial(_run_all, calls), sizes)
    each = ", ".join(f"{name} {1e3 * took:.4g} us" for name, took in taken.items())
    return {"found": f"The products of a layer take in int8: {each}.", "ms": taken}


def int8_experts(backend: Backend, sizes: CostSizes) -> Result:
    """Time a layer's experts in int8, with their first product fused with SwiGLU and its quantisation, and alone."""
    moe, hidden, at = sizes.experts, sizes.experts_hidden, inputs(backend)

    def drawn(out: int, inner: int) -> QuantisedWeight:
        shape = moe.num_experts, out, inner
        data = torch.randint(-127, 128, shape, dtype=torch.int8, device=backend.device)
        scales = torch.full((*shape[:2], 1), inner**-0.5 / 127, device=backend.device)
        return QuantisedWeight(backend.empty_experts(data, *shape).copy_(data), scales, torch.bfloat16)

    gate_up = backend.pack_gate_up(drawn(2 * moe.intermediate_size, hidden))
    down = backend.pack_linear(drawn(hidden, moe.intermediate_size))
    assert isinstance(gate_up, QuantisedWeight)
    packed = {"fused": gate_up, "alone": replace(gate_up, scales=gate_up.scales.bfloat16())}
    if gate_up.scales.dtype == torch.bfloat16:
        del packed["fused"]
    router, x = _random(backend, moe.num_experts, hidden).float(), at.normal(BATCH * (1 + DRAFTS), hidden)
    taken = {
        name: graph_ms(backend, partial(backend.moe, x, ExpertWeights(router, own, down), moe), sizes)
        for name, own in packed.items()
    }
    each = ", ".join(f"{name} {1e3 * took:.4g} us" for name, took in taken.items())
    why = "" if "fused" in taken else " The fused operator is not right here: a line of the log says why."
    return {"found": f"Experts of a layer take in int8, by their first product: {each}.{why}", "ms": taken}


def _run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _int8_product(x: Tensor, weight: Tensor, scale: Tensor) -> None:
    """Multiply `x` [T, in] by an int8 weight [in, out], as the backend does."""
    rows, scales = torch_npu.npu_dynamic_quant(x)
    torch_npu.npu_quant_matmul(rows, weight, scale, pertoken_scale=scales, bias=None, output_dtype=torch.bfloat16)


def widths(backend: Backend, sizes: CostSizes) -> Result:
    """Time a layer at the widths that are captured, and so what `--verify auto` can save."""
    cases = []
    for batch in sizes.batches:
        for width in sizes.widths:
            ms = sizes.layers * layer_ms(backend, sizes, [(width, sizes.kv)] * batch, causal=True)
            cases.append({"sequences": batch, "width": width, "layers_ms": ms})
    dear = [case["layers_ms"] for case in cases if case["sequences"] == sizes.batches[-1]]
    found = f"At {sizes.batches[-1]} sequences {sizes.layers} layers take {dear[0]:.4g} ms at width"
    return {"found": f"{found} {sizes.widths[0]}, and {dear[-1]:.4g} ms at {sizes.widths[-1]}.", "cases": cases}


def band(backend: Backend, sizes: CostSizes) -> Result:
    """Attend under a window of 200 tokens, at whose edge an error by one would show, also with one row alone."""
    several, alone = [(9, 300), (1, 201), (16, 200), (3, 129)], [(1, 1500)]
    errors = {
        causal: max(
            difference(backend, sizes.paged(lens, causal=causal, window=200), past=FULL, dtype=torch.bfloat16)[1]
            for lens in (several, alone)
        )
        for causal in (True, False)
    }
    return {
        "found": "Under a window of 200 the result is right to these shares of the largest value: causal rows "
        f"{errors[True]:.4g}, bidirectional rows {errors[False]:.4g}.",
        "error_of_largest": max(errors.values()),
    }


def layer_ms(backend: Backend, sizes: CostSizes, lens: Lens, *, causal: bool) -> float:
    """Return milliseconds of a layer in a graph, from layers with separate weights."""
    at = inputs(backend)
    attend = sizes.paged(lens, causal=causal)(at)
    layers = [Layer.made(at, sizes, attend) for _ in range(sizes.weights)]
    x, residual = (at.normal(sum(q for q, _ in lens), sizes.hidden) for _ in range(2))

    def run() -> None:
        rows = x, residual
        for layer in layers:
            rows = layer(*rows)

    return graph_ms(backend, run, sizes, [attend.meta]) / sizes.weights


def _random(backend: Backend, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=backend.device).normal_(std=shape[-1] ** -0.5)


def prediction(backend: Backend, sizes: CostSizes) -> Result:
    """Predict output tokens/s of 16 requests of 3,500 and 1,500 tokens from the layers' times."""
    blocks = [(1 + DRAFTS, sizes.kv)] * BATCH
    ms = {
        "target": sizes.layers * layer_ms(backend, sizes, blocks, causal=True),
        "draft": sizes.draft_layers * layer_ms(backend, sizes, blocks, causal=False),
        "around": around(backend, sizes)["ms"],
    }
    step = sum(ms.values())
    chunk = sizes.layers * layer_ms(backend, sizes, [(sizes.chunk, sizes.chunk)], causal=True)
    prompts = BATCH * PROMPT / sizes.chunk * chunk
    seconds = (ANSWER / ACCEPTANCE * step + prompts) / 1e3
    speed = BATCH * ANSWER / seconds
    found = (
        f"PREDICTED, not measured: {speed:,.0f} output tokens/s for Qwen3-8B, {BATCH} requests of {PROMPT:,} and "
        f"{ANSWER:,} tokens, {DRAFTS} drafts, {ACCEPTANCE} tokens a step of {step:.4g} ms, and {prompts / 1e3:.4g} s "
        f"of prompts. The host's time is not in it."
    )
    return {"found": found, "tokens_per_second": speed, "step_ms": step, "chunk_ms": chunk, "ms": ms}


QUESTIONS: dict[str, Callable[[Backend, CostSizes], Result]] = {
    "strided norms": norms,
    "mixed steps": mixed,
    "gap between tasks": gap,
    "tasks of a layer": tasks,
    "tasks around the layers": around,
    "widths": widths,
    "W8A8 products": partial(int8_products, orders={"ND": Tensor.t, "[in, out]": lambda w: w.t().contiguous()}),
    "W8A8 products in NZ": partial(int8_products, orders={"NZ": lambda w: nz.in_nz(w).mT}),
    "W8A8 experts": int8_experts,
    "window": band,
    "prediction": prediction,
}
"""Name -> question. The figure that decides it stands in its answer. `updates of a graph` is an open point."""
