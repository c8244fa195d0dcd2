"""The step after one in flight. On the device it starts from the state that the first one leaves."""

from app.engine.sampling.metadata import kind_of
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.scheduler import Scheduler
from app.engine.sequence import Sequence


def schedule_ahead(scheduler: Scheduler, batch: Batch, *, draws: bool) -> Batch | str:
    """Return the step after `batch`, in which every sequence goes on, or why it must wait for the result.

    A sequence that is sure to end in the step in flight is left out. With `draws` the device can draw tokens without
    the host.
    """
    scheduler.in_flight = set()
    rows = {entry.seq: (prev_row, entry) for prev_row, entry in enumerate(batch.sampling) if entry.is_live}
    running = [rows[seq] for seq in scheduler.running if seq in rows]
    if reason := _why_wait(scheduler, [entry.seq for _, entry in running], draws=draws):
        return reason
    going_on = [(prev_row, entry) for prev_row, entry in running if entry.seq.num_remaining > 1]
    if not going_on:
        return "end"
    lengths = [scheduler.max_length(entry.seq) + entry.num_drafts + 1 for _, entry in going_on]
    pages = [(scheduler.pool.pages_for(n), entry.seq.pages) for n, (_, entry) in zip(lengths, going_on, strict=True)]
    if sum(max(0, wanted - len(owned)) for wanted, owned in pages) > scheduler.pool.num_free:
        return "pages"
    scheduler.in_flight = {entry.seq for _, entry in going_on}
    widths = scheduler.policy.choose(
        [(entry.seq, scheduler.max_drafts(entry.seq, num_in_flight=1)) for _, entry in going_on]
    )
    after = Batch(block_rows=widths.block)
    for (prev_row, entry), length, drafts in zip(going_on, lengths, widths.drafts, strict=True):
        seq = entry.seq
        scheduler.pool.grow(seq.pages, length)
        next_slot = _next_slot(scheduler, entry) if scheduler.states.num_slots else 0
        after.decodes.append(
            ScheduledSequence(
                seq,
                start=seq.num_tokens,
                count=drafts + 1,
                needs_logits=True,
                num_drafts=drafts,
                prev_row=prev_row,
                max_accepted=entry.num_drafts,
                next_slot=next_slot,
            )
        )
    return scheduler.with_draft_pages(after)


def _why_wait(scheduler: Scheduler, seqs: list[Sequence], *, draws: bool) -> str:
    """Return why the next step must wait for the one in flight, or "". `seqs` are its live ones that get tokens."""
    if len(seqs) < len(scheduler.running):
        return "prefill"
    if scheduler.unclean:
        return "scrub"
    sampled = [seq for seq in seqs if not seq.request.sampling.is_argmax]
    kinds = [kind_of(seq.request.sampling, seq.num_tokens + 1 - len(seq.request.token_ids)) for seq in sampled]
    if any(kind and (kind.by_host or not draws) for kind in kinds):
        return "sampling"
    return "admission" if scheduler.may_admit_next() else ""


def _next_slot(scheduler: Scheduler, entry: ScheduledSequence) -> int:
    """Return the slot that the rows after `entry` write. If `entry` may leave a checkpoint, its slot is not written
    again: a decoding one that may fill a page, and a prompt that ends with a page."""
    seq, states, page_size = entry.seq, scheduler.states, scheduler.pool.page_size
    states.commit(entry)  # the device works in order, so later rows read what these write
    if entry.is_prefill:
        may_leave_one = entry.end % page_size == 0
    else:
        may_leave_one = (seq.num_computed + entry.count) // page_size > seq.num_computed // page_size
    if seq.cacheable and may_leave_one:
        states.freeze(seq)
    states.prepare(seq)
    return seq.next_state_slot
