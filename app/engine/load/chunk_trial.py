"""A prompt's chunk from each kind of graph, before the first request, against the same code without the graph."""

import logging
from array import array
from collections.abc import Sequence as Many

import torch

from app.engine.arrays import Ints
from app.engine.comm.comm import Comm
from app.engine.device.base import Backend
from app.engine.device.comparison import TOLERANCE
from app.engine.errors import last_words
from app.engine.load.plan import Sizes
from app.engine.models.kv_pool import KvPool
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence
from app.engine.step.graphs import StepGraphs
from app.engine.step.inputs import Layout, TargetInputs
from app.messages import Request

CONTEXT = 1500
"""Tokens before a chunk, as far as a sequence may have them: from 1,024 on an NPU has another kernel for few rows."""

logger = logging.getLogger(__name__)


def chunks_are_right(
    graphs: StepGraphs, layout: Layout, sizes: Sizes, pools: Many[KvPool], backend: Backend, comm: Comm
) -> bool:
    """Return True if a chunk is right in a graph of each kind, on all ranks. The log says why not.

    The context is random numbers on the last pages of the target, which are zeroed afterwards.
    """
    right, ends = True, [len(pool.layers[0].k) for pool in pools]
    context = slice(ends[0] - sizes.pages_per_sequence, None)
    for kv in pools[0].layers:
        for pages in (kv.k[context], kv.v[context]):
            pages.normal_()
    for size, rows in graphs.captured_sizes.with_longest_chunks().items():
        batch = _chunk(min(rows, sizes.max_model_len), sizes, graphs.vocab_size, ends, alone=size[0] == 1)
        found = _error_of(graphs, layout.target(batch, size, sizes.block_size - 1), backend)
        right = bool(comm.minimum(not found))
        if not right:
            what = f"a chunk of {rows} rows, in the graph of {size[0]} sequences and {size[1]} rows"
            logger.warning(
                "prompts do not run from graphs: %s, is %s", what, found or "wrong or refused on another rank"
            )
            break
    for kv in pools[0].layers:
        for pages in (kv.k[context], kv.v[context]):
            pages.zero_()
    return right


def _error_of(graphs: StepGraphs, inputs: TargetInputs[Ints], backend: Backend) -> str:
    """Return what is wrong with a replay, or ""."""
    try:
        error = graphs.error_of(inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as refusal:
        backend.annotate(refusal)
        return f"refused: {last_words(refusal)}"
    return "" if error < TOLERANCE else f"wrong, by {error:.3f} of the largest value"


def _chunk(rows: int, sizes: Sizes, vocab_size: int, ends: Many[int], *, alone: bool) -> Batch:
    """Return the last `rows` rows of a prompt, after a row of a sequence that decodes on the same pages if it is not
    `alone`. Pages are the last of the pools, which end at `ends`."""
    num_tokens = min(CONTEXT + rows, sizes.max_model_len)
    num_pages = -(-num_tokens // sizes.page_size)
    batch, start = Batch(), num_tokens - rows
    parts = [(batch.decodes, start - 1, 1), (batch.prefills, start, rows)]
    for entries, first, count in parts[alone or start == 0 :]:
        seq = Sequence(Request("trial", tuple(i % vocab_size for i in range(first + count)), 1), arrival=0)
        own = range(-num_pages, -(-seq.num_tokens // sizes.page_size) - num_pages)
        seq.pages, seq.draft_pages = (array("i", [max(0, end + i) for i in own]) for end in (ends[0], ends[-1]))
        is_prefill = entries is batch.prefills
        entries.append(ScheduledSequence(seq, first, count, needs_logits=True, is_prefill=is_prefill))
    return batch
