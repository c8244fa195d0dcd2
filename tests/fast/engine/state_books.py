"""The books of recurrent slots: every slot is free, owned by one sequence, or a checkpoint of a cached page."""

from collections import Counter
from typing import Any

import torch

from app.engine.load.engine import Engine
from app.engine.schedule.scheduler import Scheduler


def check_state_slots(scheduler: Scheduler) -> list[int]:
    """Hold the slots against their owners and readers. Return those that are owned."""
    states, pool = scheduler.states, scheduler.pool
    held = Counter(
        slot for seq in scheduler.running for slot in (seq.state_slot, seq.next_state_slot, seq.split_slot) if slot
    )
    frozen = states._num_readers
    owned = [slot for slot in held if slot not in frozen]
    assert all(held[slot] == 1 for slot in owned), "a slot that steps write has one owner"
    assert {slot: held[slot] for slot in frozen} == frozen
    assert sorted([*states._free, *owned, *frozen]) == list(range(1, states.num_slots + states.num_checkpoints + 1))
    assert len(owned) == states.num_used and len(frozen) == states.num_used_checkpoints <= states.num_checkpoints
    assert {slot: digest for digest, slot in states._slot_of.items()} == states._digest_of
    assert set(states._digest_of) | set(held) >= set(frozen), "what no sequence reads can be found"
    assert set(states._slot_of) <= set(pool._page_of), "a checkpoint goes with its page"
    assert states._spare_owner in (None, *scheduler.running), "the spare slot is given back"
    assert not any(seq.state_slot or seq.next_state_slot or seq.split_slot for seq in scheduler.waiting)
    return owned


def check_state(engine: Engine, slot: int, start: int, wanted: list[Any]) -> None:
    """Hold a slot, as a step that begins at `start` reads it, against a reference's memory after that many tokens."""
    target, pool = engine.core.runner.forward.target, engine.core.runner.pools[0]
    for number in target.config.gated_delta.layers:
        memory, layer = pool.layers[number], target.layers[number].attention
        state, pending, counts = memory.at(torch.tensor([slot]), torch.tensor([start]))
        assert int(memory.num_tokens[slot]) + int(counts) == start
        found = layer.recurrence.advance(pending, counts, state)[1]
        torch.testing.assert_close(found.matrix[0], wanted[number].matrix, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.conv[0], wanted[number].inputs, rtol=1e-3, atol=1e-4)
