"""A decode step is a graph or two, and copies, on a device that reads lengths itself (device_lengths.py)."""

from collections import Counter

import pytest

from app.engine.schedule.batch import Batch
from app.engine.step.runner import PendingStep
from tests.fast.engine import planted_faults
from tests.fast.engine.device_lengths import SharedMemoryGraph, device_lengths
from tests.fast.engine.pairs import make_pair
from tools.lab.op_count import Launches

COPIES = {"aten.copy_", "aten.clone"}
"""Up, and in the double down."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("verify", [8, 3, 1])
def test_a_decode_step_replays_a_graph_for_each_forward_and_copies(tmp_path, monkeypatch, verify):
    pair = make_pair(tmp_path, seed=1, block_size=8)
    with device_lengths():
        core = planted_faults.engine_of(pair, enforce_eager=False, max_graphs=4, verify=verify).core
    launched: list[Batch] = []
    inside: Counter[str] = Counter()
    replay, launch = SharedMemoryGraph.replay, core.launch

    def replayed(graph: SharedMemoryGraph) -> None:
        before = counted.operators.copy()
        replay(graph)
        inside.update(counted.operators - before)
        inside["replays"] += 1

    def noted(batch: Batch) -> PendingStep:
        launched.append(batch)
        return launch(batch)

    monkeypatch.setattr(SharedMemoryGraph, "replay", replayed)
    monkeypatch.setattr(core, "launch", noted)
    for request in planted_faults.requests(pair, 3):
        core.add(request)
    drafting: list[bool] = []
    while core.has_work:
        launched.clear()
        inside.clear()
        with Launches("cpu") as counted:
            core.step()
        if any(batch.prefills for batch in launched):
            continue
        drafts = [batch.num_drafting > 0 for batch in launched]
        assert inside["replays"] == len(launched) + sum(drafts)
        assert set(counted.operators - inside) <= COPIES
        drafting += drafts
    assert core.overlap and len(drafting) >= 10 and any(drafting) == (verify > 1)
