"""The steps whose context KV is pending, seen from outside."""

from typing import Any

import torch

from app.engine.dflash.context_kv import PendingContext


def pending_steps(pending: PendingContext) -> list[set[int]]:
    """Return the slots of each step whose context KV is pending, kept up to date."""
    steps: list[set[int]] = []
    add, write = pending.add, pending.write

    def noted_add(features: Any, positions: Any, slot_mapping: torch.Tensor, *rotation: Any) -> None:
        steps.append(set(slot_mapping.tolist()))
        add(features, positions, slot_mapping, *rotation)

    def noted_write() -> None:
        write()
        steps.clear()

    pending.add, pending.write = noted_add, noted_write  # type: ignore[method-assign]
    return steps
