"""A hybrid pair's shape and requests to it, and the launches of one recurrent layer, on device "npu:0"."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from app.engine.device.recurrent import GatedDeltaStep
from app.messages import Request, SamplingParams
from tests.devices.npu.engines import LUCKY
from tests.devices.npu.null_device import Trace, traced
from tests.fast.engine.delta_layers import SMALL, Layer

Verify = Callable[[GatedDeltaStep], Tensor]
SHAPE: dict[str, Any] = LUCKY | {"seed": 22, "taps": (0, 1), "draft_layers": 1}
SIZES: dict[str, Any] = {"max_graphs": 2, "max_model_len": 256}


def requests() -> list[Request]:
    """Prompts of one and of several chunks, of which the last continues the one before it from the prefix cache."""
    long = tuple(i * i % 5 for i in range(150))
    prompts = [(1, 2, 3, 4), (0, 1) * 3, long, (*long, 3, 1)]
    return [
        Request(f"r{i}", prompt, sampling=SamplingParams(temperature=0.7 * (i == 1), seed=i), max_tokens=16)
        for i, prompt in enumerate(prompts)
    ]


def launches_of(verify: Verify, rows: int, block: int, **sizes: Any) -> list[Trace]:
    """Return traces of the first layer of a decoding step of two sequences, and of another."""
    layer = Layer(SMALL, verify, torch.bfloat16, device=torch.device("npu:0"), block=block, **sizes)
    traces: list[Trace] = []

    def run(step: GatedDeltaStep) -> Tensor:
        memory = replace(step.memory, of_layers=step.memory.num_tokens[None])
        step = step._replace(memory=memory, shared={})
        for _ in ("the first layer", "another"):
            with traced() as trace:
                o = verify(step)
            traces.append(trace)
        return o

    layer.run = run
    for start in (0, 1):
        layer.found(layer.rows(2 * rows), [1, 2], [start, start], [rows, rows])
    of_step = traces[2:]  # the first call makes what depends on shapes alone
    assert all(trace.waits == [] and trace.of("copy") == [] for trace in of_step)
    return of_step
