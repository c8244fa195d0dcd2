"""Transformers' answers to the questions of the fast tests, which `make golden` writes and no fast test asks live.

Weights of random pairs come from torch's generator. Should a torch draw others, the digest says so.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tests import GOLDEN
from tests.fast.engine.lossless import Case, Subject

FILE = GOLDEN / "transformers.json"


def digest(folder: Path) -> str:
    """Return the digest of a random pair's target."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Rows:
    """The last rows of a text in the target."""

    logits: Tensor
    """[R, V]"""
    features: Tensor
    """[R, n_taps * H]"""


@dataclass(frozen=True)
class Golden:
    """Everything that the file holds."""

    weights: dict[str, str]
    lossless: dict[str, list[list[int]]]
    rows: dict[str, dict[str, list[list[float]]]]

    def texts(self, subject: Subject, case: Case) -> list[list[int]]:
        """Return the tokens that plain decoding gives each prompt of the fast tests' subject."""
        self._check(subject.name, subject.target)
        return self.lossless[str(case)]

    def last_rows(self, shape: str, folder: Path) -> Rows:
        """Return the last rows of the first text of a random checkpoint."""
        self._check(shape, folder)
        return Rows(**{name: torch.tensor(values) for name, values in self.rows[shape].items()})

    def _check(self, name: str, folder: Path) -> None:
        assert self.weights[name] == digest(folder), f"{name} has other weights than in {FILE.name}: run make golden"


@cache
def golden() -> Golden:
    return Golden(**json.loads(FILE.read_text(encoding="utf-8")))
