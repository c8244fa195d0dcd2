"""The step after one that is in flight. It begins on the device, where the first one will have ended."""

from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.scheduler import Scheduler


def schedule_ahead(scheduler: Scheduler, batch: Batch) -> Batch | str:
    """Return the step after `batch`, in which every sequence goes on, or why it must wait for the result.

    A sequence that is sure to end in the step in flight is left out.
    """
    scheduler.in_flight = set()
    live = [(prev_row, share) for prev_row, share in enumerate(batch.decodes) if share.seq.batch_slot >= 0]
    seqs = [share.seq for _, share in live]
    if batch.prefills or seqs != scheduler.running or not all(seq.is_decoding for seq in seqs):
        return "prefill"
    if scheduler.unclean:
        return "scrub"
    if not all(seq.request.sampling.is_argmax for seq in seqs):
        return "sampling"
    if scheduler.may_admit_next():
        return "admission"
    live = [(prev_row, share) for prev_row, share in live if share.seq.num_remaining > 1]
    if not live:
        return "end"
    pool = scheduler.pool
    lengths = [scheduler.max_length(share.seq) + share.count for _, share in live]
    pages = [(pool.pages_for(length), share.seq.pages) for length, (_, share) in zip(lengths, live, strict=True)]
    if sum(max(0, wanted - len(owned)) for wanted, owned in pages) > pool.num_free:
        return "pages"
    scheduler.in_flight = {share.seq for _, share in live}
    widths = scheduler.policy.choose(
        [(share.seq, scheduler.max_drafts(share.seq, num_in_flight=1)) for _, share in live]
    )
    after = Batch(block_rows=widths.block)
    for (prev_row, share), length, drafts in zip(live, lengths, widths.drafts, strict=True):
        seq = share.seq
        pool.grow(seq.pages, length)
        after.decodes.append(
            ScheduledSequence(
                seq,
                start=seq.num_computed + 1,
                count=drafts + 1,
                needs_logits=True,
                num_drafts=drafts,
                prev_row=prev_row,
                max_accepted=share.count - 1,
                next_slot=_next_slot(scheduler, share) if scheduler.states.num_slots else 0,
            )
        )
    return after


def _next_slot(scheduler: Scheduler, share: ScheduledSequence) -> int:
    """Return the slot that the rows after `share` write. If `share` may fill a page, its slot stays as it is."""
    seq, states, page_size = share.seq, scheduler.states, scheduler.pool.page_size
    states.commit(share)  # the device works in order, so later rows read what these write
    if seq.cacheable and (seq.num_computed + share.count) // page_size > seq.num_computed // page_size:
        states.freeze(seq)
    states.prepare(seq)
    return seq.next_state_slot
