"""A fault of one sequence on any device. This imports as little as an environment for NPUs has."""

import math

import torch

from app.engine.core import EngineCore
from app.messages import Request, SamplingParams


def check_that_nan_ends_one_alone(core: EngineCore, temperature: float) -> Request:
    """NaN in the KV of one of two sequences ends it, and no other text changes. Returns a request that came later."""
    sampling = SamplingParams(temperature, seed=3)
    good, late = (Request(name, tuple(range(3)) * 3, 12, sampling) for name in ("good", "late"))
    bad = Request("bad", (1, 2, 3), 12, SamplingParams(temperature, seed=4))
    said = core.run([good])["good"]
    for request in (good, bad):
        core.add(request)
    core.step()
    (seq,) = (seq for seq in core.scheduler.running if seq.request is bad)
    with torch.inference_mode():
        core.runner.pools[0].layers[0].k[seq.pages.tolist()] = math.nan
    core.add(late)
    tokens: dict[str, list[int]] = {"good": said[:1], "late": [], "bad": []}
    ended = {}
    while core.has_work:
        for delta in core.step().deltas:
            tokens[delta.request_id] += delta.token_ids
            ended[delta.request_id] = delta.finish_reason
    assert ended == {"good": "length", "bad": "error", "late": "length"}
    assert tokens["good"] == tokens["late"] == said
    return late
