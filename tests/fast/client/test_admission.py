"""The door counts whoever is inside, once, and forgets whoever has left."""

import pytest

from app.client.admission import Busy, Door, OwnerBusy

MOST = 4


def refused(door: Door, owner: str, count: int) -> type[Busy] | None:
    """Why so many more of this owner may not come in."""
    try:
        door.check(owner, count, MOST)
    except Busy as error:
        return type(error)
    return None


def test_every_place_counts_until_its_request_has_ended_or_it_is_not_wanted() -> None:
    door = Door(max_of_one=3)
    for _ in range(3):  # Nothing is left over for the next round, and nothing is given back twice.
        places = door.enter("a", 3, MOST)
        assert (refused(door, "a", 1), refused(door, "b", 1), refused(door, "b", 2)) == (OwnerBusy, None, Busy)
        places.use()
        places.use()
        places.close()
        places.close()
        assert (refused(door, "a", 1), refused(door, "a", 2), refused(door, "b", 3)) == (None, OwnerBusy, Busy)
        places.leave()
        places.leave()
        assert (refused(door, "a", 3), refused(door, "a", 4), refused(door, "b", 3)) == (None, OwnerBusy, None)


def test_who_is_refused_takes_no_place() -> None:
    door = Door(max_of_one=3)
    for owner, count, error in (("a", 4, OwnerBusy), ("b", 3, Busy)):
        inside = door.enter("c", 2, MOST)
        for _ in range(3):
            with pytest.raises(error):
                door.enter(owner, count, MOST)
        inside.close()
        assert refused(door, owner, 3) is None


def test_a_client_that_has_left_costs_no_memory() -> None:
    door = Door(max_of_one=3)
    for number in range(100):
        refused(door, f"never let in {number}", 4)
        places = door.enter(f"client {number}", 2, MOST)
        places.use()
        places.close()
        places.leave()
    assert not door._of_one


def test_without_a_bound_on_one_client_it_may_have_all() -> None:
    door = Door()
    door.enter("a", MOST, MOST)
    assert refused(door, "a", 1) is Busy and not door._of_one
