"""A recurrent slot against a reference's memory."""

from typing import Any

import torch

from app.engine.device.gated_delta import advance
from app.engine.load.engine import Engine


def check_state(engine: Engine, slot: int, start: int, wanted: list[Any]) -> None:
    """Hold a slot, as a step that begins at `start` reads it, against a reference's memory after that many tokens."""
    target, pool = engine.core.runner.forward.target, engine.core.runner.pools[0]
    for number in target.config.gated_delta.layers:
        memory, layer = pool.layers[number], target.layers[number].attention
        state, pending, counts = memory.at(torch.tensor([slot]), torch.tensor([start]))
        assert int(memory.num_tokens[slot]) + int(counts) == start
        found = advance(layer.weights, pending, state, counts)[1]
        torch.testing.assert_close(found.matrix[0], wanted[number].matrix, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.conv[0], wanted[number].inputs, rtol=1e-3, atol=1e-4)
