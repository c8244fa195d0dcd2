"""A step's arrays, and the positions and slots that the device makes of them, equal those of a plain loop over rows.

Padded to the size of a graph they are the same, and rows of padding harm no sequence.
"""

import pickle
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.engine.arrays import arrays
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.models.page_pool import SCRATCH_PAGES
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence
from app.engine.step.graph_plan import settle_graph_sizes
from app.engine.step.inputs import Layout, RowGroup, StepInputs
from app.messages import Request, SamplingParams
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import make_pair


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
            sampling=SamplingParams(temperature=random.choice([0.0, 1e-7, 0.7, 1.3]), seed=random.getrandbits(64)),
            max_tokens=40,
        )
        seq = Sequence(request, arrival=0)
        pages = -(-(n + block_size - 1) // page_size) + spare_pages
        seq.pages = array("i", [free.pop() for _ in range(pages)])
        return seq

    batch = Batch()
    for n, width in decodes:
        batch.decodes.append(ScheduledSequence(sequence(n), n - 1, width, needs_logits=True, num_drafts=width - 1))
    for n, start, count in prefills:
        start = min(start, n - 1)
        count = min(count, n - start)
        batch.prefills.append(ScheduledSequence(sequence(n), start, count, needs_logits=start + count == n))
    return batch, page_size, block_size


def build(batch: Batch, page_size: int, block_rows: int) -> StepInputs:
    batch.block_rows = block_rows
    return Layout(page_size, host_positions=True).build(batch)


def state_of(seed: int, index: int) -> int:
    """Three rounds of the hash, over the seed's low half, its high half, and the token's index."""
    x = 0x9E3779B9
    for word in (seed % 2**32, seed // 2**32, index):
        x ^= word
        for factor in (0x7FEB352D, 0x846CA68B):
            x = (x ^ x >> 16) * factor % 2**32
        x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def slot(seq: Sequence, position: int, page_size: int) -> int:
    return seq.pages[position // page_size] * page_size + position % page_size


def on_device(group: RowGroup, page_size: int) -> tuple[list[int], list[int]]:
    """The positions and slots of a group's rows, as the device makes them."""
    seq_ids, offsets, table = (torch.from_numpy(x) for x in (group.seq_ids, group.position_offsets, group.page_table))
    row_numbers = torch.arange(len(seq_ids), dtype=torch.int32)
    positions, slot_mapping = TorchBackend(torch.device("cpu")).positions_and_slots(
        seq_ids, offsets, row_numbers, table, page_size
    )
    assert positions.dtype == slot_mapping.dtype == torch.int32, "what Ascend's operators take"
    assert group.positions is not None and group.slot_mapping is not None
    on_host = [group.positions, group.slot_mapping]
    assert all(array.dtype == np.int32 for array in on_host)
    assert [array.tolist() for array in on_host] == [positions.tolist(), slot_mapping.tolist()], (
        "an NPU's are the host's"
    )
    return positions.tolist(), slot_mapping.tolist()


def check_group(group: RowGroup, shares: list[tuple[Sequence, int, int]], page_size: int) -> None:
    """`shares` are (sequence, first position, number of rows)."""
    wanted = [(seq, position) for seq, start, count in shares for position in range(start, start + count)]
    positions, slot_mapping = on_device(group, page_size)
    assert positions == [position for _, position in wanted]
    assert slot_mapping == [slot(seq, position, page_size) for seq, position in wanted]
    assert group.query_lens == [count for _, _, count in shares]
    assert group.host_seq_lens == [start + count for _, start, count in shares]
    assert all(type(length) is int for length in group.query_lens + group.host_seq_lens), "host lists are of plain ints"
    width = max(-(-length // page_size) for length in group.host_seq_lens)
    for row, (seq, _, _) in zip(group.page_table.tolist(), shares, strict=True):
        assert row == (seq.pages.tolist() + [0] * width)[:width]


def check(inputs: StepInputs, batch: Batch, page_size: int, block_size: int) -> None:
    token_ids: list[int] = []
    logits_indices: list[int] = []
    logits_start: list[int] = []
    num_drafts: list[int] = []
    draft_index: list[int] = []
    drawn: list[tuple[int, float, int]] = []
    request_ids: list[str] = []
    anchors: list[int] = []
    token_source: list[int] = []
    num_rows = sum(entry.count for entry in batch.entries)
    for rows in batch.decodes + batch.prefills:
        seq, request = rows.seq, rows.seq.request
        if rows.needs_logits:
            logits_start.append(len(logits_indices))
            num_drafts.append(rows.num_drafts)
            draft_index.append(len(request_ids) if rows.num_drafts else 0)
        for position in range(rows.start, rows.end):
            row = len(token_ids)
            known = position < len(seq.token_ids)
            token_ids.append(seq.token_ids[position] if known else 0)
            draft = len(request_ids) * (block_size - 1) + position - len(seq.token_ids)
            token_source.append(row if known else num_rows + draft)
            if rows.needs_logits and position >= len(seq.token_ids) - 1:
                if not request.sampling.is_greedy:
                    drawn.append(
                        (
                            len(logits_indices),
                            request.sampling.temperature,
                            state_of(request.sampling.seed, position + 1),
                        )
                    )
                logits_indices.append(row)
        if rows.num_drafts:
            request_ids.append(request.request_id)
            anchors.append(seq.token_ids[-1])

    assert inputs.target.token_ids.tolist() == token_ids
    assert inputs.target.token_source.tolist() == token_source
    assert inputs.target.logits_indices.tolist() == logits_indices
    assert inputs.target.logits_start.tolist() == logits_start
    assert inputs.target.num_drafts.tolist() == num_drafts
    assert inputs.target.draft_index.tolist() == draft_index
    assert len(inputs.sampling) == bool(drawn)
    for draws in inputs.sampling:
        assert draws.rows.tolist() == [row for row, _, _ in drawn]
        assert draws.temperature.tolist() == np.array([t for _, t, _ in drawn], dtype=np.float32).tolist()
        assert draws.state.tolist() == [state for _, _, state in drawn]
    parts = [part for part in (batch.decodes, batch.prefills) if part]
    for group, part in zip(inputs.target.groups, parts, strict=True):
        check_group(group, [(rows.seq, rows.start, rows.count) for rows in part], page_size)
    if not request_ids:
        assert inputs.draft is None
        return
    assert inputs.draft is not None
    assert inputs.draft.request_ids == request_ids
    assert inputs.draft.anchors.tolist() == anchors
    blocks = [(rows.seq, rows.start, block_size) for rows in batch.decodes if rows.num_drafts]
    check_group(inputs.draft.groups[0], blocks, page_size)


@settings(max_examples=300)
@given(batches())
def test_every_array_equals_the_loop_over_rows(drawn: tuple[Batch, int, int]) -> None:
    batch, page_size, block_size = drawn
    inputs = build(batch, page_size, block_size)
    check(inputs, batch, page_size, block_size)
    found = [array for part in (inputs.target, inputs.draft) if part for array in arrays(part).values()]
    found += [column.view(np.int32) for column in arrays(inputs.sampling).values()]
    assert {array.dtype for array in found} == {np.dtype(np.int32)}, "they go to the device packed, as int32"


@settings(max_examples=200)
@given(batches(), st.integers(0, 5), st.integers(2, 40), st.integers(0, 1))
def test_padding_leaves_real_rows_alone_and_keeps_the_contract(drawn, more_seqs, max_graphs, spare):
    batch, page_size, block_size = drawn
    batch.prefills.clear()
    assume(batch.decodes)
    inputs = build(batch, page_size, block_size)
    num_seqs, num_rows = len(batch.decodes), len(inputs.target.token_ids)
    sizes = settle_graph_sizes(num_seqs + more_seqs, block_size, max_graphs, draft_graphs=True, spare=spare)
    scratch_pages = -(-sizes.max_rows // page_size)
    seqs, rows = sizes.target(num_seqs, num_rows)
    each = sizes.padding_rows(seqs, rows)
    layout = Layout(page_size, host_positions=True, graphs=sizes)
    padded_step = layout.build(batch)
    padded = padded_step.target
    assert padded.token_ids[:num_rows].tolist() == inputs.target.token_ids.tolist()
    drafts = np.where(
        inputs.target.token_source < num_rows, inputs.target.token_source, inputs.target.token_source + rows - num_rows
    )
    assert padded.token_source.tolist() == [*drafts, *range(num_rows, rows)]
    for name in ("logits_start", "num_drafts", "draft_index"):
        assert getattr(padded, name).tolist()[:num_seqs] == getattr(inputs.target, name).tolist()
        assert len(getattr(padded, name)) == seqs + 1
    assert padded.prev_rows.tolist() == [-1] * seqs
    (own,), (group,) = inputs.target.groups, padded.groups
    check_padded(own, group, rows, scratch_pages, page_size)
    assert set(group.query_lens[num_seqs:-1]) <= {each} and group.query_lens[-1] >= spare
    assert each or not spare, "an NPU's attention takes no empty sequence"
    if inputs.draft:
        blocks, _ = sizes.draft(len(inputs.draft.anchors), block_size)
        draft = padded_step.draft
        assert draft is not None
        (own,), (group,) = inputs.draft.groups, draft.groups
        assert set(group.query_lens) == {block_size} and len(draft.anchors) == blocks
        assert draft.prev_rows.tolist() == [-1] * blocks
        check_padded(own, group, blocks * block_size, scratch_pages, page_size)


@settings(max_examples=200)
@given(batches(), st.integers(0, 5), st.integers(2, 40), st.integers(0, 1))
def test_chunks_in_a_graph_have_their_own_rows_and_choices_after_their_last_ones(drawn, more_seqs, max_graphs, spare):
    batch, page_size, block_size = drawn
    batch.block_rows, num_seqs = block_size, len(batch.entries)
    sizes = settle_graph_sizes(num_seqs + more_seqs, block_size, max_graphs, draft_graphs=True, spare=spare)
    eager = Layout(page_size, separate_prefill=False, host_positions=True)
    inputs, step = eager.build(batch), replace(eager, graphs=sizes).build(batch)
    own, padded = inputs.target, step.target
    num_rows, size = len(own.token_ids), (len(padded.prev_rows), len(padded.token_ids))
    if not step.in_graph:
        needed = num_rows + spare + (sizes.targets[-1][0] - num_seqs) * sizes.padding_rows(*sizes.targets[-1])
        assert batch.prefills and needed > sizes.max_rows
        assert size == (len(own.prev_rows), num_rows)
        return
    assert size in sizes.targets and padded.logits_indices.tolist() == [*range(size[1])]
    assert padded.token_ids[:num_rows].tolist() == own.token_ids.tolist()
    sampled = own.num_seqs
    assert padded.num_seqs == sampled and len(padded.logits_start) == size[0] + 1
    assert padded.logits_start[:sampled].tolist() == own.logits_indices[own.logits_start].tolist()
    drafts = padded.token_source[padded.token_source >= size[1]] - size[1]
    assert drafts.tolist() == [
        index * (block_size - 1) + i
        for index, count in zip(own.draft_index.tolist(), own.num_drafts.tolist(), strict=True)
        for i in range(count)
    ]
    for draws, same in zip(step.sampling, inputs.sampling, strict=True):
        assert draws.rows.tolist() == own.logits_indices[same.rows].tolist()
    check_padded(own.groups[0], padded.groups[0], size[1], -(-sizes.max_rows // page_size), page_size)


def check_padded(own: RowGroup, group: RowGroup, rows: int, scratch_pages: int, page_size: int) -> None:
    """N2, N3, N11, N16 and N30 of docs/npu-contract.md, and the real sequences' places as they were."""
    num_seqs, num_rows = len(own.query_lens), sum(own.query_lens)
    assert group.query_lens[:num_seqs] == own.query_lens and group.host_seq_lens[:num_seqs] == own.host_seq_lens
    assert sum(group.query_lens) == rows
    assert group.host_seq_lens[num_seqs:] == group.query_lens[num_seqs:]
    assert len(group.page_table) == len(group.query_lens)
    assert (group.page_table[num_seqs:, 0] == 0).all()
    positions, slot_mapping = on_device(group, page_size)
    assert (positions[:num_rows], slot_mapping[:num_rows]) == on_device(own, page_size)
    assert len(set(slot_mapping[num_rows:])) == rows - num_rows, "a slot for every padding row"
    assert all(slot < scratch_pages * page_size for slot in slot_mapping[num_rows:])


def test_blocks_of_4_8_and_16_rows_are_captured_at_many_sequences_by_default() -> None:
    """256 sequences and 48 graphs are an NPU's defaults. A narrow block is worth nothing where there are few."""
    sizes = settle_graph_sizes(256, 16, 48, draft_graphs=True, spare=1)
    assert [width for blocks, width in sizes.drafts if blocks == 256] == [4, 8, 16]
    assert [rows for seqs, rows in sizes.targets if seqs == 256] == [257, 1025, 2049, 4097]
    assert (sizes.draft(100, 3), sizes.draft(3, 3)) == ((128, 4), (4, 16))
    assert sizes.target_passes(100)[:4] == [(128, 0), (128, 384), (128, 896), (128, 1920)]
    assert sizes.target_passes(3)[:2] == [(4, 0), (4, 60)], "a whole block, because no narrower one is captured"


def test_prompts_of_some_200_rows_take_a_graph_and_larger_steps_none() -> None:
    sizes = settle_graph_sizes(256, 16, 48, draft_graphs=True, spare=1)
    assert [sizes.with_chunks(1, rows) for rows in (1, 16, 17, 100, 192, 241)] == [
        (1, 2), (1, 17), (2, 33), (8, 129), (16, 257), (16, 257),
    ]  # fmt: skip
    assert sizes.with_chunks(1, 242) is None and sizes.with_chunks(64, 256) == (64, 257)
    assert sizes.with_chunks(100, 150) is None, "it would be 513 rows"
    assert replace(sizes, chunks=False).with_chunks(1, 16) is None


def test_the_longest_chunk_is_tried_in_the_largest_graph_of_each_width() -> None:
    sizes = settle_graph_sizes(256, 16, 48, draft_graphs=True, spare=1)
    assert sizes.with_longest_chunks() == {(64, 257): 193, (32, 257): 225, (16, 257): 241}
    assert not replace(sizes, chunks=False).with_longest_chunks()
    assert settle_graph_sizes(1, 16, 48, draft_graphs=True, spare=1).with_longest_chunks()[1, 17] == 16


def test_rows_are_shared_in_sizes_between_powers_of_two() -> None:
    sizes = settle_graph_sizes(32, 16, 48, draft_graphs=True, spare=0)
    assert sorted({width for _, width in sizes.drafts}) == [4, 6, 8, 12, 16]
    assert sizes.target(17, 17 * 16) == (32, 320) and sizes.target(32, 32 * 6) == (32, 192)
    assert sizes.target(1, 16) == (1, 16) and sizes.target(3, 3) == (4, 4) and sizes.target(3, 4) == (15, 16)
    drafts = [15, 47, 79, 111, 175, 239, 303, 367, 431, 495]
    assert sizes.target_passes(17) == [(32, 0), *((17, each) for each in drafts)]
    many = settle_graph_sizes(256, 16, 48, draft_graphs=True, spare=0)
    assert many.target(1, 16) == (1, 16) and many.target(256, 256 * 4) == (256, 1024)


@settings(max_examples=100)
@given(
    st.data(),
    st.sampled_from([1, 2, 3, 8, 20, 100]),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([2, 3, 5, 16, 48]),
    st.integers(0, 1),
)
def test_steps_are_padded_to_what_could_be_captured_and_cost_that(data, max_num_seqs, block_size, max_graphs, spare):
    planned = settle_graph_sizes(max_num_seqs, block_size, max_graphs, draft_graphs=True, spare=spare)
    assert len(planned.targets) + len(planned.drafts) <= max_graphs
    assert len(planned.targets) == len(set(planned.targets)) and planned.drafts == sorted(set(planned.drafts))
    assert planned.targets[-1][0] == max_num_seqs
    assert planned.drafts[-1:] == ([(max_num_seqs, block_size)] if block_size > 1 else [])
    assert planned.max_rows == max_num_seqs * block_size + spare, "a full step has no padding but what must be"
    kept = st.lists(st.booleans(), min_size=max_graphs, max_size=max_graphs)
    targets, drafts = (
        [*(size for size, keep in zip(sizes[:-1], data.draw(kept), strict=False) if keep), *sizes[-1:]]
        for sizes in (planned.targets, planned.drafts)
    )
    sizes = replace(planned, targets=targets, drafts=drafts)
    for num_seqs in sorted({*range(1, min(max_num_seqs, 20) + 1), max_num_seqs}):
        passes, most = sizes.target_passes(num_seqs), num_seqs * (block_size - 1)
        for num_drafts in {*range(min(most, 64) + 1), most // 2, most}:
            seqs, rows = sizes.target(num_seqs, num_seqs + num_drafts)
            each = sizes.padding_rows(seqs, rows)
            assert (seqs, rows) in targets and seqs >= num_seqs
            assert rows >= num_seqs + num_drafts + spare + each * (seqs - num_seqs)
            assert each or rows > seqs, "the capture of rows that are shared has a sequence of more than one"
            counted, up_to = next(each for each in passes if each[1] >= num_drafts)
            assert counted == (seqs if each else num_seqs) and counted + up_to + spare == rows
        for width in range(2, block_size + 1):
            blocks, widened = sizes.draft(num_seqs, width)
            assert (blocks, widened) in drafts and blocks >= num_seqs and widened >= width
            assert next(each for each in sizes.draft_passes(width) if each[0] >= num_seqs) == (blocks, widened)


def test_too_few_graphs_for_a_step_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="--max-graphs 1 is too small"):
        settle_graph_sizes(4, 8, 1, draft_graphs=True, spare=0)
    assert settle_graph_sizes(4, 1, 1, draft_graphs=False, spare=0).targets == [(4, 4)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_draft_blocks_have_the_rows_they_are_given_however_few_are_verified(page_size):
    seq = Sequence(Request("a", tuple(range(10)), 2), 0, pages=array("i", range(1, 30)))
    inputs = build(Batch([ScheduledSequence(seq, 9, 2, needs_logits=True, num_drafts=1)]), page_size, block_rows=8)
    assert inputs.draft is not None
    assert on_device(inputs.draft.groups[0], page_size)[0] == list(range(9, 17))
    assert inputs.draft.groups[0].host_seq_lens == [17], "the block is counted once"
    assert inputs.target.token_source.tolist() == [0, 2]


def test_drafts_are_found_in_lines_that_are_longer_than_blocks():
    seqs = [Sequence(Request(name, (1,) * 10, 40), 0, pages=array("i", range(1, 30))) for name in "ab"]
    batch = Batch(
        [
            ScheduledSequence(seqs[0], 9, 3, needs_logits=True, num_drafts=2),
            ScheduledSequence(seqs[1], 9, 2, needs_logits=True, num_drafts=1),
        ]
    )
    close = build(batch, 4, block_rows=3)
    apart = Layout(4).target(batch, None, draft_columns=7)
    assert close.target.token_source.tolist() == [0, 5, 6, 3, 5 + 2]
    assert apart.token_source.tolist() == [0, 5, 6, 3, 5 + 7]
    assert close.draft is not None and close.draft.groups[0].query_lens == [3, 3]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_step_behind_one_that_is_not_read_follows_its_lines_over_pages_for_where_it_may_begin(page_size):
    seqs = [
        Sequence(Request(name, (1,) * 10, 40), 0, pages=array("i", range(1 + 40 * i, 40 + 40 * i)))
        for i, name in enumerate("ab")
    ]
    rows = [
        ScheduledSequence(seqs[0], 10, 4, True, 3, prev_row=2, max_accepted=7),
        ScheduledSequence(seqs[1], 10, 1, True, 0, prev_row=0, max_accepted=3),
    ]
    inputs = build(Batch(rows), page_size, block_rows=8)
    (group,) = inputs.target.groups
    assert inputs.target.prev_rows.tolist() == [2, 0] and inputs.target.token_source.tolist() == [0, 5, 6, 7, 4]
    assert inputs.target.token_ids.tolist() == [0] * 5
    assert (on_device(group, page_size)[0], group.host_seq_lens) == ([10, 11, 12, 13, 10], [14, 11])
    assert group.page_table.shape[1] == -(-(10 + 7 + 4) // page_size)
    assert inputs.draft is not None and inputs.draft.prev_rows.tolist() == [2]
    assert inputs.draft.groups[0].page_table.tolist() == [seqs[0].pages[: -(-(10 + 7 + 8) // page_size)].tolist()]


def test_a_chunk_that_is_not_the_last_asks_for_no_logits():
    seq = Sequence(Request("a", (1, 2, 3, 4), 2, sampling=SamplingParams(temperature=1.0)), 0, pages=array("i", [1]))
    inputs = build(Batch(prefills=[ScheduledSequence(seq, 0, 3, needs_logits=False)]), page_size=4, block_rows=4)
    target = inputs.target
    assert (
        target.logits_indices.size == target.logits_start.size == target.num_drafts.size == target.draft_index.size == 0
    )
    assert inputs.sampling == []
    assert inputs.draft is None


def test_a_step_is_arrays_alone_and_a_copy_of_them_gives_the_same_result(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, **LUCKY)
    asked = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=3, top_k=7),
        SamplingParams(temperature=0.8, seed=5, presence_penalty=0.7, repetition_penalty=1.2),
        SamplingParams(logit_bias=((3, 1.5),), min_tokens=4, frequency_penalty=0.5),
    ]
    requests = [
        Request(f"r{i}", tuple(n % 5 for n in range(9 + 5 * i)), 20, params, (4,)) for i, params in enumerate(asked)
    ]

    def texts(*, copied: bool) -> dict[str, list[int]]:
        core = make_engine(pair.target, pair.draft, max_num_seqs=4, max_num_batched_tokens=64).core
        launch = core.runner.launch
        if copied:
            core.runner.launch = lambda inputs: launch(pickle.loads(pickle.dumps(inputs)))
        return core.run(requests)

    assert texts(copied=True) == texts(copied=False)
