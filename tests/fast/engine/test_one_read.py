"""A step reads the device once: `launch` never waits for a value, and `read` is one copy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.engine.load.engine import build_engine
from app.messages import Request, SamplingParams
from tests import UNTIMED
from tests.fast.engine.no_reads import NoReads
from tests.fast.engine.pairs import make_pair


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    pair = make_pair(tmp_path)
    return build_engine(
        EngineConfig(
            target=pair.target, draft=pair.draft, device="cpu", max_num_batched_tokens=64, max_num_seqs=8, **UNTIMED
        )
    ).core


def add_mixed_requests(core: Any) -> None:
    for i in range(5):
        prompt = tuple(range(1, 20 + 9 * i))
        core.add(
            Request(
                f"r{i}",
                prompt,
                sampling=SamplingParams(temperature=float(i % 2), seed=i),
                max_tokens=20,
                speculate=i != 3,
            )
        )


def test_launch_never_reads_a_value_back(engine: Any) -> None:
    add_mixed_requests(engine)
    kinds = set()
    while engine.has_work:
        batch = engine.scheduler.schedule()
        kinds.add(batch.kind)
        with NoReads():
            pending = engine.launch(batch)
        engine.scheduler.commit(batch, pending.read())
    assert kinds == {"prefill", "mixed", "decode"}


def test_a_step_is_one_download(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = engine.runner.backend
    downloads = []
    start = backend.start_download

    def counted(x: torch.Tensor) -> Any:
        downloads.append(x.shape)
        return start(x)

    monkeypatch.setattr(backend, "start_download", counted)
    add_mixed_requests(engine)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert len(downloads) == steps


def test_the_guard_sees_a_read() -> None:
    with pytest.raises(AssertionError, match="reads the device"), NoReads():
        torch.ones(1).item()
    with torch.inference_mode(), pytest.raises(AssertionError, match="reads the device"), NoReads():
        torch.ones(1).item()
