"""A step's arrays equal what a plain loop, row by row, says of the batch."""

from array import array
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine import step_inputs
from app.engine.batch import Batch, Rows
from app.engine.kv_cache import SCRATCH_PAGES
from app.engine.sequence import Request, Sequence
from app.engine.step_inputs import RowGroup, StepInputs


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, int, int]:
    """(batch, page size, block size): sequences as the scheduler leaves them, over shuffled pages."""
    page_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    block_size = draw(st.integers(1, 6))
    decodes = draw(st.lists(st.tuples(st.integers(2, 30), st.integers(1, block_size)), max_size=4))
    chunk = st.tuples(st.integers(1, 30), st.integers(0, 29), st.integers(1, 30))
    prefills = draw(st.lists(chunk, min_size=not decodes, max_size=4))
    spare_pages = draw(st.integers(0, 2))
    random = Random(draw(st.integers(0, 2**32)))
    free = random.sample(range(SCRATCH_PAGES, 400), 399)

    def sequence(n: int) -> Sequence:
        request = Request(
            f"r{random.random()}",
            tuple(random.randrange(1, 1000) for _ in range(n)),
            max_tokens=40,
            temperature=random.choice([0.0, 1e-7, 0.7, 1.3]),
            seed=random.getrandbits(64),
        )
        seq = Sequence(request, arrival=0)
        pages = -(-(n + block_size - 1) // page_size) + spare_pages
        seq.pages = array("i", [free.pop() for _ in range(pages)])
        return seq

    batch = Batch()
    for n, width in decodes:
        batch.decodes.append(Rows(sequence(n), n - 1, width, samples=True, num_drafts=width - 1))
    for n, start, count in prefills:
        start = min(start, n - 1)
        count = min(count, n - start)
        batch.prefills.append(Rows(sequence(n), start, count, samples=start + count == n))
    return batch, page_size, block_size


def state_of(seed: int, index: int) -> int:
    """Three rounds of Wellons' lowbias32, over the seed's low half, its high half, and the token's index."""
    x = 0x9E3779B9
    for word in (seed % 2**32, seed // 2**32, index):
        x ^= word
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ x >> shift) * factor % 2**32
        x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def slot(seq: Sequence, position: int, page_size: int) -> int:
    return seq.pages[position // page_size] * page_size + position % page_size


def check_group(group: RowGroup, shares: list[tuple[Sequence, int, int]], page_size: int) -> None:
    """`shares` are (sequence, first position, number of rows)."""
    places = [(seq, position) for seq, start, count in shares for position in range(start, start + count)]
    assert group.positions.tolist() == [position for _, position in places]
    assert group.slots.tolist() == [slot(seq, position, page_size) for seq, position in places]
    assert group.q_lens == [count for _, _, count in shares]
    assert group.kv_lens == [start + count for _, start, count in shares]
    assert all(type(length) is int for length in group.q_lens + group.kv_lens), "host lists are of plain ints"
    width = max(-(-length // page_size) for length in group.kv_lens)
    for row, (seq, _, _) in zip(group.page_table.tolist(), shares, strict=True):
        assert row == (seq.pages.tolist() + [0] * width)[:width]


def check(inputs: StepInputs, batch: Batch, page_size: int, block_size: int) -> None:
    token_ids: list[int] = []
    logit_rows: list[int] = []
    first_logit: list[int] = []
    num_drafts: list[int] = []
    draft_of: list[int] = []
    drawn: list[tuple[int, float, int]] = []
    request_ids: list[str] = []
    anchors: list[int] = []
    target_rows: list[int] = []
    draft_index: list[int] = []
    for rows in batch.decodes + batch.prefills:
        seq, request = rows.seq, rows.seq.request
        if rows.samples:
            first_logit.append(len(logit_rows))
            num_drafts.append(rows.num_drafts)
            draft_of.append(len(request_ids) if rows.num_drafts else -1)
        for position in range(rows.start, rows.end):
            row = len(token_ids)
            known = position < len(seq.token_ids)
            token_ids.append(seq.token_ids[position] if known else 0)
            if not known:
                target_rows.append(row)
                draft_index.append(len(request_ids) * (block_size - 1) + position - len(seq.token_ids))
            if rows.samples and position >= len(seq.token_ids) - 1:
                if not request.is_greedy:
                    drawn.append((len(logit_rows), request.temperature, state_of(request.seed, position + 1)))
                logit_rows.append(row)
        if rows.num_drafts:
            request_ids.append(request.request_id)
            anchors.append(seq.token_ids[-1])

    assert inputs.token_ids.tolist() == token_ids
    assert inputs.logit_rows.tolist() == logit_rows
    assert inputs.first_logit.tolist() == first_logit
    assert inputs.num_drafts.tolist() == num_drafts
    assert inputs.draft_of.tolist() == draft_of
    assert inputs.drawn_rows.tolist() == [row for row, _, _ in drawn]
    assert inputs.temperature.tolist() == np.array([t for _, t, _ in drawn], dtype=np.float32).tolist()
    assert inputs.noise_state.tolist() == [state for _, _, state in drawn]
    parts = [part for part in (batch.decodes, batch.prefills) if part]
    for group, part in zip(inputs.groups, parts, strict=True):
        check_group(group, [(rows.seq, rows.start, rows.count) for rows in part], page_size)
    if not request_ids:
        assert inputs.draft is None
        return
    assert inputs.draft is not None
    assert inputs.draft.request_ids == request_ids
    assert inputs.draft.anchors.tolist() == anchors
    assert inputs.draft.target_rows.tolist() == target_rows
    assert inputs.draft.draft_index.tolist() == draft_index
    blocks = [(rows.seq, rows.start, block_size) for rows in batch.decodes if rows.num_drafts]
    check_group(inputs.draft.group, blocks, page_size)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(batches())
def test_every_array_equals_the_loop_over_rows(drawn: tuple[Batch, int, int]) -> None:
    batch, page_size, block_size = drawn
    inputs = step_inputs.build(batch, page_size, block_size)
    check(inputs, batch, page_size, block_size)
    arrays = [inputs.token_ids, inputs.logit_rows, inputs.first_logit, inputs.num_drafts, inputs.draft_of]
    arrays += [inputs.drawn_rows, inputs.noise_state]
    for group in inputs.groups:
        arrays += [group.positions, group.slots, group.page_table]
    if draft := inputs.draft:
        arrays += [draft.anchors, draft.target_rows, draft.draft_index]
        arrays += [draft.group.positions, draft.group.slots, draft.group.page_table]
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}, "they go to the device packed, as int32"
    assert inputs.temperature.dtype == np.float32


def test_a_mixed_step_worked_out_by_hand():
    """Pages of 4, blocks of 4: a verify of 3 rows, a plain row, a last chunk of two rows, a first chunk of three."""
    request = Request("a", (10, 11, 12, 13, 14, 15), 9, temperature=0.5, seed=7)
    drafting = Sequence(request, 0, pages=array("i", [8, 3, 5]))
    plain = Sequence(Request("b", (20, 21), 9), 1, pages=array("i", [2, 9]))
    ending = Sequence(Request("c", (30, 31, 32), 9, temperature=2.0, seed=1), 2, pages=array("i", [4, 6]))
    starting = Sequence(Request("d", (40, 41, 42, 43, 44), 9, temperature=1.0), 3, pages=array("i", [1, 7]))
    batch = Batch(
        [Rows(drafting, 5, 3, samples=True, num_drafts=2), Rows(plain, 1, 1, samples=True)],
        [Rows(ending, 1, 2, samples=True), Rows(starting, 0, 3, samples=False)],
    )
    inputs = step_inputs.build(batch, page_size=4, block_size=4)
    assert inputs.token_ids.tolist() == [15, 0, 0, 21, 31, 32, 40, 41, 42]
    verify, prefill = inputs.groups
    assert verify.positions.tolist() == [5, 6, 7, 1]
    assert verify.slots.tolist() == [13, 14, 15, 9]
    assert verify.page_table.tolist() == [[8, 3], [2, 9]]
    assert (verify.q_lens, verify.kv_lens) == ([3, 1], [8, 2])
    assert prefill.positions.tolist() == [1, 2, 0, 1, 2]
    assert prefill.slots.tolist() == [17, 18, 4, 5, 6]
    assert prefill.page_table.tolist() == [[4], [1]]
    assert (prefill.q_lens, prefill.kv_lens) == ([2, 3], [3, 3])
    assert inputs.logit_rows.tolist() == [0, 1, 2, 3, 5]
    assert inputs.first_logit.tolist() == [0, 3, 4]
    assert inputs.num_drafts.tolist() == [2, 0, 0]
    assert inputs.draft_of.tolist() == [0, -1, -1]
    assert inputs.drawn_rows.tolist() == [0, 1, 2, 4]
    assert inputs.temperature.tolist() == [0.5, 0.5, 0.5, 2.0]
    assert inputs.noise_state.tolist() == [state_of(7, 6), state_of(7, 7), state_of(7, 8), state_of(1, 3)]
    draft = inputs.draft
    assert draft is not None
    assert (draft.request_ids, draft.anchors.tolist()) == (["a"], [15])
    assert draft.group.positions.tolist() == [5, 6, 7, 8]
    assert draft.group.slots.tolist() == [13, 14, 15, 20]
    assert draft.group.page_table.tolist() == [[8, 3, 5]]
    assert (draft.group.q_lens, draft.group.kv_lens) == ([4], [9])
    assert (draft.target_rows.tolist(), draft.draft_index.tolist()) == ([1, 2], [0, 1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_draft_block_is_whole_however_few_rows_are_verified(page_size):
    seq = Sequence(Request("a", tuple(range(10)), 2), 0, pages=array("i", range(1, 30)))
    inputs = step_inputs.build(Batch([Rows(seq, 9, 2, samples=True, num_drafts=1)]), page_size, block_size=8)
    assert inputs.draft is not None
    assert inputs.draft.group.positions.tolist() == list(range(9, 17))
    assert inputs.draft.group.kv_lens == [17], "the block is counted once"
    assert inputs.draft.draft_index.tolist() == [0]


def test_a_chunk_that_is_not_the_last_asks_for_no_logits():
    seq = Sequence(Request("a", (1, 2, 3, 4), 2, temperature=1.0), 0, pages=array("i", [1]))
    inputs = step_inputs.build(Batch(prefills=[Rows(seq, 0, 3, samples=False)]), page_size=4, block_size=4)
    assert inputs.logit_rows.size == inputs.first_logit.size == inputs.num_drafts.size == inputs.draft_of.size == 0
    assert inputs.drawn_rows.size == inputs.noise_state.size == inputs.temperature.size == 0
    assert inputs.draft is None
