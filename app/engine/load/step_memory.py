"""Memory of a step, measured before KV memory is sized: the widest step that is possible runs once."""

from array import array
from collections.abc import Callable

import torch

from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.load.sizes import Sizes
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence
from app.engine.step.runner import ModelRunner
from app.messages import Request, SamplingParams


def step_memory(runner_over: Callable[[int], ModelRunner], backend: Backend, sizes: Sizes) -> int:
    """Return the bytes that the widest step takes at its peak. `runner_over` makes a runner over a number of pages.

    Raises UnsupportedError if there is too little memory for that.
    """
    batch = _widest_step(sizes)
    num_pages = 1 + max(max(rows.seq.pages) for rows in batch.rows)
    try:
        runner = runner_over(num_pages)
        return backend.peak_memory(lambda: runner.launch(runner.layout.build(batch)).read())
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"a step of --max-num-batched-tokens {sizes.max_num_batched_tokens} and --max-num-seqs "
            f"{sizes.max_num_seqs} does not fit beside the weights: give a smaller number ({error})"
        ) from None


def verify_batch(num_seqs: int, width: int, sizes: Sizes, temperature: float = 0.0) -> Batch:
    """Return a decode step of made-up sequences that verify `width` rows each, over the first pages of the pool.

    Several blocks share a page, at places of their own, so few pages are enough.
    """
    sharing, of_block = _packing(sizes)
    batch = Batch(block_rows=width)
    for i in range(num_seqs):
        place, first = i % sharing, i // sharing * of_block
        start = place * sizes.block_size
        seq = _sequence(start + 1, range(first, first + of_block), temperature)
        seq.state_slot = i + 1
        batch.decodes.append(ScheduledSequence(seq, start, width, needs_logits=True, num_drafts=width - 1))
    return batch


def pages_of(num_seqs: int, sizes: Sizes) -> int:
    """Return how many pages `verify_batch` lies on."""
    sharing, of_block = _packing(sizes)
    return -(-num_seqs // sharing) * of_block


def _packing(sizes: Sizes) -> tuple[int, int]:
    """Return (blocks that share pages, pages they share)."""
    return max(1, sizes.page_size // sizes.block_size), -(-sizes.block_size // sizes.page_size)


def _widest_step(sizes: Sizes) -> Batch:
    """Return a step in which all sequences verify a whole block, every token is drawn, and prompts take the rest.

    No real step has both in full.
    """
    batch = verify_batch(sizes.max_num_seqs, sizes.block_size, sizes, temperature=1.0)
    next_page = pages_of(sizes.max_num_seqs, sizes)
    rows_of_blocks = sizes.max_num_seqs * sizes.block_size
    rest = min(sizes.max_num_batched_tokens, sizes.max_num_seqs * sizes.max_model_len) - rows_of_blocks
    while rest > 0:
        rows = min(rest, sizes.max_model_len)
        first, next_page = next_page, next_page + -(-rows // sizes.page_size)
        batch.prefills.append(
            ScheduledSequence(_sequence(rows, range(first, next_page), 1.0), 0, rows, needs_logits=False)
        )
        rest -= rows
    return batch


def _sequence(num_tokens: int, pages: range, temperature: float) -> Sequence:
    request = Request("profile", (0,) * num_tokens, num_tokens + 1, SamplingParams(temperature))
    return Sequence(request, arrival=0, pages=array("i", pages))
