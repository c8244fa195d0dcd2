"""A question to a host or its device, and its answer, as `dflash-server check` prints it. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

Status = Literal["ok", "warning", "failed", "not tried"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a probe in one line, and in `hint` what to do about a warning or a failure."""

    status: Status
    found: str
    hint: str = ""


ok, warning, failed = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "failed")


@dataclass(frozen=True, slots=True)
class Probe:
    """One question. It is not tried if a probe named in `needs` failed; `without` then says what is missing."""

    name: str
    ask: Callable[[], Finding]
    needs: tuple[str, ...] = ()
    without: str = ""
