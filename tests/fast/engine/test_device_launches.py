"""A decode step is a few graphs, and copies, on a device that reads lengths itself (device_lengths.py)."""

from collections import Counter
from dataclasses import replace

import pytest

from app.engine.sampling.metadata import kind_of
from app.engine.schedule.batch import Batch
from app.engine.step.runner import PendingStep
from app.messages import SamplingParams
from tests.fast.engine import planted_faults
from tests.fast.engine.device_lengths import SharedMemoryGraph, device_lengths
from tests.fast.engine.op_count import Launches
from tests.fast.engine.pairs import make_pair

COPIES = {"aten.copy_", "aten.clone"}
"""Up, and in the double down."""


GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.8, "top_k": 4}


@pytest.mark.parametrize(
    ("verify", "sampling"),
    [
        (8, [DRAWN]),
        *(pytest.param(verify, [GREEDY], marks=pytest.mark.exhaustive) for verify in (8, 3, 1)),
        pytest.param(3, [GREEDY, DRAWN], marks=pytest.mark.exhaustive),
        pytest.param(1, [GREEDY, DRAWN, {"frequency_penalty": 0.3}], marks=pytest.mark.exhaustive),
    ],
)
def test_a_decode_step_replays_a_graph_for_each_forward_and_kind_of_draw_and_copies(
    tmp_path, monkeypatch, verify, sampling
):
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
    for i, request in enumerate(planted_faults.requests(pair, 3)):
        core.add(replace(request, sampling=SamplingParams(seed=i, **sampling[i % len(sampling)])))
    drafting: list[bool] = []
    while core.has_work:
        launched.clear()
        inside.clear()
        with Launches("cpu") as counted:
            core.step()
        if any(batch.prefills for batch in launched):
            continue
        drafts = [batch.num_drafting > 0 for batch in launched]
        draws = [
            len({kind for entry in batch.decodes if (kind := kind_of(entry.seq.request.sampling, 1))})
            for batch in launched
        ]
        assert inside["replays"] == len(launched) + sum(drafts) + sum(draws)
        assert set(counted.operators - inside) <= COPIES
        drafting += drafts
    assert core.overlap and len(drafting) >= 10 and any(drafting) == (verify > 1)
