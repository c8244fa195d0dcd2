"""The file from which a stopped run goes on: parameters, optimizers, talks, and the settings that they belong to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.config.error import ConfigError
from tools.train_draft.loop import State
from tools.train_draft.talks import Talk

FILE = "training.pt"


def save(folder: Path, settings: Mapping[str, Any], state: State, tensors: Mapping[str, Any]) -> None:
    """Write the file in one go. `tensors` are state dicts by name. Raises ConfigError."""
    saved = {"settings": dict(settings), "step": state.step, "seconds": state.seconds, "written": state.written}
    saved |= {**tensors, "talks": _packed(state.talks), "held_out": _packed(state.held_out)}
    partial = folder / f"{FILE}.partial"
    try:
        torch.save(saved, partial)
        partial.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # the archive's writer raises the latter for a full disk
        hint = "free room on its disk, and give the same command again"
        raise ConfigError(f"{partial} cannot be written: {error}", hint) from None


def load(folder: Path, settings: Mapping[str, Any]) -> tuple[State, dict[str, Any]] | None:
    """Return the state of a run with these settings and its tensors, or None without the file. Raises ConfigError."""
    file = folder / FILE
    if not file.exists():
        return None
    try:
        saved = torch.load(file, weights_only=True, map_location="cpu")
        numbers = (saved.pop(name) for name in ("written", "step", "seconds"))
        state = State(_unpacked(saved.pop("held_out")), _unpacked(saved.pop("talks")), *numbers)
        before = saved.pop("settings")
    except Exception as error:  # of the archive or its contents
        raise ConfigError(f"{file} cannot be read: {error!r:.200}", "remove it to begin anew") from None
    for name, value in settings.items():
        if before.get(name) != value:
            given = f"{file} is of a run with {name} {before.get(name)}, and {value} is asked"
            raise ConfigError(given, "give the same settings to go on, or another --out")
    return state, saved


def _packed(talks: Sequence[Talk]) -> dict[str, Tensor]:
    ids = torch.tensor([token for talk in talks for token in talk.ids], dtype=torch.int32)
    own = torch.tensor([own for talk in talks for own in talk.own], dtype=torch.bool)
    return {"ids": ids, "own": own, "lengths": torch.tensor([len(talk.ids) for talk in talks], dtype=torch.int32)}


def _unpacked(packed: Mapping[str, Tensor]) -> list[Talk]:
    lengths = packed["lengths"].tolist()
    parts = zip(packed["ids"].split(lengths), packed["own"].split(lengths), strict=True)
    return [Talk(ids.tolist(), own.tolist()) for ids, own in parts]
