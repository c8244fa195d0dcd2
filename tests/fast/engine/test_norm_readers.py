"""Who reads a norm is told to it, so that a device can quantise its rows for all of them, and for no other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import app.engine.load.engine as build
from app.engine.device.base import ExpertWeights, MoeConfig
from app.engine.device.torch import TorchBackend
from app.engine.quantised import Rows, Weight
from tests.fast.engine.dialects import as_dflash2, rewrite_draft
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import make_engine, run_engine
from tests.fast.engine.pairs import Pair, make_pair


class NotingBackend(TorchBackend):
    """Backend that holds the weights multiplied by a norm to those that the norm was told of."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.norms: list[tuple[Rows, Sequence[Weight], set[int]]] = []

    def norm_for(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, readers: Sequence[Weight]
    ) -> tuple[Rows, Tensor]:
        normed, total = super().norm_for(x, residual, weight, eps, readers)
        if readers:
            self.norms.append((normed, readers, set()))
        return normed, total

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
        self._note(x, weight)
        return super().linear(x, weight, bias)

    def moe(self, x: Rows, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        self._note(x, weights.router)
        self._note(x, weights.gate_up)
        return super().moe(x, weights, config)

    def _note(self, x: Rows, weight: Weight) -> None:
        for normed, readers, read in self.norms:
            if normed is x:
                read.add(next(i for i, reader in enumerate(readers) if reader is weight))


def with_convolutions(folder: Path) -> Pair:
    pair = make_pair(folder)
    rewrite_draft(pair, {}, as_dflash2)
    return pair


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "dense": make_pair,
    "experts": lambda folder: make_pair(folder, experts=4),
    "hybrid": make_hybrid_pair,
    "hybrid with experts": lambda folder: make_hybrid_pair(folder, experts=4),
    "DFlash2": with_convolutions,
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_reader_of_a_norm_is_told_to_it_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    backend, pair = NotingBackend(), PAIRS[name](tmp_path)
    monkeypatch.setattr(build, "make_backend", lambda *_, **__: backend)
    sizes: dict[str, Any] = {"page_size": 4, "max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
    run_engine(make_engine(pair.target, pair.draft, **sizes), [flat_request("r", (1, 2, 3), 4)])
    assert backend.norms and all(len(read) == len(readers) for _, readers, read in backend.norms)
