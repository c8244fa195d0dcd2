"""Prompts go through our attention too: whole ones, chunks behind others, with windows and sinks, in whatever type."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.cuda import backend as cuda
from app.engine.cuda.attention import TILE_ROWS
from app.engine.cuda.backend import CudaBackend
from tests.devices.cuda.engines import DENSE, engine, use_kernels
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.paged import Paged
from tests.fast.engine.pairs import GPT_OSS, make_pair

torch.set_num_threads(1)

LENGTHS = {
    "whole prompts": ([40, 17], [40, 17]),
    "a chunk behind others, beside a whole prompt": ([33, 20], [90, 20]),
    "one long chunk": ([35], [120]),
}


@pytest.mark.parametrize("window", [None, 9, 64])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_prompts_are_a_softmax_over_each_sequences_own_tokens(lengths: Any, window: int | None) -> None:
    """Other slots hold NaN. Both ways a row sees as far ahead as behind."""
    for more in ({}, {"causal": False}, {"sinks": torch.tensor([-30.0, 0.5, 2.0, 4.0])}):
        case = Paged(*lengths, window=window, garbage=math.nan, **more)
        torch.testing.assert_close(
            case.run(CudaBackend(torch.device("cpu"))).double(), case.expected, atol=2e-6, rtol=2e-6
        )


@pytest.mark.parametrize("window", [None, 40])
def test_so_they_are_with_gpt_oss_heads_and_sinks_behind_a_context(window: int | None) -> None:
    """Eight query heads of 64 share a KV head. In bfloat16 two roundings are allowed."""
    noise = torch.Generator().manual_seed(4)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        case = Paged(
            [33, 1, 20],
            [90, 70, 20],
            heads=8,
            kv_heads=1,
            dim=64,
            window=window,
            sinks=4 * torch.randn(8, generator=noise),
            dtype=dtype,
            garbage=math.nan,
        )
        found = case.run(CudaBackend(torch.device("cpu"))).double()
        torch.testing.assert_close(found, case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sinks", [False, True])
def test_texts_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    """Prompts of 40 and 30 tokens are read in chunks, one after another, with drafts."""
    more: dict[str, Any] = GPT_OSS | {"experts": 2, "experts_per_tok": 1} if sinks else {}
    pair, sizes = make_pair(tmp_path, **DENSE | more), {"page_size": 4, "max_num_batched_tokens": 24}
    asked = [flat_request(f"r{i}", tuple(j * j % 3 for j in range(40 - 10 * i)), max_tokens=6) for i in range(2)]
    expected = run_engine(engine(pair, draft=False, **sizes), asked).texts
    use_kernels(monkeypatch)
    used: list[int] = []
    own = cuda.paged_attention
    monkeypatch.setattr(cuda, "paged_attention", lambda q, *rest: used.append(len(q)) or own(q, *rest))
    run = run_engine(engine(pair, **sizes), asked)
    assert run.texts == expected and max(used) > TILE_ROWS
