"""What holds between two steps holds in flight: in whatever order sequences come, end and are preempted, each step that
is launched before the last one is read finds its own KV and states, and fits the arrays of its graph."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.arrays import arrays
from app.engine.core import EngineCore
from app.engine.dflash.draft_pages import DraftPages, num_draft_pages, window_pages
from app.engine.load.plan import Sizes
from app.engine.models.page_pool import PagePool
from app.engine.schedule.batch import Batch, ScheduledSequence, StepResult
from app.engine.schedule.policy import Widths
from app.engine.schedule.scheduler import Scheduler
from app.engine.schedule.state_slots import StateSlots
from app.engine.sequence import NOT_FINITE
from app.engine.step.graph_plan import settle_graph_sizes
from app.engine.step.inputs import Layout, RowGroup
from app.messages import Request

NONSENSE = 11


class Device(EngineCore):
    """An engine whose device runs each step as it is launched, on memory that records whose tokens it has. A value is
    the hash of a token and all before it, which sequences with one prefix share."""

    def __init__(
        self, rng: Random, *, page: int, window: int, block: int, hybrid: bool, not_finite: float, by_host: bool
    ) -> None:
        """With `by_host` positions and slots are the host's, as on an NPU, where chunks have graphs and no step is
        launched ahead."""
        seqs, self.window, self.page, self.rng, self.not_finite = rng.randint(1, 5), window, page, rng, not_finite
        batched = seqs * block + rng.choice((0, 7, 64, 200))
        sizes = Sizes(block, 160, seqs, batched, page, window_pages=window_pages(window, block, page) if window else 0)
        graphs = settle_graph_sizes(seqs, block, rng.randint(2, 12), draft_graphs=True, spare=rng.randint(0, 1))
        scratch = -(-graphs.max_rows // page)
        sizes = Sizes(block, 160, seqs, batched, page, scratch, window, sizes.window_pages)
        most = sizes.pages_per_sequence * rng.choice((1, 2, seqs)) + scratch
        draft_pages = DraftPages(num_draft_pages(sizes), page, scratch, window) if window else None
        states = StateSlots(seqs, rng.randint(0, 4), 2 * page) if hybrid else None
        scheduler = Scheduler(
            PagePool(most, page, scratch),
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            max_model_len=160,
            block_size=block,
            prefix_caching=rng.random() < 0.7 and (states is None or states.num_checkpoints > 0),
            states=states,
            draft_pages=draft_pages,
        )
        scheduler.policy.choose = self._widths  # type: ignore[method-assign]
        layout = Layout(
            page,
            separate_prefill=hybrid or not by_host,
            hybrid=hybrid,
            host_positions=by_host,
            graphs=graphs,
            draws_in_graphs=True,
            window_pages=sizes.window_pages,
        )
        runner = SimpleNamespace(layout=layout, is_fatal=lambda _: True, backend=SimpleNamespace(annotate=id))
        super().__init__(scheduler, runner, overlap=not by_host)  # type: ignore[arg-type]
        pages = max(sizes.pages_per_sequence, scratch)
        self.captured = {size: arrays(layout.target(Batch(), size, 0, pages)) for size in graphs.targets}
        self.captured_drafts = {size: arrays(layout.draft(Batch(), *size, pages)) for size in graphs.drafts}
        self.scripts: dict[str, list[int]] = {}
        self.target_kv: dict[int, int] = {}
        self.draft_kv: dict[int, int] = {}
        self.states: dict[int, set[int]] = {}
        self.ends: list[int] = []  # of the last step's sequences, on the device
        self.firsts: dict[Any, int] = {}  # pages from which on sequences have the draft's KV
        self.num_ahead = 0

    def _widths(self, wanted: Any) -> Widths:
        block = self.scheduler.block_size
        width = self.rng.choice((1, 2, block))
        return Widths([self.rng.randint(0, min(limit, width - 1)) for _, limit in wanted], width)

    def prefix(self, entry: ScheduledSequence, length: int) -> int:
        return hash(tuple(self.scripts[entry.seq.request.request_id][:length]))

    def launch(self, batch: Batch) -> Any:
        for slots, kv in zip(self.scheduler.to_scrub, (self.target_kv, self.draft_kv), strict=False):
            for slot in slots:
                kv.pop(slot, None)
            slots.clear()
        if not batch:
            return SimpleNamespace(read=lambda: StepResult([], []))
        for entry in batch.prefills:
            self.firsts.setdefault(entry.seq.key, entry.seq.first_draft_page)
        inputs = self.runner.layout.build(batch)
        if inputs.in_graph:
            size = len(inputs.target.prev_rows), len(inputs.target.token_ids)
            self.fit(arrays(inputs.target), self.captured[size])
        if inputs.draft:
            rows = inputs.draft.groups[0].query_lens[0]
            self.fit(arrays(inputs.draft), self.captured_drafts[len(inputs.draft.anchors), rows])
            drafting = [entry for entry in batch.decodes if entry.num_drafts]
            for i, entry in enumerate(drafting):
                self.draft(entry, inputs.draft.groups[0], i, rows)
        ends, tokens, accepted = [], [], []
        groups = [(group, i) for group in inputs.target.groups for i in range(len(group.query_lens))]
        for number, (entry, (group, i)) in enumerate(zip(batch.entries, groups, strict=False)):
            start = self.start(entry)
            right = self.rng.randint(0, entry.num_drafts)
            self.forward(entry, group, i, start, entry.count - entry.num_drafts + right)
            if inputs.target.recurrent:
                self.recur(entry, inputs.target.recurrent, number, start, right)
            if entry.needs_logits:
                first = start + entry.count - entry.num_drafts
                script = self.scripts[entry.seq.request.request_id]
                row = script[first : first + right + 1] + [NONSENSE] * (entry.num_drafts - right)
                if self.rng.random() < self.not_finite:
                    bad = self.rng.randrange(len(row))
                    row[bad:] = [NOT_FINITE] * (len(row) - bad)
                    right = min(right, bad)
                tokens.append(row)
                accepted.append(right)
                ends.append(first + right)
        self.ends = ends
        self.num_ahead += any(entry.prev_row >= 0 for entry in batch.entries)
        return SimpleNamespace(read=lambda: StepResult(tokens, accepted))

    def start(self, entry: ScheduledSequence) -> int:
        """Return where the device finds a sequence: after what the step in flight accepted."""
        start = self.ends[entry.prev_row] if entry.prev_row >= 0 else entry.start
        assert entry.start <= start <= entry.start + entry.max_accepted
        return start

    def fit(self, given: dict[str, Any], captured: dict[str, Any]) -> None:
        for name, array_ in captured.items():
            own = given[name].shape
            assert own[0] == array_.shape[0] or (len(own) == 1 and own[0] <= array_.shape[0]), (name, own, array_.shape)
            assert len(own) == 1 or own[1] <= array_.shape[1], (name, own, array_.shape)
            if name.endswith("draft_table"):  # its columns are numbers modulo its width
                assert own == array_.shape

    def slot(self, table: Any, column: int, position: int) -> int:
        page = int(table[column])
        assert page >= self.runner.layout.graphs.max_rows // self.page, "a scratch page"
        return page * self.page + position % self.page

    def forward(self, entry: ScheduledSequence, group: RowGroup[Any], i: int, start: int, right: int) -> None:
        """Read and write the target's KV of `entry.count` rows, the first `right` of which have the script's tokens."""
        table, of_draft = group.page_table[i], group.draft_table
        for position in range(start):
            found = self.target_kv.get(self.slot(table, position // self.page, position))
            assert found == self.prefix(entry, position + 1), (entry.seq.request.request_id, position)
        for row in range(entry.count):
            position = start + row
            value = self.prefix(entry, position + 1) if row < right else NONSENSE
            slot = self.slot(table, position // self.page, position)
            self.target_kv[slot] = value
            number = int(group.query_start_loc[i]) + row
            assert group.slot_mapping is None or group.slot_mapping[number] == slot
            if group.draft_slots is not None:
                self.draft_kv[int(group.draft_slots[number])] = value
            elif of_draft is not None:
                slot = self.slot(of_draft[i], position // self.page % of_draft.shape[1], position)
                self.draft_kv[slot] = value

    def draft(self, entry: ScheduledSequence, group: RowGroup[Any], i: int, rows: int) -> None:
        """Read the draft's KV of a window before the anchor, and write the block's, which counts for nothing."""
        if not self.window:
            return
        start, seq = self.start(entry), entry.seq
        first = (entry.start + rows - group.host_seq_lens[i]) // self.page
        begins = max(start - self.window, self.firsts[seq.key] * self.page)
        assert first * self.page <= begins, "the window is cut"
        for position in range(begins, start):
            slot = self.slot(group.page_table[i], position // self.page - first, position)
            assert self.draft_kv.get(slot) == self.prefix(entry, position + 1), (seq.request.request_id, position)
        for row in range(rows):
            if group.slot_mapping is not None:
                slot = int(group.slot_mapping[i * rows + row])
            else:
                table, position = group.draft_table[i], start + row  # type: ignore[index]
                slot = self.slot(table, position // self.page % len(table), position)
            self.draft_kv[slot] = NONSENSE

    def recur(self, entry: ScheduledSequence, recurrent: Any, number: int, start: int, right: int) -> None:
        """Move a recurrent state: that of a slot serves for the tokens before its last step, and for those that it
        accepted."""
        if entry.is_prefill:
            number -= len(recurrent.decodes.slots) if recurrent.decodes else 0
        rows = recurrent.prompts if entry.is_prefill else recurrent.decodes
        slot, next_slot = int(rows.slots[number]), int(rows.next_slots[number])
        assert slot and next_slot and (not start or self.prefix(entry, start) in self.states[slot])
        if not entry.is_prefill:
            self.states[next_slot] = {self.prefix(entry, start + n) for n in range(right + 2)}
            return
        first, end = rows.query_start_loc[number : number + 2]
        split, split_slot = int(rows.splits[number]), int(rows.split_slots[number])
        assert rows.parts[number] == ([split, end - first - split] if split else [end - first])
        assert not start or next_slot != slot
        if split:
            assert split_slot not in (0, slot, next_slot)
            self.states[split_slot] = {self.prefix(entry, start + split)}
        self.states[next_slot] = {self.prefix(entry, entry.end)}


def traffic(device: Device, steps: int) -> None:
    """Run requests that share prefixes, some of which are aborted, and check all invariants after each step."""
    rng, core, live = device.rng, device, dict[str, Request]()
    for step in range(10 * steps):
        if step < steps and rng.random() < 0.4 and len(live) < 9:
            name = f"r{len(device.scripts)}"
            prompt = [0] * rng.choice((1, 3, 20, 40)) + rng.choices(range(3), k=rng.choice((0, 1, 30, 90)))
            if device.scripts and rng.random() < 0.6:  # a conversation goes on
                prompt = rng.choice([*device.scripts.values()])[: rng.randint(20, 130)]
                prompt = [token for token in prompt if token != NONSENSE]
            answer = rng.choices(range(3), k=rng.randint(1, 160 - len(prompt)) if len(prompt) < 100 else 3)
            device.scripts[name] = prompt + answer + [NONSENSE] * 200
            request = Request(
                name, tuple(prompt), len(answer), stop_token_ids=frozenset([2] if rng.random() < 0.1 else [])
            )
            live[name] = request
            core.scheduler.add(request)
        if live and rng.random() < 0.04:
            name = rng.choice([*live])
            del live[name]
            core.abort(name)
        if rng.random() < 0.02:
            core.flush_cache()
        if core.has_work:
            for delta in core.step().deltas:
                if delta.finish_reason:
                    del live[delta.request_id]
        elif step >= steps:
            break
        core.scheduler.check()
    assert not core.has_work and not live


@pytest.mark.parametrize("hybrid", [False, True], ids=["attention", "hybrid"])
@pytest.mark.parametrize("window", [0, 8, 33])
@pytest.mark.parametrize("by_host", [False, True], ids=["overlapping", "by the host"])
def test_a_step_finds_what_is_its_own_and_fits_its_graph(window: int, hybrid: bool, by_host: bool) -> None:
    num_ahead = 0
    for seed in range(5):
        rng = Random(f"{seed} {window} {hybrid}")
        page, block, not_finite = rng.choice((1, 4, 16)), rng.choice((2, 4, 8)), rng.choice((0, 0, 0.03))
        device = Device(
            rng, page=page, window=window, block=block, hybrid=hybrid, not_finite=not_finite, by_host=by_host
        )
        traffic(device, 60)
        num_ahead += device.num_ahead
    assert num_ahead > 100 or by_host
