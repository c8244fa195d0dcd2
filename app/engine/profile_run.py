"""What a step costs in memory, measured before KV memory is sized: the widest step there can be, run once."""

from array import array
from collections.abc import Callable

import torch

from app.engine.backend import Backend
from app.engine.batch import Batch, Rows
from app.engine.config import Sizes
from app.engine.errors import UnsupportedError
from app.engine.model_runner import ModelRunner
from app.engine.sequence import Request, Sequence


def step_memory(runner_over: Callable[[int], ModelRunner], backend: Backend, sizes: Sizes) -> int:
    """Bytes that the widest step takes at its peak; `runner_over` makes a runner over so many pages.

    Raises UnsupportedError where there is not even memory for that.
    """
    batch = _widest_step(sizes)
    num_pages = 1 + max(max(rows.seq.pages) for rows in batch.rows)
    try:
        runner = runner_over(num_pages)
        return backend.peak_memory(lambda: runner.launch(batch).read())
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"a step of --max-num-batched-tokens {sizes.max_num_batched_tokens} and --max-num-seqs "
            f"{sizes.max_num_seqs} does not fit beside the weights: give a smaller number ({error})"
        ) from None


def _widest_step(sizes: Sizes) -> Batch:
    """All sequences verify a whole block, every token is drawn, and prompts take the rest of the budget.

    No real step has both in full. Several blocks share a page, at places of their own, so that few pages are enough.
    """
    block, page = sizes.block_size, sizes.page_size
    sharing, pages_of_block = max(1, page // block), -(-block // page)
    batch, next_page = Batch(), 0
    for i in range(sizes.max_num_seqs):
        place = i % sharing
        if place == 0:
            first, next_page = next_page, next_page + pages_of_block
        seq = _sequence(place * block + 1, range(first, next_page))
        batch.decodes.append(Rows(seq, place * block, block, samples=True, num_drafts=block - 1))
    rest = min(sizes.max_num_batched_tokens, sizes.max_num_seqs * sizes.max_model_len) - sizes.max_num_seqs * block
    while rest > 0:
        rows = min(rest, sizes.max_model_len)
        first, next_page = next_page, next_page + -(-rows // page)
        batch.prefills.append(Rows(_sequence(rows, range(first, next_page)), 0, rows, samples=False))
        rest -= rows
    return batch


def _sequence(num_tokens: int, pages: range) -> Sequence:
    request = Request("profile", (0,) * num_tokens, max_tokens=num_tokens + 1, temperature=1.0)
    return Sequence(request, arrival=0, pages=array("i", pages))
