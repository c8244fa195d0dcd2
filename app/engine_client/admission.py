"""Admission: limits on the requests in flight, in total and per client."""

from collections import Counter
from dataclasses import dataclass

# Four queued requests for each that runs keep a full queue's wait near four answers.
MAX_QUEUED_PER_RUNNING = 4
# One long step delays every acknowledgement, so that a small server too must accept a burst of aborts.
MIN_UNACKNOWLEDGED = 64


class Busy(Exception):
    """Refusal because too many requests are in flight. The argument is a sentence for the client."""


class ClientBusy(Busy):
    """Refusal because too many requests of this client are in flight."""


class Admission:
    """Count of the requests in flight, from before their prompts are made until the engine is done with them.

    Requests count for their client from their arrival, also those that only ask for tokens.

    `max_queue` requests may wait in addition to the `max_num_seqs` that an engine runs (None: four for each of these).
    `max_per_client` requests of one client, a key or an address, may be in flight (None: no bound).
    `num_unacknowledged` counts the aborts and flushes that were sent since the engine's last reply. An abort returns
    its permit at once, but its messages occupy the socket until the engine reads them.
    """

    def __init__(self, max_queue: int | None = None, max_per_client: int | None = None) -> None:
        self.num_in_flight = 0
        self.num_unacknowledged = 0
        self._max_queue = max_queue
        self._max_per_client = max_per_client
        self.num_by_client = Counter[str]()

    def max_at_once(self, max_num_seqs: int) -> int:
        """Return the number of permits that an idle server would give one client."""
        limit = self._limit(max_num_seqs)
        return limit if self._max_per_client is None else min(limit, self._max_per_client)

    def _limit(self, max_num_seqs: int) -> int:
        return max_num_seqs + (MAX_QUEUED_PER_RUNNING * max_num_seqs if self._max_queue is None else self._max_queue)

    def check(self, count: int, max_num_seqs: int) -> None:
        """Raise Busy if `count` more requests would be too many, whoever sends them."""
        limit = self._limit(max_num_seqs)
        if self.num_unacknowledged > max(limit, MIN_UNACKNOWLEDGED):
            cancelled = f"{self.num_unacknowledged} requests were cancelled"
            raise Busy(f"The engine has not answered since {cancelled}. Try again shortly.")
        if self.num_in_flight + count > limit:
            raise Busy(
                f"{self.num_in_flight} requests are in flight, and {count} more would exceed this server's limit of "
                f"{limit}. Try again shortly."
            )

    def acquire(self, client_id: str, count: int, max_num_seqs: int) -> "Permits":
        """Return permits for `count` requests, all or none. Raises ClientBusy or Busy. The caller closes them."""
        self._check_client(client_id, count)
        self.check(count, max_num_seqs)
        self.num_in_flight += count
        self.num_by_client[client_id] += count
        return Permits(self, client_id, count)

    def acquire_of_client(self, client_id: str) -> "Permits":
        """Return a permit that counts for its client only, for work outside of the engine. Raises ClientBusy."""
        self._check_client(client_id, 1)
        self.num_by_client[client_id] += 1
        return Permits(self, client_id, 1, in_total=False)

    def _check_client(self, client_id: str, count: int) -> None:
        num_of_client = self.num_by_client[client_id]
        if self._max_per_client is not None and num_of_client + count > self._max_per_client:
            raise ClientBusy(
                f"{num_of_client} of your requests are in flight, and {count} more would exceed the limit of "
                f"{self._max_per_client} per client. Try again when one has ended."
            )


@dataclass
class Permits:
    """Permits that were acquired together. A context manager, which returns the unused ones at its end.

    Without `in_total` they count for their client only.
    """

    _admission: Admission
    _client_id: str
    _num_unused: int
    in_total: bool = True

    def use(self) -> None:
        """Give one permit to a request, which returns it with `release` when it ends."""
        assert self._num_unused > 0
        self._num_unused -= 1

    def release(self, count: int = 1) -> None:
        """Return the permits of `count` requests."""
        self._admission.num_in_flight -= count * self.in_total
        self._admission.num_by_client[self._client_id] -= count
        if not self._admission.num_by_client[self._client_id]:
            del self._admission.num_by_client[self._client_id]

    def close(self) -> None:
        """Return the unused permits. Idempotent."""
        unused, self._num_unused = self._num_unused, 0
        self.release(unused)

    def __enter__(self) -> "Permits":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
