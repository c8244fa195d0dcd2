"""Ways to launch kernels, chosen once on a device by timing them, and kept for the next start.

No way is timed before its result was compared with the reference's on this device. A way that raises is left out too.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from app.engine.cache_folder import cache_folder

logger = logging.getLogger(__name__)

MAX_SECONDS = 10.0
"""Time for all questions. Those that are not reached keep their default, and are asked at the next start."""
TOLERANCE = 0.02
"""Largest error as a share of the largest value: 16-bit rounding is far below it, a wrong index far above."""
WORTH = 0.97
"""Another way is chosen if it takes less than this share of the default's time, because timings have noise."""
REPLAYS = 4
SOURCES = ("attention.py", "launch.py", "products.py", "prompts.py", "questions.py", "rows.py", "tune.py")

Way = tuple[int, ...]
Seconds = Callable[[Callable[[], object]], float]
"""Returns the seconds of one call on the device."""


class Question(NamedTuple):
    """A launch with several ways. `run` takes a way, None for the default, and returns what `reference` does.

    `timed` calls do the same on operands that no cache holds. `further` ways follow from the quickest of `ways`.
    """

    name: str
    ways: Sequence[Way]
    run: Callable[[Way | None], Tensor]
    reference: Callable[[], Tensor]
    timed: Callable[[Way | None], object]
    further: Callable[[Way], Sequence[Way]] = lambda way: ()

    def every(self, took: Mapping[Way, float]) -> Iterator[Way]:
        """Yield all ways in order, from the seconds that those before `took`."""
        yield from self.ways
        if took:
            yield from self.further(min(took, key=took.__getitem__))

    def may_be(self, way: Way | None) -> bool:
        """Return True if the way is one of them."""
        return way is None or any(way in (own, *self.further(own)) for own in map(tuple, self.ways))


Chosen = dict[str, Way | None]
"""Question -> way, None for the default."""


def choose(
    questions: Sequence[Question],
    seconds: Seconds,
    known: Mapping[str, Way | None],
    is_fatal: Callable[[BaseException], bool] = lambda error: False,
) -> Chosen:
    """Return the quickest right way of each question, asked in order until MAX_SECONDS are over.

    Answers that are `known` are taken as they are. A question that was broken off has no answer. Raises an error that
    `is_fatal`, because the device can do nothing after it.
    """
    begun, chosen = time.monotonic(), Chosen()
    for question in questions:
        if question.name in known and question.may_be(known[question.name]):
            chosen[question.name] = known[question.name]
            continue
        default, took = WORTH * seconds(partial(question.timed, None)), dict[Way, float]()
        expected = question.reference().float()
        for way in question.every(took):
            if time.monotonic() - begun > MAX_SECONDS:
                return chosen
            try:
                wrong = error_of(question.run(way), expected)
                taken = seconds(partial(question.timed, way)) if wrong < TOLERANCE else None
            except Exception as error:  # Triton has errors of its own, which are no RuntimeError
                if is_fatal(error):
                    error.add_note(f"{question.name}: {way} was tried; --tune off starts without timing such ways")
                    raise
                logger.debug("%s: %s is left out: %s", question.name, way, error)
                continue
            if taken is None:
                logger.warning(
                    "%s: %s is wrong on this device (error %.3g), and is left out", question.name, way, wrong
                )
            else:
                took[tuple(way)] = taken
        best = min(took, key=took.__getitem__, default=None)
        chosen[question.name] = None if best is None or took[best] >= default else best
    return chosen


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value; NaN counts as infinite."""
    error = float((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")


def kept(folder: Path, device_name: str) -> Path:
    """Return the file of a device's answers. It is for these libraries and these kernels alone."""
    import triton

    here = Path(__file__).parent
    parts = [device_name, torch.__version__, triton.__version__, *((here / name).read_text() for name in SOURCES)]
    return folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"


def load(file: Path) -> Chosen:
    """Return the answers of an earlier start, or none if they cannot be read."""
    try:
        read: Any = json.loads(file.read_text())
        return {str(name): None if way is None else tuple(map(int, way)) for name, way in read.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save(file: Path, chosen: Chosen) -> None:
    """Write the answers. A folder that cannot be written to costs the next start the same seconds."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(chosen, indent=1))
        part.replace(file)
    except OSError as error:
        logger.warning("ways of kernels were timed and cannot be kept: %s", error)


def seconds_in_a_graph(capture: Callable[[Callable[[], tuple[Tensor, ...]]], Any], run: Callable[[], object]) -> float:
    """Return seconds of `run` from a CUDA graph of it: the least of REPLAYS."""

    def whole() -> tuple[Tensor, ...]:
        run()
        return ()

    graph, taken = capture(whole), []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return min(taken)


def tune(
    questions: Sequence[Question],
    seconds: Seconds,
    device_name: str,
    folder: Path | None = None,
    is_fatal: Callable[[BaseException], bool] = lambda error: False,
) -> Chosen:
    """Return `choose`'s answers, from an earlier start where that kept them. A user without a home keeps none."""
    file = None
    with contextlib.suppress(RuntimeError):
        file = kept(folder or cache_folder("tuned"), device_name)
    known = load(file) if file else {}
    begun = time.monotonic()
    chosen = choose(questions, seconds, known, is_fatal)
    if file and any(name not in known for name in chosen):
        save(file, known | chosen)
    found = {name: way for name, way in chosen.items() if way is not None}
    logger.info(
        "kernels: %d of %d launches other than by default, in %.1f s, %d known before%s",
        len(found),
        len(questions),
        time.monotonic() - begun,
        sum(question.name in known for question in questions),
        "".join(f"; {name}: {way}" for name, way in found.items()),
    )
    return chosen
