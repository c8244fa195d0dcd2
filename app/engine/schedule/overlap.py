"""The step behind one that is in flight. It begins on the device where the first one will have come to."""

from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.schedule.scheduler import Scheduler


def schedule_ahead(scheduler: Scheduler, batch: Batch) -> Batch | None:
    """Return the step behind `batch`, in which every sequence goes on, or None if it must wait for the result.

    It must wait if a sequence prefills, may be admitted or samples its tokens, if pages are short, or if KV of a
    sequence is to be scrubbed. A sequence that is sure to end in the step in flight is left out.
    """
    scheduler.unread = set()
    here = [(line, rows) for line, rows in enumerate(batch.decodes) if rows.seq.batch_slot >= 0]
    if batch.prefills or [rows.seq for _, rows in here] != scheduler.running:
        return None
    if scheduler.unclean or scheduler.admits_next():
        return None
    if not all(seq.is_decoding and seq.request.sampling.is_argmax for seq in scheduler.running):
        return None
    here = [(line, rows) for line, rows in here if rows.seq.num_remaining > 1]
    pool = scheduler.pool
    reaches = [scheduler.reach(rows.seq) + rows.count for _, rows in here]
    owned = [len(rows.seq.pages) for _, rows in here]
    missing = sum(max(0, pool.pages_for(reach) - own) for reach, own in zip(reaches, owned, strict=True))
    if not here or missing > pool.num_free:
        return None
    scheduler.unread = {rows.seq for _, rows in here}
    widths = scheduler.policy.choose([(rows.seq, scheduler.max_drafts(rows.seq, in_flight=1)) for _, rows in here])
    behind = Batch(least_block=widths.block)
    for (line, rows), reach, drafts in zip(here, reaches, widths.drafts, strict=True):
        seq, start, max_accepted = rows.seq, rows.seq.num_computed + 1, rows.count - 1
        pool.grow(seq.pages, reach)
        behind.decodes.append(
            ScheduledSequence(seq, start, drafts + 1, True, num_drafts=drafts, line=line, max_accepted=max_accepted)
        )
    behind.scrub = scheduler.reused_slots()
    return behind
