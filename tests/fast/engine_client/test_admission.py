"""Every request in flight is counted once, and forgotten when it has ended."""

import pytest

from app.engine_client.admission import Admission, Busy, ClientBusy

MAX_NUM_SEQS = 3
QUEUE = 1


def refused(admission: Admission, client_id: str, count: int) -> type[Busy] | None:
    """Return the kind of refusal of `count` more requests of this client."""
    try:
        admission.acquire(client_id, count, MAX_NUM_SEQS).close()
    except Busy as error:
        return type(error)
    return None


def test_every_permit_counts_until_its_request_has_ended_or_it_is_not_wanted() -> None:
    admission = Admission(QUEUE, max_per_client=3)

    def refusals(*asked: tuple[str, int]) -> list[type[Busy] | None]:
        return [refused(admission, client_id, count) for client_id, count in asked]

    for _ in range(3):  # Each round begins with every permit free.
        permits = admission.acquire("a", 3, MAX_NUM_SEQS)
        assert refusals(("a", 1), ("b", 1), ("b", 2)) == [ClientBusy, None, Busy]
        permits.use()
        permits.use()
        permits.close()
        permits.close()
        assert refusals(("a", 1), ("a", 2), ("b", 3)) == [None, ClientBusy, Busy]
        permits.release()
        permits.release()
        assert refusals(("a", 3), ("a", 4), ("b", 3)) == [None, ClientBusy, None]


def test_a_refused_client_takes_no_permit() -> None:
    admission = Admission(QUEUE, max_per_client=3)
    for client_id, count, error in (("a", 4, ClientBusy), ("b", 3, Busy)):
        with admission.acquire("c", 2, MAX_NUM_SEQS):
            for _ in range(3):
                with pytest.raises(error):
                    admission.acquire(client_id, count, MAX_NUM_SEQS)
        assert refused(admission, client_id, 3) is None


@pytest.mark.parametrize("max_per_client", [3, None])
def test_a_client_that_has_left_costs_no_memory(max_per_client: int | None) -> None:
    admission = Admission(QUEUE, max_per_client)
    for number in range(100):
        refused(admission, f"never let in {number}", 4)
        with admission.acquire(f"client {number}", 2, MAX_NUM_SEQS) as permits:
            permits.use()
        permits.release()
    assert not admission.num_by_client and admission.num_in_flight == 0


def test_work_outside_of_the_engine_counts_for_its_client_only() -> None:
    admission = Admission(QUEUE, max_per_client=1)
    with admission.acquire_of_client("a"):
        assert admission.num_in_flight == 0
        with pytest.raises(ClientBusy):
            admission.acquire_of_client("a")
        assert refused(admission, "a", 1) is ClientBusy
        assert refused(admission, "b", 1) is None
    assert not admission.num_by_client and admission.num_in_flight == 0


def test_without_a_bound_on_one_client_it_may_have_all() -> None:
    admission = Admission(QUEUE)
    admission.acquire("a", MAX_NUM_SEQS + QUEUE, MAX_NUM_SEQS)
    assert refused(admission, "a", 1) is Busy
