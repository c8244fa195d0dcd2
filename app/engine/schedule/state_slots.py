"""Slots of recurrent state: free, or owned by a running sequence. Their tensors are in `models/state_pool.py`."""

from app.engine.sequence import Sequence


class StateSlots:
    """Slot numbers 1 to `num_slots`, of a hybrid target. Without any, sequences keep slot 0, which is scratch.

    A running sequence owns a slot. A chunk of its prompt behind the first one reads that and writes the next slot,
    which takes its place once the step is committed. So a step that fails can be repeated. At most one sequence is
    between two chunks, because the scheduler ends a prompt before it begins another. One slot more than sequences is
    therefore enough.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, seq: Sequence) -> None:
        """Give a slot to a sequence that begins to run."""
        if self.num_slots:
            seq.state_slot = self._free.pop()

    def take_next(self, seq: Sequence) -> None:
        """Give a slot to the state behind the next chunk of a prompt, unless the sequence has one already."""
        if self.num_slots and not seq.next_state_slot:
            seq.next_state_slot = self._free.pop()

    def commit(self, seq: Sequence) -> None:
        """Let the next slot, if there is one, take the place of the sequence's slot."""
        if seq.next_state_slot:
            self._free.append(seq.state_slot)
            seq.state_slot, seq.next_state_slot = seq.next_state_slot, 0

    def release(self, seq: Sequence) -> None:
        """Take all slots of a sequence away."""
        self._free += [slot for slot in (seq.next_state_slot, seq.state_slot) if slot]
        seq.state_slot = seq.next_state_slot = 0
