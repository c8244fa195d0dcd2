"""The step behind one that is in flight. It begins on the device, where the first one will have ended."""

from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.scheduler import Scheduler


def schedule_ahead(scheduler: Scheduler, batch: Batch) -> Batch | None:
    """Return the step behind `batch`, in which every sequence goes on, or None if it must wait for the result.

    It must wait if a sequence prefills, may be admitted or samples its tokens, if pages are short, or if KV is to be
    scrubbed. A sequence that is sure to end in the step in flight is left out.
    """
    scheduler.in_flight = set()
    live = [(prev_row, rows) for prev_row, rows in enumerate(batch.decodes) if rows.seq.batch_slot >= 0]
    if batch.prefills or [rows.seq for _, rows in live] != scheduler.running or not scheduler.may_run_ahead():
        return None
    live = [(prev_row, rows) for prev_row, rows in live if rows.seq.num_remaining > 1]
    pool = scheduler.pool
    lengths = [scheduler.max_length(rows.seq) + rows.count for _, rows in live]
    owned = [len(rows.seq.pages) for _, rows in live]
    missing = sum(max(0, pool.pages_for(length) - own) for length, own in zip(lengths, owned, strict=True))
    if not live or missing > pool.num_free:
        return None
    scheduler.in_flight = {rows.seq for _, rows in live}
    widths = scheduler.policy.choose([(rows.seq, scheduler.max_drafts(rows.seq, num_in_flight=1)) for _, rows in live])
    behind = Batch(block_rows=widths.block)
    for (prev_row, rows), length, drafts in zip(live, lengths, widths.drafts, strict=True):
        seq, start, max_accepted = rows.seq, rows.seq.num_computed + 1, rows.count - 1
        pool.grow(seq.pages, length)
        next_slot = _next_slot(scheduler, rows)
        behind.decodes.append(
            ScheduledSequence(seq, start, drafts + 1, True, drafts, prev_row, max_accepted, next_slot)
        )
    return behind


def _next_slot(scheduler: Scheduler, rows: ScheduledSequence) -> int:
    """Return the slot that the rows behind `rows` write. If these may fill a page, their slot stays as it is."""
    seq, states, page_size = rows.seq, scheduler.states, scheduler.pool.page_size
    states.commit(rows)  # the device works in order, so the rows behind read what these write
    start, end = seq.num_computed, seq.num_computed + rows.count
    if states.num_checkpoints and seq.cacheable and end // page_size * page_size >= max(start, 1):
        states.freeze(seq)
    states.prepare(seq)
    return seq.next_state_slot
