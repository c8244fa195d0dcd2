"""Who may come in: a bound on all requests in flight, and one on those of a single client."""

from collections import Counter


class Busy(Exception):
    """As many requests are in flight as may be; the argument is a sentence for the client."""


class OwnerBusy(Busy):
    """As many requests of this client are in flight as may be of one."""


class Door:
    """Counts requests from before their prompts are made until the engine is done with them.

    Of one owner, a key or an address, at most `most_of_one` are inside; None is no bound.
    """

    def __init__(self, most_of_one: int | None = None) -> None:
        self._most_of_one = most_of_one
        self._inside = 0
        self._of_one = Counter[str]()

    def check(self, owner: str, count: int, most: int) -> None:
        """Raises OwnerBusy or Busy if `count` more requests of this owner would be too many; `most` may be inside."""
        if self._most_of_one is not None and self._of_one[owner] + count > self._most_of_one:
            raise OwnerBusy(
                f"{self._of_one[owner]} requests of yours are in flight, and {count} more would be above the "
                f"{self._most_of_one} that this server takes of one client at a time. Try again when one has ended."
            )
        if self._inside + count > most:
            raise Busy(
                f"{self._inside} requests are in flight, and {count} more would be above the {most} that this server "
                "takes. Try again shortly."
            )

    def enter(self, owner: str, count: int, most: int) -> "Places":
        """Places for `count` requests, all or none. Raises what `check` raises. The caller closes them."""
        self.check(owner, count, most)
        self._inside += count
        if self._most_of_one is not None:
            self._of_one[owner] += count
        return Places(self, owner, count)

    def leave(self, owner: str, count: int) -> None:
        self._inside -= count
        if self._most_of_one is not None:
            self._of_one[owner] -= count
            if not self._of_one[owner]:
                del self._of_one[owner]


class Places:
    """Places that were taken together. A request that got one leaves it at its end; `close` leaves the others."""

    def __init__(self, door: Door, owner: str, count: int) -> None:
        self._door = door
        self._owner = owner
        self._unused = count

    def use(self) -> None:
        """One of them is a request's now."""
        assert self._unused > 0
        self._unused -= 1

    def leave(self) -> None:
        """A request that got one has ended."""
        self._door.leave(self._owner, 1)

    def close(self) -> None:
        """No more requests come. Idempotent."""
        self._door.leave(self._owner, self._unused)
        self._unused = 0
