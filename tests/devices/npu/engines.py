"""Engines on device "npu:0" and on the CPU, of tiny pairs, and requests to them."""

from collections.abc import Iterable
from typing import Any

import app.engine.load.engine as build
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.messages import Request
from tests import UNTIMED
from tests.devices.npu.null_device import traced
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.pairs import Pair

SIZES: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory": 8 << 20}
SMALL: dict[str, Any] = {"head_dim": 64, "num_layers": 3, "draft_layers": 1, "taps": (0, 1)}
"""A pair's shape that the operators take."""
LUCKY: dict[str, Any] = {"vocab_size": 5, "head_dim": 64, "tied": True, "own_head": True}
"""Five tokens, so that drafts are accepted now and then."""
HOST_PROCESSOR = {"aclnnSearchSorted", "aclnnCumprod", "aclnnRightShift", "aclnnLeftShift", "aclnnSort", "aclnnNonzero"}
"""Launched on the card's host processor, not on its cores (N32)."""


def engine(pair: Pair, device: str = "npu:0", dtype: str = "bfloat16", **config: Any) -> EngineCore:
    wishes = {"target": pair.target, "draft": pair.draft, "device": device, "dtype": dtype} | SIZES
    core = build.build_engine(EngineConfig(**UNTIMED | wishes | config)).core
    core.scheduler.pace = None  # a CPU takes the steps of the device that it is compared with
    return core


def waits_once_a_step(core: EngineCore, asked: Iterable[Request]) -> set[str]:
    """Return the kinds of steps that `asked` take. In each the host waits once, for its read, and the card's host
    processor has nothing to do."""
    for request in asked:
        core.add(request)
    kinds = set()
    while core.has_work:
        with traced() as trace:
            kinds.add(core.step().stats.kind)
        assert trace.waits == ["aclrtSynchronizeEvent"], "the one read of the step"
        assert not HOST_PROCESSOR.intersection(trace.launches)
    return kinds


def requests(max_tokens: int = 12, vocab_size: int = 97, **asked: Any) -> list[Request]:
    """Prompts of one and of several chunks. The third is drawn unless `asked` says how all are sampled."""
    prompts = [range(1, 12), range(30, 75), (5, 6, 5, 6, 5, 6), range(1, 90)]
    return [
        flat_request(
            f"r{i}",
            tuple(token % vocab_size for token in prompt),
            max_tokens,
            **{"seed": i, "temperature": 0.7 * (i == 2)} | asked,
        )
        for i, prompt in enumerate(prompts)
    ]
