"""Steps of made-up sequences before the first request: the memory of the widest, and the times of decode steps."""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.core import EngineCore
from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.load.plan import Sizes
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.costs import CostTable, Shape, shapes
from app.engine.sequence import Sequence
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import Request, SamplingParams

MAX_SECONDS = 10
"""Time for steps of one sequence. A step begins only if it is expected to end by then, and its cost is scaled
otherwise."""
_SECONDS = 1.5
"""Time for all steps but those of a single sequence, whose costs decide most and are all timed once. The largest number
of sequences may use half of what is left of it, or half as long as a single one took."""
_ROUNDS = 6
_IN_A_ROW = 3
"""Consecutive steps of a shape in a round. The last of them is timed."""
_SLOW_MS = 100.0
"""A step that takes longer is timed at once, because previous steps like it would save few of its milliseconds."""
_CONTEXT = 128
"""Tokens before the rows, like in an answer. Without context a plain step would look too cheap, because context takes a
larger part of its time than of a step that drafts."""
_TEXTS, _TEXT_TOKENS, _TEXT_SECONDS = 16, 32, 5.0
"""Texts that a mixture of experts makes up, their tokens, and the time after which they are short."""
_FIRST_STEPS = 2
"""Steps of prompts and of single rows, which may compile kernels and do not count."""
Texts = Listed[Listed[int]]


def step_memory(runner_over: Callable[[int], ModelRunner], backend: Backend, sizes: Sizes) -> int:
    """Return the bytes that the widest step takes at its peak. `runner_over` makes a runner over a number of pages.
    Raises UnsupportedError if there is too little memory for that."""
    batch = _widest_step(sizes)
    num_pages = 1 + max(max(entry.seq.pages) for entry in batch.entries)
    try:
        runner = runner_over(num_pages)
        return backend.peak_memory(lambda: runner.launch(runner.layout.build(batch)).read())
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"a step of --max-num-batched-tokens {sizes.max_num_batched_tokens} and --max-num-seqs "
            f"{sizes.max_num_seqs} does not fit in addition to the weights: give a smaller number ({error})"
        ) from None


def _widest_step(sizes: Sizes) -> Batch:
    """Return a step that verifies whole blocks, all drawn with penalties, of all sequences. Prompts take the rest."""
    seqs, block = sizes.max_num_seqs, sizes.block_size
    batch = made_up(Shape(seqs, seqs, block, block), sizes, context=0, temperature=1.0)
    num_pages = pages_of(seqs, sizes)
    rest = min(sizes.max_num_batched_tokens, seqs * sizes.max_model_len) - seqs * block
    while rest > 0:
        rows = min(rest, sizes.max_model_len)
        first, num_pages = num_pages, num_pages - (-rows // sizes.page_size)
        seq = _sequence(rows, range(first, num_pages), 1.0)
        batch.prefills.append(ScheduledSequence(seq, 0, rows, needs_logits=False))
        rest -= rows
    return batch


def made_up(shape: Shape, sizes: Sizes, context: int = _CONTEXT, temperature: float = 0.0) -> Batch:
    """Return a decode step of made-up sequences, whose blocks lie one after another on the pages behind the scratch
    pages, where a graph's padding rows lie. Their context is their first page over and over, shorter where
    `sizes.padded_len` leaves no room for it, because RoPE's table ends there."""
    batch, page_size = Batch(block_rows=shape.block), sizes.page_size
    for i in range(shape.seqs):
        block, in_page = divmod(i * sizes.block_size, page_size)
        first = sizes.scratch_pages + block
        pages = range(first, pages_of(i + 1, sizes))
        room = sizes.padded_len - len(pages) * page_size
        repeats = max(0, min(context, sizes.max_model_len, room) // page_size)
        start = repeats * page_size + in_page
        seq = _sequence(start + 1, [first] * repeats + [*pages], temperature)
        seq.state_slot, seq.batch_slot = i + 1, i
        seq.first_draft_page = max(0, len(seq.pages) - sizes.window_pages)
        rows = shape.rows if i < shape.drafting else 1
        batch.decodes.append(ScheduledSequence(seq, start, rows, needs_logits=True, num_drafts=rows - 1))
    return batch


def pages_of(num_seqs: int, sizes: Sizes) -> int:
    """Return how many pages the sequences of `made_up` need, scratch pages included."""
    return sizes.scratch_pages - (-num_seqs * sizes.block_size // sizes.page_size)


def _sequence(num_tokens: int, pages: Iterable[int], temperature: float) -> Sequence:
    asked = SamplingParams(temperature, frequency_penalty=temperature)
    seq = Sequence(Request("profile", (0,) * num_tokens, num_tokens + 1, asked), arrival=0, pages=array("i", pages))
    seq.draft_pages = seq.pages
    return seq


def made_up_texts(core: EngineCore, sizes: Sizes) -> Texts:
    """Return the tokens of a few texts that the target draws side by side, each from another token on and at
    temperature 1, because a greedy one would repeat itself. If there is no time for a block of any, return one of
    different tokens."""
    texts = {str(i): list[int]() for i in range(min(_TEXTS, sizes.max_num_seqs))}
    vocab_size, length = core.runner.forward.target.config.vocab_size, min(_TEXT_TOKENS, sizes.max_model_len - 1)
    for i, name in enumerate(texts):
        core.add(Request(name, (i * 7919 % vocab_size,), length, SamplingParams(1.0, seed=i)))
    begun, steps = time.perf_counter(), 0
    while core.has_work and time.perf_counter() <= begun + _TEXT_SECONDS:
        for delta in core.step().deltas:
            texts[delta.request_id] += delta.token_ids
        steps += 1
        if steps <= _FIRST_STEPS:
            begun = time.perf_counter()
    long = [text for text in texts.values() if len(text) >= min(length, sizes.block_size)]
    return long or [[i * 7919 % vocab_size for i in range(vocab_size)]]


def measure_costs(
    runner: ModelRunner,
    sizes: Sizes,
    num_pages: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    *,
    overlap: bool = False,
    texts: Texts = (),
) -> CostTable:
    """Time decode steps of 1, 2, 4 ... sequences in the shapes of `shapes`, on free pages, and return their costs.
    Blocks have the widths of the runner's graphs, if there are any. With `overlap` a step is launched before the
    previous one is read. The quickest of several times counts, because other load only makes steps slower. Sizes that
    need more than `num_pages` are left out. `on_progress` is called with (seconds elapsed, MAX_SECONDS).

    A mixture of experts needs `texts`, whose tokens the sequences have in turn: a step reads the experts that its rows
    have, which rows of one text share, all rows of one token have in common, and rows of any tokens hardly."""
    seqs = sorted({*(1 << i for i in range(sizes.max_num_seqs.bit_length())), sizes.max_num_seqs})
    seqs = [n for n in seqs if pages_of(n, sizes) <= num_pages]
    ends = (seqs[0], seqs[-1])
    widths = sorted({width for _, width in runner.layout.graphs.drafts}) if runner.layout.graphs else []
    times: dict[Shape, float] = {}
    begun = time.perf_counter()
    for done in range(_ROUNDS):
        for n in dict.fromkeys((*ends, *seqs[::2], *seqs)):
            end = MAX_SECONDS if n == ends[0] and not done else _SECONDS
            if n == ends[-1] and not done:
                elapsed = time.perf_counter() - begun
                end = min(max(elapsed + _SECONDS, 3 * elapsed) / 2, MAX_SECONDS)
            for shape in shapes(n, sizes.block_size, widths):
                seconds = time.perf_counter() - begun
                on_progress(min(int(seconds), MAX_SECONDS - 1), MAX_SECONDS)
                ms = expected_ms(shape, times) if len(times) > 1 else 0.0  # the first two are timed in any case
                if not ms or seconds + (ms if ms > _SLOW_MS else _IN_A_ROW * ms) / 1000 <= end:
                    ms = _timed(runner, made_up(shape, sizes), texts, overlap=overlap)
                    times[shape] = min(ms, times.get(shape, ms))
    on_progress(MAX_SECONDS, MAX_SECONDS)
    wanted = [shape for n in seqs if n in ends or Shape(n) in times for shape in shapes(n, sizes.block_size, widths)]
    return CostTable({shape: expected_ms(shape, times) for shape in wanted}, runner.layout.graphs)


def expected_ms(shape: Shape, times: Mapping[Shape, float]) -> float:
    """Return the quickest time of a shape, or else scale those of others by their rows: rows of the target and rows of
    the draft each have one cost, fitted to all shapes and the first plain step."""
    if shape in times:
        return times[shape]
    first = times[Shape(1)]
    rows, rest = np.array([_rows(timed) for timed in times], dtype=float), np.array([*times.values()]) - first
    return first + float(_rows(shape) @ np.linalg.lstsq(rows, rest)[0].clip(min=0))


def _rows(shape: Shape) -> NDArray[np.int64]:
    """Return the rows `[2]` of the target and of the draft, without the row of one plain sequence."""
    return np.array((shape.seqs - 1 + shape.drafting * (shape.rows - 1), shape.drafting * shape.block))


def _with_text(inputs: StepInputs, batch: Batch, texts: Texts) -> StepInputs:
    """Replace anchors and drafts by tokens of the sequence's text."""
    target, tokens = inputs.target, list[int]()
    for i, entry in enumerate(batch.decodes if texts else ()):
        text, first = texts[i % len(texts)], i // len(texts) * entry.count
        tokens += [text[(first + j) % len(text)] for j in range(entry.count)]
    if tokens:
        target.token_source = np.arange(len(target.token_ids), dtype=np.int32)
        target.token_ids[: len(tokens)] = tokens
    return inputs


def _timed(runner: ModelRunner, batch: Batch, texts: Texts, *, overlap: bool) -> float:
    """Return the milliseconds of a step after others like it, or with `overlap` the time between two reads with a step
    launched in between. A slow step is timed at once."""

    def launch() -> PendingStep:
        return runner.launch(_with_text(runner.layout.build(batch), batch, texts))

    ahead = launch() if overlap else None
    for _ in range(_IN_A_ROW):
        begun = time.perf_counter()
        step = launch()
        (ahead or step).read()
        ms = 1000 * (time.perf_counter() - begun)
        runner.rollback()  # the next step has the same rows of context, and slots of one write are unique
        ahead = step if overlap else None
        if ms > _SLOW_MS:
            break
    if ahead:
        ahead.read()
    return ms
