"""`python -m tools.lab ranks` measures steps that a follower can read, and fails if they cost too much."""

import pytest

from app.engine.ranks.runner import decode
from tools.lab import ranks
from tools.lab.__main__ import main


@pytest.mark.parametrize(("limit", "code"), [(1e9, 0), (0.0, 1)])
def test_a_cost_above_the_limit_is_a_failure(limit: float, code: int, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "LIMIT_MS", limit)
    assert main(["ranks", "--sizes", "2", "--batches", "32", "--context", "64", "--steps", "2"]) == code
    printed = capsys.readouterr().out
    assert printed.count("| 2 | ") == len(ranks.STEPS) and ("MISSED" in printed) == bool(code)


def test_the_bytes_are_those_of_a_step():
    sent: list[bytes] = []
    step = ranks.step_of(3, ranks.BLOCK, ranks.SAMPLED, 64)
    _, num_bytes = ranks.cost(step, sent.append, 2)
    message = decode(sent[-1])
    assert (message.number, num_bytes) == (1, len(sent[0]))
    assert len(message.argument.target.token_ids) == 3 * ranks.BLOCK
