"""Promises of a soak: every request ends with the right answer or a clear error, and nothing is left behind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from tests.soak.client import Outcome
from tests.soak.questions import Expected
from tests.soak.server import Footprint

API_GROWTH = 8 << 20
KV_POOL = 264 << 20
"""Bytes of KV that the soak's server gets: half of what 16 of the longest sequences need, so that some are preempted.
Pages are mapped as they are written for the first time, which takes a fast machine less time than a soak lasts."""
ENGINE_GROWTH = (64 << 20) + KV_POOL
"""Bytes of resident memory by which a process may grow between two quiet points. An engine that is new has not kept
memory for its widest steps yet, and has not written every page."""
BUG, LATE = "internal_error", "deadline_exceeded"
_ERROR_FIELDS = {"message", "type", "param", "code"}


@dataclass(frozen=True, slots=True)
class Window:
    """A time that excuses errors of requests that were under way in it: without an engine 5xx, in a burst 429."""

    cause: Literal["engine", "burst"]
    begins: float
    ends: float

    def met(self, outcome: Outcome) -> bool:
        return outcome.sent <= self.ends and outcome.ended >= self.begins


@dataclass(frozen=True, slots=True)
class QuietPoint:
    """Resources of both processes while no request is served. `engine_pid` identifies an engine."""

    after: str
    api: Footprint
    engine_pid: int
    engine: Footprint


def complaint(outcome: Outcome, expected: Mapping[str, Expected], windows: Sequence[Window]) -> str | None:
    """Return the fault of how a request ended, or None."""
    found = _wrong(outcome, expected.get(outcome.question.name), windows)
    lasted = outcome.ended - outcome.sent
    return found and f"{outcome.kind} {outcome.question.name!r}, status {outcome.status}, {lasted:.1f} s: {found}"


def _wrong(outcome: Outcome, expected: Expected | None, windows: Sequence[Window]) -> str | None:
    if outcome.broken is not None:
        return f"neither an answer nor an error: {outcome.broken}"
    if expected is not None and (wrong := _wrong_beginning(outcome, expected)):
        return wrong
    if outcome.left:
        return None
    if outcome.error is not None or outcome.status != 200:
        return _wrong_error(outcome, windows)
    if outcome.question.status != 200:
        return "bad input was taken"
    return None if expected is None else _wrong_end(outcome, expected)


def _wrong_beginning(outcome: Outcome, expected: Expected) -> str | None:
    for index, text in outcome.texts.items():
        if not expected.texts.get(index, "").startswith(text):
            return f"choice {index} is wrong {_where(text, expected.texts.get(index, ''))}"
    return None


def _where(text: str, alone: str) -> str:
    pairs = enumerate(zip(text, alone, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(text), len(alone)))
    around = slice(max(0, at - 20), at + 20)
    return f"at character {at}: {text[around]!r}, and alone {alone[around]!r}"


def _wrong_end(outcome: Outcome, expected: Expected) -> str | None:
    if outcome.streamed and not outcome.done:
        return "the stream ended without [DONE] and without an error"
    if outcome.texts.keys() != expected.texts.keys():
        return f"choices {sorted(outcome.texts)}, and alone {sorted(expected.texts)}"
    for index, text in outcome.texts.items():
        if text != expected.texts[index]:
            return f"choice {index} is cut short {_where(text, expected.texts[index])}"
    if outcome.reasons != expected.reasons:
        return f"finish_reason {outcome.reasons}, and alone {expected.reasons}"
    if outcome.tokens != expected.tokens:
        return f"{outcome.tokens} tokens, and alone {expected.tokens}"
    return None


def _wrong_error(outcome: Outcome, windows: Sequence[Window]) -> str | None:
    error: Any = outcome.error
    if not isinstance(error, dict) or set(error) != _ERROR_FIELDS or not error["message"]:
        return f"this is no error in OpenAI's shape: {error!r}"
    causes = {window.cause for window in windows if window.met(outcome)}
    if outcome.done:
        return f"[DONE] after an error: {error['message']}"
    if outcome.status == outcome.question.status != 200:
        return None
    if error["code"] == LATE:
        early = outcome.deadline is None or outcome.ended - outcome.sent < outcome.deadline
        return f"ended before its deadline, {outcome.deadline} s" if early else None
    if outcome.status in (429, 503) and not outcome.retry_after:
        return f"no Retry-After: {error['message']}"
    if outcome.status == 429:
        return None if "burst" in causes else f"refused outside of a burst: {error['message']}"
    if outcome.status in (200, 500, 503) and error["code"] != BUG:
        return None if "engine" in causes else f"an error while the engine was well: {error['message']}"
    return f"an error that nothing excuses: {error}"


def leaks(points: Sequence[QuietPoint]) -> Iterator[str]:
    """Return what grew from the first point to the last, in the API process and in each engine."""
    if not points:
        return
    yield from _grown("the API process", [(point.after, point.api) for point in points], API_GROWTH)
    for pid, of_one in groupby(points, key=lambda point: point.engine_pid):
        yield from _grown(f"engine {pid}", [(point.after, point.engine) for point in of_one], ENGINE_GROWTH)


def _grown(who: str, prints: Sequence[tuple[str, Footprint]], allowed: int) -> Iterator[str]:
    (since, first), (until, last) = prints[0], prints[-1]
    if last.memory - first.memory > allowed:
        grown = (last.memory - first.memory) / 2**20
        yield f"{who} grew by {grown:.1f} MiB from {since!r} to {until!r}; {allowed >> 20} MiB are allowed"
    if last.descriptors > first.descriptors:
        yield f"{who} has {last.descriptors} descriptors after {until!r}, and had {first.descriptors} after {since!r}"
