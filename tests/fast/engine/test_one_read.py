"""A step reads the device once: `launch` never waits for a value, and `read` is one copy."""

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.launch_log import Log
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.planted_faults import engine_of, overlapping

READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique"}
"""Operators that hand a value, or a size that depends on values, to the host: each would stall an accelerator."""


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise AssertionError(f"{func} reads the device inside launch")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [engine_of, overlapping])
def test_a_launch_reads_no_value_and_a_step_is_one_download(tmp_path, monkeypatch, make):
    core = make(make_pair(tmp_path), max_num_batched_tokens=64, max_num_seqs=8).core
    launch, start, downloads = core.launch, core.runner.backend.start_download, []

    def guarded(batch: Any) -> Any:
        with NoReads():
            return launch(batch)

    monkeypatch.setattr(core, "launch", guarded)
    monkeypatch.setattr(core.runner.backend, "start_download", lambda x: downloads.append(x.shape) or start(x))
    log = Log(core)
    for i in range(5):
        prompt, drawn = tuple(token % 40 for token in range(1, 20 + 9 * i)), i % 2
        core.add(flat_request(f"r{i}", prompt, 20 - 12 * drawn, temperature=float(drawn), seed=i, speculate=i != 3))
    while core.has_work:
        core.step()
    assert {batch.kind for batch in log.batches} == {"prefill", "mixed", "decode"}
    assert len(downloads) == len(log.batches) and bool(log.overlapped) == (make is overlapping)
