"""A rank: one of the processes that share a model."""

from collections.abc import Callable
from typing import NamedTuple

from app.engine.comm.comm import ALONE, Comm
from app.engine.device.base import Backend
from app.engine.step.runner import Tell


class Rank(NamedTuple):
    """One of the processes that share a model. Rank 0 of several has `tell`, which sends its calls to the others."""

    comm: Comm = ALONE
    tell: Tell | None = None


Join = Callable[[Backend], Rank]
"""Function that returns this process's rank on its device, once the others have come."""


def alone(backend: Backend) -> Rank:
    return Rank()
