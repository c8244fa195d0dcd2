"""Questions that only an Ascend device can answer: the rows "card" of docs/npu-contract.md, and what graphs cost.

Each answer is a sentence. A call that the device refuses is an answer too, and ends the process. Checked against
torch_npu's schemas, meta kernels and host checks on CPU; not run on an Ascend device.
"""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import isnan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch_npu

from app.check.collectives import seconds_each
from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.base import AttentionMask, Backend, LayerKv
from app.engine.device.comparison import TOLERANCE, Attention, Inputs, Lens, Operator, Paged, Prepared, difference
from app.engine.device.factory import make_backend
from app.engine.device.recurrent import GatedDeltaStep
from app.engine.npu import gated_delta, host_probes
from app.engine.schedule.graph_sizes import GraphSizes
from app.engine.step.graphs import StepGraphs
from tools.report.engine import demo_engine
from tools.report.part import Options, Part, Result, describe
from tools.report.roofline import chip_name
from tools.report.timing import seconds_in_a_graph

if TYPE_CHECKING:
    from app.engine.npu.attention import AttentionPlan
    from app.engine.npu.graph import NpuGraph

PAGE = 128
FULL = 3e4
"""Value of slots past a request's tokens, which would show in a result."""
RELIED_ON = (
    "combination",
    "partly filled pages",
    "a chunk in a graph",
    "replays in a row",
    "updates of a graph",
    "captures",
)
"""Points where the server relies on the answer; the others are about calls that it does not make."""
DEFAULT_GRAPHS = 48
"""The default of --max-graphs."""


@dataclass(frozen=True, slots=True)
class QuestionSizes:
    """Sizes: `calls` attention calls in a graph, for 36 layers of Qwen3-8B and 5 of its draft.

    Timing is over `requests` requests with `kv` tokens; `wide` are numbers of rows above 16. `recurrent` are a layer's
    k heads, v heads and their sizes, of Qwen3.5-27B.
    """

    heads: int = 32
    kv_heads: int = 8
    requests: int = 16
    kv: int = 2000
    wide: tuple[int, ...] = (17, 24, 32, 64)
    calls: int = 41
    timed: int = 20
    repeats: int = 10
    graphs: int = 64
    recurrent: tuple[int, int, int, int] = (16, 48, 128, 128)

    def paged(self, lens: Lens, *, causal: bool = True, dim: int = 128) -> Paged:
        return Paged(lens, self.heads, self.kv_heads, dim, AttentionMask(causal), PAGE)

    def both(self, lens: Lens, dim: int = 128) -> list[Paged]:
        return [self.paged(lens, causal=causal, dim=dim) for causal in (True, False)]

    def load(self, backend: Backend, rows: int = 16) -> Attention:
        """Return the attention call that is timed."""
        return self.paged([(rows, self.kv)] * self.requests)(Inputs(backend, torch.bfloat16, torch.bfloat16, FULL))

    def ms(self, call: Prepared, backend: Backend) -> float:
        return 1e3 * seconds_each(backend, call, self.timed, self.repeats)


Sizes = TypeVar("Sizes")
Point = Callable[[Backend, QuestionSizes], Result]
POINTS: dict[str, tuple[str, Point]] = {}
"""Name -> the call that is tried, and its function."""


def point(name: str, tried: str) -> Callable[[Point], Point]:
    def register(ask: Point) -> Point:
        POINTS[name] = (tried, ask)
        return ask

    return register


def parts(options: Options) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    return [
        Part(name, partial(answered, ask, opened, QuestionSizes(), name in RELIED_ON, tried=tried))
        for name, (tried, ask) in POINTS.items()
    ]


@torch.inference_mode()
def answered(
    ask: Callable[[Backend, Sizes], Result],
    opened: Callable[[], Backend],
    sizes: Sizes,
    relied_on: bool = False,
    **about: str,
) -> Result:
    """Return `about`, and `found` with more of the answer. An error of torch_npu or of the device is a refused call.

    Only what is relied on can fail.
    """
    backend = opened()
    try:
        result = ask(backend, sizes)
        return about | result | {"passed": result.get("passed", True) or not relied_on}
    except RuntimeError as error:
        described = describe(error)
        meaning = f" ({described['meaning']})" if described["meaning"] else ""
        found = f"It is refused: {described['says']}{meaning}."
        return about | {"found": found, "error": described, "passed": not relied_on}


@point("combination", "which versions work together here")
def combination(backend: Backend, sizes: QuestionSizes) -> Result:
    found = {
        "chip": chip_name(backend),
        "torch": importlib.metadata.version("torch"),
        "torch_npu": importlib.metadata.version("torch_npu"),
        "CANN": host_probes.cann_version(os.environ) or "unknown",
        "driver": host_probes.driver_version(Path("/")) or "unknown",
        "Python": platform.python_version(),
        "machine": platform.machine(),
    }
    return {"found": f"{', '.join(f'{name} {version}' for name, version in found.items())}.", "versions": found}


@point("float16", "paged TND attention in float16, causal and bidirectional")
def float16(backend: Backend, sizes: QuestionSizes) -> Result:
    both = sizes.both([(16, 300), (1, 129), (16, 16)])
    return _judged("Float16 is taken, and", backend, both, torch.float16)


@point("padding of few tokens", "causal attention with a padding request that has fewer KV tokens than rows")
def short_padding(backend: Backend, sizes: QuestionSizes) -> Result:
    """Attend with a causal padding request that has more rows than KV tokens, after valid requests."""
    paged = sizes.paged([(16, 300), (3, 129), (8, 1)])

    def others(at: Inputs) -> Prepared:
        call = paged(at)
        return lambda: call()[:19]

    return _judged("A request of 8 rows over 1 token is taken, and for the others", backend, [others])


@point("head size 256", "paged TND attention with D 256, causal and bidirectional, which hybrid targets need")
def wide_heads(backend: Backend, sizes: QuestionSizes) -> Result:
    return _judged("D 256 is taken, and", backend, sizes.both([(16, 300), (1, 129), (16, 16)], dim=256))


@point("partly filled pages", "bidirectional attention (mode 0) where last pages are partly filled")
def partial_pages(backend: Backend, sizes: QuestionSizes) -> Result:
    """Attend over last pages that are filled in part. Nothing past the last token may show."""
    paged = sizes.paged([(16, kv) for kv in (16, 17, 127, 128, 129, 200, 255, 257, 300)], causal=False)
    return _judged("Over last pages that are partly filled", backend, [paged])


@point("more than 16 rows", "requests of more than 16 query rows with D 128, both attentions")
def wide_blocks(backend: Backend, sizes: QuestionSizes) -> Result:
    """Attend with more rows of a request than DFlash blocks may have here, and time it."""
    wide = [paged for rows in (16, *sizes.wide) for paged in sizes.both([(rows, 257), (rows, 64)])]
    right = _judged("More than 16 rows are taken, and", backend, wide)
    ms = {str(rows): sizes.ms(sizes.load(backend, rows), backend) for rows in (16, *sizes.wide)}
    times = ", ".join(f"{rows} rows {taken:.4g} ms" for rows, taken in ms.items())
    return right | {"found": f"{right['found']} A call takes: {times}.", "ms": ms}


@point("a chunk in a graph", "causal attention of a prompt's rows from a graph that was captured with other lengths")
def chunk_in_graph(backend: Backend, sizes: QuestionSizes) -> Result:
    """Replay twice a graph of two layers that was captured with one request of 16 rows, and padding: with a chunk's 160
    rows, and with one row, each after a context that has another kernel for few rows (N42)."""

    def loaded(lens: Lens) -> tuple[Operator, Operator]:
        paged = sizes.paged(lens)

        def layers(call: Attention) -> torch.Tensor:
            return replace(call, q=call())()

        def replayed(at: Inputs) -> Prepared:
            call = paged(at)
            plans, rows = call.meta.plans, len(call.q)
            call.meta.plans = {call.mask: replace(planned(call), q_ends=[16, rows])}
            graph = backend.capture(lambda: (layers(call),), [call.meta])
            call.meta.plans = plans

            def replay() -> torch.Tensor:
                for _ in range(2):
                    graph.try_replay()
                return graph.outputs[0].clone()

            return replay

        def eager(at: Inputs) -> Prepared:
            return partial(layers, paged(at))

        return replayed, eager

    loads = [loaded(lens) for lens in ([(160, 1500), (1, 1)], [(1, 1500), (160, 160)])]
    errors = [
        difference(backend, replayed, past=FULL, dtype=torch.bfloat16, against=eager)[1] for replayed, eager in loads
    ]
    return _right("A chunk is taken, and", errors)


@point("sinks in a graph", "attention with sinks, D 64, from a graph that was captured with other lengths")
def sinks_in_graph(backend: Backend, sizes: QuestionSizes) -> Result:
    """Replay attention of gpt-oss from a graph. Where it is refused, the server runs such a model without graphs."""
    paged = replace(sizes.paged([(16, 300), (1, 1500)], dim=64), sinks=True)

    def replayed(at: Inputs) -> Prepared:
        call = paged(at)
        graph = backend.capture(lambda: (call(),), [call.meta])

        def replay() -> torch.Tensor:
            graph.try_replay()
            return graph.outputs[0].clone()

        return replay

    error = difference(backend, replayed, past=FULL, dtype=torch.bfloat16, against=paged)[1]
    return _right("Sinks are taken, and", [error])


@point("replays in a row", "replays of a graph with new lengths each time, without a read of the host in between")
def replays_in_a_row(backend: Backend, sizes: QuestionSizes) -> Result:
    """Replay layers of attention as a rank does that reads no step, and compare all results with eager code. An update
    that overtakes the replay before gives one replay the lengths of the next."""
    call = sizes.load(backend)
    mask, meta, longest = call.mask, call.meta, sizes.kv

    def layers() -> tuple[torch.Tensor, ...]:
        q = call.q
        for _ in range(sizes.calls):
            q = replace(call, q=q)()
        return (q,)

    def plan(turn: int) -> None:
        kv_lens = [max(16, (longest - 37 * turn - 11 * i) % longest) for i in range(sizes.requests)]
        planned = replace(meta, host_seq_lens=kv_lens)
        meta.plans = {mask: backend.plan_attention(planned, mask, sizes.heads // sizes.kv_heads)}

    graph = backend.capture(layers, [meta])
    replayed = []
    for turn in range(sizes.repeats):
        plan(turn)
        graph.replay()
        replayed.append(graph.outputs[0].clone())
    errors = []
    for turn, found in enumerate(replayed):
        plan(turn)
        (wanted,) = layers()
        errors.append(float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()))
    return _right(f"In {sizes.repeats} replays in a row", errors)


def attention_of_heads(call: Attention, kv: LayerKv) -> torch.Tensor:
    """The backend's attention with K and V as [pages, kv_heads, page_size, D], which is said to be the faster order."""
    q_thd, meta, plan = call.q, call.meta, planned(call)
    o, _ = torch_npu.npu_fused_infer_attention_score(
        q_thd,
        kv.k,
        kv.v,
        atten_mask=plan.mask,
        actual_seq_lengths=plan.q_ends,
        actual_seq_lengths_kv=plan.host_seq_lens,
        block_table=meta.page_table,
        num_heads=q_thd.shape[1],
        num_key_value_heads=kv.k.shape[1],
        scale=q_thd.shape[2] ** -0.5,
        input_layout="TND",
        sparse_mode=plan.sparse_mode,
        block_size=meta.page_size,
    )
    return o


@point(
    "order of heads", "K and V as [pages, kv_heads, page, D] (BnNBsD) instead of [pages, page, kv_heads x D] (BnBsH)"
)
def order_of_heads(backend: Backend, sizes: QuestionSizes) -> Result:
    """Attend to K and V as [pages, kv_heads, page_size, D]; the server has [pages, page_size, kv_heads x D]."""
    paged = sizes.paged([(16, sizes.kv)] * sizes.requests)

    def by_heads(at: Inputs) -> Prepared:
        call = paged(at)
        turned = LayerKv(*(pool.transpose(1, 2).contiguous() for pool in (call.kv.k, call.kv.v)))
        return lambda: attention_of_heads(call, turned)

    _, error, call = difference(backend, by_heads, past=FULL, dtype=torch.bfloat16, against=paged)
    ours, other = sizes.ms(sizes.load(backend), backend), sizes.ms(call, backend)
    right = _right("The order by heads is taken, and", [error])
    return right | {
        "found": f"{right['found']} It takes {other:.4g} ms, ours {ours:.4g} ms.",
        "ms": {"by heads": other, "ours": ours},
    }


@point("recurrent states in bfloat16", "npu_recurrent_gated_delta_rule of three blocks of 8 rows, in a Qwen3.5 layer")
def recurrent_states(backend: Backend, sizes: QuestionSizes) -> Result:
    """Compare a layer's step from a graph with the composition's, and time both."""
    config, device = GatedDeltaConfig((0,), 4, *sizes.recurrent), backend.device
    ways = {"operator": gated_delta.commit_and_verify, "composition": backend.commit_and_verify}

    def replayed(step: GatedDeltaStep) -> torch.Tensor:
        graph = backend.capture(lambda: (gated_delta.commit_and_verify(step),), [])
        graph.replay()
        return graph.outputs[0].clone()

    why = gated_delta.fault(config, 8, device, replayed)
    steps = {name: gated_delta.trial_step(config, 8, device) for name in ways}
    memory = steps["composition"].memory
    steps["composition"] = steps["composition"]._replace(
        memory=replace(memory, matrix=memory.matrix.mT.float().contiguous())
    )
    ms = {name: 1e3 * seconds_in_a_graph(backend, partial(ways[name], step)) for name, step in steps.items()}
    found = f"The operator is {'WRONG: ' + why if why else 'right'}. A layer takes {ms['operator']:.4g} ms by it"
    return {"found": f"{found}, and {ms['composition']:.4g} ms by composition.", "ms": ms, "passed": not why}


def planned(call: Attention) -> "AttentionPlan":
    """Return the operator's arguments in a planned call."""
    plan: AttentionPlan = call.meta.plans[call.mask]
    return plan


@point("updates of a graph", "how long new lengths for the attention calls of a graph take")
def updates(backend: Backend, sizes: QuestionSizes) -> Result:
    """Replay a graph of one attention call for each layer, and nothing else, with new lengths: by the server's pass
    over its calls, and by torch_npu's."""
    call = sizes.load(backend)

    def layers() -> tuple[torch.Tensor, ...]:
        for _ in range(sizes.calls):
            call()
        return ()

    graph: NpuGraph = backend.capture(layers, [call.meta])  # type: ignore[assignment]
    plan = planned(call)
    lengths = {"actual_seq_lengths": plan.q_ends, "actual_seq_lengths_kv": plan.host_seq_lens}
    ways = {
        "ours": lambda: graph._update([kind.lengths() for kind in graph._kinds]),
        "upstream": lambda: graph._graph.update([lengths] * sizes.calls),
    }
    updated: dict[str, list[float]] = {way: [] for way in ways}
    done = []
    for way, update in list(ways.items()) * sizes.repeats:
        started = time.perf_counter()
        graph._let_updates_wait()
        graph._graph.replay()
        launched = time.perf_counter()
        update()
        updated[way].append(time.perf_counter() - launched)
        torch_npu.npu.synchronize()
        done.append(time.perf_counter() - started)
    each = {way: 1e6 * median(seconds) / sizes.calls for way, seconds in updated.items()}
    found = (
        f"{sizes.calls} updates take the host {each['ours']:.4g} us each, by torch_npu's own pass "
        f"{each['upstream']:.4g} us; the replay with them {1e3 * median(done):.4g} ms."
    )
    return {"found": found, "each_us": each, "done_ms": 1e3 * median(done)}


@point("captures", "how many graphs of the demo pair can be captured")
def captures(backend: Backend, sizes: QuestionSizes) -> Result:
    """Capture graphs of the demo pair: three widths of target and two of draft for each number of sequences."""
    seqs = max(1, sizes.graphs // 5)
    counts = range(1, seqs + 1)
    engine = demo_engine(
        str(backend.device), "bfloat16", enforce_eager=True, max_num_seqs=seqs, max_num_batched_tokens=16 * seqs + 1
    )
    runner = engine.core.runner
    targets = [(n, n * width + 1) for n in counts for width in (1, 8, 16)]
    graph_sizes = GraphSizes(targets, [(n, width) for n in counts for width in (8, 16)], block_size=16, spare=1)
    captured: list[int] = []
    end: Result = {}
    before, allocated = backend.memory()[0], torch_npu.npu.memory_allocated()
    try:
        StepGraphs(
            runner.forward,
            replace(runner.layout, graphs=graph_sizes),
            None,
            pages=5,
            on_graph=lambda done, total: captured.append(done),
        )
    except RuntimeError as error:
        end = {"error": describe(error)}
    count, wanted = len(captured), 5 * seqs
    then = f"; the next one failed: {end['error']['says']}" if end else ""
    taken = {"device": before - backend.memory()[0], "allocator": torch_npu.npu.memory_allocated() - allocated}
    mib = {name: size >> 20 for name, size in taken.items()}
    found = (
        f"{count} of {wanted} graphs were captured{then}. They took {mib['device']} MiB of the device, and by torch's "
        f"count {mib['allocator']} MiB; {backend.graph_bytes([engine.target]) >> 20} MiB are kept beside a step's."
    )
    return {
        "found": found,
        "captured": count,
        "wanted": wanted,
        "mib": mib,
        "passed": count >= min(wanted, DEFAULT_GRAPHS),
    } | end


def _judged(begin: str, backend: Backend, operators: Sequence[Operator], dtype: torch.dtype = torch.bfloat16) -> Result:
    """Return a sentence that begins so, about the largest difference of all operators from the CPU."""
    return _right(begin, [difference(backend, operator, past=FULL, dtype=dtype)[1] for operator in operators])


def _right(begin: str, errors: Sequence[float]) -> Result:
    """Return a sentence that begins so, about results with these shares of the largest value as errors."""
    error = float(np.max(errors))
    if isnan(error):
        return {"found": f"{begin} the result is not all numbers.", "passed": False}
    verdict = "right" if error < TOLERANCE else "WRONG"
    found = f"{begin} the result is {verdict}, to {error:.4g} of the largest value."
    return {"found": found, "error_of_largest": error, "passed": error < TOLERANCE}
