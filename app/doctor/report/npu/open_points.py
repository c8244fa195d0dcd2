"""What only a device can answer: the rows "card" of docs/npu-contract.md, and what graphs cost. One sentence for each.

A call that the device refuses is an answer too, and ends the process: the next point has one of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from app.doctor.operators import TOLERANCE
from app.doctor.report.npu import trials
from app.doctor.report.npu.demo_pair import engine
from app.doctor.report.npu.part import Part, Prompts, Result, describe, milliseconds, rounded
from app.doctor.report.npu.timing import seconds_each
from app.engine.backend.base import AttentionMetadata, Backend, LayerKv
from app.engine.backend.factory import make_backend
from app.engine.backend.torch import TorchBackend
from app.engine.step.graph_sizes import GraphSizes
from app.engine.step.graphs import StepGraphs

PAGE = 128
FULL = 3e4
"""What lies in slots past a request's tokens: whatever of it showed in a result would be seen."""
RELIED_ON = ("combination", "partly filled pages", "updates of a graph", "captures")
"""Points where the server already does so; the others are about what it does not do."""
ENOUGH_GRAPHS = 48
"""What --max-graphs allows unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`calls` attention calls in a graph: 36 layers of Qwen3-8B and 5 of its draft. Timing is over `requests` requests
    with `kv` tokens; `wide` are numbers of rows above 16."""

    heads: int = 32
    kv_heads: int = 8
    requests: int = 16
    kv: int = 2000
    wide: tuple[int, ...] = (17, 24, 32, 64)
    calls: int = 41
    timed: int = 20
    repeats: int = 10
    graphs: int = 64


Point = Callable[[Backend, Extent], Result]


def parts(device: str, prompts: Prompts) -> list[Part]:
    opened = cache(partial(make_backend, device))
    return [Part(name, partial(answered, name, opened, Extent())) for name in POINTS]


def answered(name: str, opened: Callable[[], Backend], extent: Extent) -> Result:
    """`{"tried", "found", ...}`. What torch_npu or the device refuses (a RuntimeError) is found to be refused."""
    tried, point = POINTS[name]
    backend = opened()
    try:
        return {"tried": tried} | point(backend, extent)
    except RuntimeError as error:
        described = describe(error)
        meaning = f" ({described['meaning']})" if described["meaning"] else ""
        found = f"It is refused: {described['says']}{meaning}."
        return {"tried": tried, "found": found, "error": described, "passed": name not in RELIED_ON}


class Paged:
    """Requests with these (rows, KV tokens) over shuffled pages; slots past their tokens hold FULL."""

    def __init__(
        self, backend: Backend, lens: list[tuple[int, int]], extent: Extent, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.lens, self._backend, self._dtype = lens, backend, dtype
        noise = torch.Generator().manual_seed(0)
        query_lens, counts = [q for q, _ in lens], [-(-kv // PAGE) for _, kv in lens]
        order = (1 + torch.randperm(sum(counts), generator=noise)).tolist()
        self.table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
        self.pages = [torch.full((1 + len(order), PAGE, extent.kv_heads, 128), FULL) for _ in range(2)]
        for row, count, (_, kv) in zip(self.table, counts, lens, strict=True):
            row[:count] = torch.tensor([order.pop() for _ in range(count)])
            for pool in self.pages:
                tokens = torch.full((count * PAGE, *pool.shape[2:]), FULL)
                tokens[:kv] = torch.randn(kv, *pool.shape[2:], generator=noise)
                pool[row[:count].long()] = tokens.view(count, PAGE, *pool.shape[2:])
        self.q = torch.randn(sum(query_lens), extent.heads, 128, generator=noise)
        self.kv = LayerKv(*(pool.to(backend.device, dtype) for pool in self.pages))
        self.rows = self.q.to(backend.device, dtype)

    def meta(self, *, causal: bool, backend: Backend | None = None) -> AttentionMetadata:
        """Planned."""
        backend = backend or self._backend
        query_lens, host_seq_lens = [q for q, _ in self.lens], [kv for _, kv in self.lens]
        ends, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, *accumulate(query_lens)], host_seq_lens))
        ends, lengths, table = (x.to(backend.device) for x in (ends, lengths, self.table))
        meta = AttentionMetadata(ends, lengths, table, query_lens, host_seq_lens, PAGE, causal)
        meta.plan = backend.plan_attention(meta, self.q.shape[1] // self.pages[0].shape[2])
        return meta

    def attend(self, *, causal: bool) -> Tensor:
        return self._backend.attention(self.rows, self.kv, self.meta(causal=causal))

    def error(self, found: Tensor, *, causal: bool) -> float:
        """The largest difference from the CPU in float32, as a share of the largest value; infinite for no number."""
        cpu = TorchBackend(torch.device("cpu"))
        meta = self.meta(causal=causal, backend=cpu)
        q, k, v = (x.to(self._dtype).float() for x in (self.q, *self.pages))
        wanted = cpu.attention(q, LayerKv(k, v), meta)
        error = float((found.cpu().float() - wanted).abs().max() / wanted.abs().max())
        return rounded(error) if error == error else float("inf")

    def seconds(self, extent: Extent) -> float:
        meta = self.meta(causal=True)
        return seconds_each(
            self._backend, lambda: self._backend.attention(self.rows, self.kv, meta), extent.timed, extent.repeats
        )


def combination(backend: Backend, extent: Extent) -> Result:
    found = trials.combination(backend.device.index or 0)
    return {"found": f"{', '.join(f'{name} {version}' for name, version in found.items())}.", "versions": found}


def negative_slots(backend: Backend, extent: Extent) -> Result:
    """Rows with slot -1 between rows with slots of their own."""
    shape = (3, PAGE, extent.kv_heads, 128)
    kv = LayerKv(*(torch.zeros(shape, dtype=torch.bfloat16, device=backend.device) for _ in range(2)))
    slot_mapping = torch.tensor([5, -1, 0, -1, 300, 131], dtype=torch.int32)
    rows = torch.randn(len(slot_mapping), extent.kv_heads, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    trials.write_pages(rows.to(backend.device), rows.to(backend.device), kv, slot_mapping.to(backend.device))
    stray, lost = 0, 0
    for pool in (kv.k, kv.v):
        flat, given = pool.cpu().flatten(0, 1), slot_mapping >= 0
        lost += int((flat[slot_mapping[given].long()] != rows[given]).any(dim=(1, 2)).sum())
        flat[slot_mapping[given].long()] = 0
        stray += int(flat.any(dim=(1, 2)).sum())
    if not stray and not lost:
        found = "Rows with slot -1 are skipped; the others are written, slot 0 among them."
    else:
        found = f"Not skipped: {stray} slots hold what nobody asked for, and {lost} rows were not written."
    return {"found": found, "stray": stray, "lost": lost}


def float16(backend: Backend, extent: Extent) -> Result:
    paged = Paged(backend, [(16, 300), (1, 129), (16, 16)], extent, torch.float16)
    errors = [paged.error(paged.attend(causal=causal), causal=causal) for causal in (True, False)]
    return _right("Float16 is taken, and", max(errors))


def short_padding(backend: Backend, extent: Extent) -> Result:
    """A causal padding request with more rows than KV tokens, behind requests as they should be."""
    paged = Paged(backend, [(16, 300), (3, 129)], extent)
    padded = Paged(backend, [(16, 300), (3, 129), (8, 1)], extent)
    padded.table[:2, : paged.table.shape[1]], padded.table[2] = paged.table, 0
    padded.kv, padded.rows = paged.kv, torch.cat((paged.rows, paged.rows[:8]))
    return _right(
        "A request of 8 rows over 1 token is taken, and for the others",
        paged.error(padded.attend(causal=True)[:19], causal=True),
    )


def partial_pages(backend: Backend, extent: Extent) -> Result:
    """Nothing of what lies past the last token of a page may show."""
    paged = Paged(backend, [(16, kv) for kv in (16, 17, 127, 128, 129, 200, 255, 257, 300)], extent)
    error = paged.error(paged.attend(causal=False), causal=False)
    return _right("Over last pages that are partly filled", error) | {"passed": error < TOLERANCE}


def wide_blocks(backend: Backend, extent: Extent) -> Result:
    """More rows for a request than DFlash blocks may have here, right and how fast."""
    timed = {}
    errors = []
    for rows in (16, *extent.wide):
        paged = Paged(backend, [(rows, 257), (rows, 64)], extent)
        errors += [paged.error(paged.attend(causal=causal), causal=causal) for causal in (True, False)]
        many = Paged(backend, [(rows, extent.kv)] * extent.requests, extent)
        timed[str(rows)] = milliseconds(many.seconds(extent))
    first = timed["16"]
    ratios = ", ".join(f"{rows} rows {ms:g} ms" for rows, ms in timed.items() if rows != "16")
    right = _right("More than 16 rows are taken, and", max(errors))
    return right | {"found": f"{right['found']} 16 rows take {first:g} ms, {ratios}.", "ms": timed}


def order_of_heads(backend: Backend, extent: Extent) -> Result:
    """K and V as [pages, page_size, kv_heads x D], which we use, against [pages, kv_heads, page_size, D]."""
    paged = Paged(backend, [(16, extent.kv)] * extent.requests, extent)
    meta = paged.meta(causal=True)
    turned = LayerKv(*(pool.transpose(1, 2).contiguous() for pool in (paged.kv.k, paged.kv.v)))

    def attend() -> Tensor:
        return trials.attention_of_heads(paged.rows, turned, meta)

    error = paged.error(attend(), causal=True)
    ours = milliseconds(paged.seconds(extent))
    other = milliseconds(seconds_each(backend, attend, extent.timed, extent.repeats))
    right = _right("The order by heads is taken, and", error)
    return right | {
        "found": f"{right['found']} It takes {other:g} ms, ours {ours:g} ms.",
        "ms": {"by heads": other, "ours": ours},
    }


def updates(backend: Backend, extent: Extent) -> Result:
    """A graph of one attention call for each layer, and nothing else."""
    paged = Paged(backend, [(16, extent.kv)] * extent.requests, extent)
    meta = paged.meta(causal=True)
    captured = trials.Captured(lambda: backend.attention(paged.rows, paged.kv, meta), meta.plan, extent.calls)
    replays = [captured.replay() for _ in range(extent.repeats)]
    update = milliseconds(median(replay.update for replay in replays))
    each = rounded(1e3 * update / extent.calls)
    done = milliseconds(median(replay.done for replay in replays))
    found = f"{extent.calls} updates take the host {update:g} ms, {each:g} us each; the replay with them {done:g} ms."
    return {"found": found, "update_ms": update, "each_us": each, "done_ms": done}


def captures(backend: Backend, extent: Extent) -> Result:
    """Graphs of the demo pair, three widths of target and two of draft for each number of sequences."""
    seqs = max(1, extent.graphs // 5)
    core = engine(
        str(backend.device), "bfloat16", enforce_eager=True, max_num_seqs=seqs, max_num_batched_tokens=16 * seqs + 1
    )
    sizes = GraphSizes(tuple(range(1, seqs + 1)), (1, 8, 16), spare=1)
    captured: list[int] = []
    end: Result = {}
    try:
        StepGraphs(
            core.runner.forward,
            core.runner.forward.backend,
            sizes,
            block_size=16,
            pages=5,
            scratch_pages=-(-sizes.max_rows // PAGE),
            draft_graphs=True,
            on_graph=lambda done, total: captured.append(done),
        )
    except RuntimeError as error:
        end = {"error": describe(error)}
    count, wanted = len(captured), 5 * seqs
    then = f"; the next one failed: {end['error']['says']}" if end else ""
    found = f"{count} of {wanted} graphs were captured{then}."
    return {"found": found, "captured": count, "wanted": wanted, "passed": count >= min(wanted, ENOUGH_GRAPHS)} | end


def _right(begin: str, error: float) -> Result:
    """A sentence that begins so, about a result with this error."""
    if error == float("inf"):
        return {"found": f"{begin} the result is not all numbers."}
    verdict = "right" if error < TOLERANCE else "WRONG"
    return {"found": f"{begin} the result is {verdict}, to {error:g} of the largest value.", "error_of_largest": error}


POINTS: dict[str, tuple[str, Point]] = {
    "combination": ("which versions work together here", combination),
    "slots of -1": ("npu_scatter_pa_kv_cache with slots of -1 among others", negative_slots),
    "float16": ("paged TND attention in float16, causal and bidirectional", float16),
    "padding of few tokens": (
        "causal attention with a padding request that has fewer KV tokens than rows",
        short_padding,
    ),
    "partly filled pages": ("bidirectional attention (mode 0) where last pages are partly filled", partial_pages),
    "more than 16 rows": ("requests of more than 16 query rows with D 128, both attentions", wide_blocks),
    "order of heads": (
        "K and V as [pages, kv_heads, page, D] (BnNBsD) instead of [pages, page, kv_heads x D] (BnBsH)",
        order_of_heads,
    ),
    "updates of a graph": ("how long new lengths for the attention calls of a graph take", updates),
    "captures": ("how many graphs of the demo pair can be captured", captures),
}
