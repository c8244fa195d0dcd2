"""Slots of recurrent state: free, owned by a running sequence, or checkpoints of the prefix cache.

Their tensors are in `models/state_pool.py`.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from app.engine.schedule.batch import ScheduledSequence
from app.engine.sequence import Sequence


class StateSlots:
    """Slot numbers of a hybrid target, from 1 on. Without any, sequences keep slot 0, which is scratch.

    A running sequence owns a slot, or reads a checkpoint. A step that reads a checkpoint writes another slot, which
    becomes the sequence's once the step is committed. So a checkpoint is a slot that is not written again, and nothing
    is copied.

    A chunk of a prompt also writes another slot than it reads, because a step that fails is repeated. Unless its slot
    is a checkpoint, it writes the spare one, and another prompt between two chunks has to wait for that. There are
    `num_sequences` slots, the spare one and `num_checkpoints`, so a sequence that may run never lacks one.

    A checkpoint is the state after the page whose digest names it, and is dropped with that page. Checkpoints
    that no sequence reads are evicted, least-recently-used first. Prompts are cut at multiples of `interval` tokens,
    where their states become checkpoints.
    """

    def __init__(self, num_sequences: int = 0, num_checkpoints: int = 0, interval: int = 0) -> None:
        self.num_slots = num_sequences + 1 if num_sequences else 0
        self.num_checkpoints = num_checkpoints
        self.interval = interval
        self._free = list(range(self.num_slots + num_checkpoints, 0, -1))
        self._num_readers: dict[int, int] = {}
        """Number of sequences that read each slot which is not written again."""
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._digest_of: dict[int, bytes] = {}
        self._spare_owner: Sequence | None = None

    @property
    def num_used(self) -> int:
        """Return how many slots are neither free nor checkpoints."""
        return self.num_slots + self.num_checkpoints - len(self._free) - len(self._num_readers)

    @property
    def num_used_checkpoints(self) -> int:
        return len(self._num_readers)

    @property
    def checkpoints(self) -> Mapping[bytes, int]:
        """Slots of checkpoints by the digest of the page that they follow."""
        return MappingProxyType(self._slot_of)

    def __contains__(self, digest: bytes) -> bool:
        """Return True if there is a checkpoint after the page of this digest."""
        return digest in self._slot_of

    def take(self, seq: Sequence, digest: bytes | None = None) -> None:
        """Give a sequence that begins to run a slot, or the checkpoint after the page of `digest` and a next slot."""
        if self.num_slots and digest is None:
            seq.state_slot = self._free.pop()
        elif self.num_slots and digest:
            seq.state_slot = self._slot_of[digest]
            self._slot_of.move_to_end(digest)
            self._num_readers[seq.state_slot] += 1
            self.prepare(seq)

    def prepare(self, seq: Sequence, *, keep: bool = False) -> bool:
        """Give a next slot to a sequence whose slot must not be written: a checkpoint, or any with `keep`.

        Return False if it has to wait for the spare one.
        """
        is_read = seq.state_slot in self._num_readers
        if not self.num_slots or seq.next_state_slot or not (keep or is_read):
            return True
        if not is_read:
            if self._spare_owner not in (None, seq):
                return False
            self._spare_owner = seq
        seq.next_state_slot = self._free.pop()
        return True

    def freeze(self, seq: Sequence) -> bool:
        """Protect the sequence's slot from later writes. Return False without room for a checkpoint."""
        if seq.state_slot in self._num_readers:
            return True
        if not self._has_room():
            return False
        self._num_readers[seq.state_slot] = 1
        return True

    def reserve_split(self, seq: Sequence) -> bool:
        """Give a slot to the state in the middle of the next chunk. Return False without room for one."""
        if not seq.split_slot and self._has_room():
            seq.split_slot = self._free.pop()
            self._num_readers[seq.split_slot] = 1
        return seq.split_slot > 0

    def publish(self, seq: Sequence, digest: bytes, *, is_final: bool) -> bool:
        """Make the sequence's slot the checkpoint of `digest`, if it has none and there is room. Return True if so.

        The slot is frozen for that, unless a step that was launched may still write it, so that it is not `is_final`.
        """
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return False
        is_frozen = self.freeze(seq) if is_final else seq.state_slot in self._num_readers
        return is_frozen and self._name(seq.state_slot, digest)

    def publish_split(self, seq: Sequence, digest: bytes | None) -> None:
        """Make the state in the middle of a committed chunk the checkpoint of `digest`, unless it has one already."""
        if digest and digest not in self._slot_of:
            self._name(seq.split_slot, digest)
        self._drop(seq.split_slot)
        seq.split_slot = 0

    def commit(self, entry: ScheduledSequence) -> None:
        """Replace the sequence's slot by the one that these rows write, once."""
        seq = entry.seq
        if entry.next_slot and entry.next_slot == seq.next_state_slot:
            self._drop(seq.state_slot)
            seq.state_slot, seq.next_state_slot = seq.next_state_slot, 0
            self._give_spare_back(seq)

    def release(self, seq: Sequence) -> None:
        """Release all slots of a sequence."""
        for slot in _slots_of(seq):
            self._drop(slot)
        seq.state_slot = seq.next_state_slot = seq.split_slot = 0
        self._give_spare_back(seq)

    def forget(self, digest: bytes) -> None:
        """Drop the checkpoint after the page of `digest`, if any."""
        if slot := self._slot_of.pop(digest, 0):
            del self._digest_of[slot]
            self._free_unread(slot)

    def flush(self) -> None:
        """Drop all checkpoints. Sequences go on with the slots that they read."""
        for digest in list(self._slot_of):
            self.forget(digest)

    def check(self, running: Collection[Sequence], cached: Mapping[bytes, int]) -> None:
        """Assert that every slot is free, owned by one of the `running` sequences, or protected for its readers.

        A checkpoint is one of the latter, and follows a page that is `cached`.
        """
        held = Counter(slot for seq in running for slot in _slots_of(seq))
        free = Counter(self._free)
        for slot in range(1, self.num_slots + self.num_checkpoints + 1):
            is_used = slot in self._num_readers or held[slot] > 0
            assert free[slot] == (not is_used), f"slot {slot}, of {held[slot]} sequences, is {free[slot]} times free"
            if slot in self._num_readers:
                readers = self._num_readers[slot]
                assert readers == held[slot], f"slot {slot} has {held[slot]} readers, but {readers} are counted"
                assert readers or slot in self._digest_of, f"slot {slot} is kept, but nothing reads or finds it"
            else:
                assert held[slot] < 2, f"slot {slot}, which steps write, has {held[slot]} owners"
        assert set(held) | set(free) <= set(range(1, self.num_slots + self.num_checkpoints + 1)), "slots do not exist"
        assert len(self._num_readers) <= self.num_checkpoints, f"{len(self._num_readers)} checkpoints are too many"
        for digest, slot in self._slot_of.items():
            assert self._digest_of.get(slot) == digest, f"slot {slot} is found by a digest that is not its own"
            assert slot in self._num_readers, f"steps may write slot {slot}, which is a checkpoint"
            assert digest in cached, f"slot {slot} is the checkpoint of a page that is no longer cached"
        assert len(self._digest_of) == len(self._slot_of), "a checkpoint has a digest that does not find it"
        spare_owner = self._spare_owner
        assert spare_owner is None or spare_owner in running, "a sequence that has ended holds the spare slot"
        assert spare_owner is None or spare_owner.next_state_slot, "a sequence holds the spare slot after its chunk"

    def _has_room(self) -> bool:
        """Return True if there may be another checkpoint, for which the least-recently-used one is evicted."""
        if len(self._num_readers) < self.num_checkpoints:
            return True
        for digest, slot in self._slot_of.items():
            if not self._num_readers[slot]:
                self.forget(digest)
                return True
        return False

    def _name(self, slot: int, digest: bytes) -> bool:
        if slot in self._digest_of:
            return False
        self._slot_of[digest], self._digest_of[slot] = slot, digest
        return True

    def _drop(self, slot: int) -> None:
        """Remove a sequence from its slot, and free the slot if nothing needs it."""
        if slot in self._num_readers:
            self._num_readers[slot] -= 1
        self._free_unread(slot)

    def _free_unread(self, slot: int) -> None:
        """Free a slot that no sequence reads any more, unless it is a checkpoint."""
        if not self._num_readers.get(slot) and slot not in self._digest_of:
            self._num_readers.pop(slot, None)
            self._free.append(slot)

    def _give_spare_back(self, seq: Sequence) -> None:
        if self._spare_owner is seq:
            self._spare_owner = None


def _slots_of(seq: Sequence) -> Iterable[int]:
    return filter(None, (seq.split_slot, seq.next_state_slot, seq.state_slot))
