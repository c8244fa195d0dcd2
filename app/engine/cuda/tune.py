"""Variants of kernel launches, timed once on a device, compared with the default's result, and kept for later starts.

`timed_launches` lists what is timed.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_SECONDS = 10.0
"""Time after which a start asks no more questions. The others keep their default, and are asked at the next start."""
TOLERANCE = 0.02
"""Largest error as a share of the largest value: 16-bit rounding is far below it, a wrong index far above."""
WORTH = 0.97
"""A variant is chosen if it takes less than this share of the default's time, because timings have noise."""
REPLAYS = 4

Variant = tuple[int, ...]
Outputs = tuple[Tensor, ...]
Measure = Callable[[Callable[[], Outputs]], tuple[float, Outputs]]
"""Returns the seconds of a call on the device, and what the timed call left."""
Answers = dict[str, Variant | None]
"""Name of a question -> variant, None for the default."""


class Question(NamedTuple):
    """A launch with several variants. `run` takes one, None for the default, on operands that no cache holds.

    `use` is given the variant that is chosen, if it is not the default.
    """

    name: str
    variants: Sequence[Variant]
    run: Callable[[Any], Outputs]
    use: Callable[[Any], object]


def tune(
    questions: Sequence[Question],
    measure: Measure,
    device_name: str,
    folder: Path,
    is_fatal: Callable[[BaseException], bool] = lambda error: False,
) -> dict[str, str]:
    """Use the fastest right variant of each question, asked in order until MAX_SECONDS are over.

    Answers of earlier starts in `folder` are taken as they are. A question for which no time is left keeps its default.
    Raises an error that `is_fatal`, because the device can do nothing after it. Returns the variant of each question
    that has an answer, as people read it.
    """
    started, file = time.monotonic(), answers_file(folder, device_name)
    known = load(file)
    answers, chosen = dict(known), dict[str, Variant | None]()
    for question in questions:
        name = question.name
        if name not in known:
            if time.monotonic() - started > MAX_SECONDS:
                continue
            save(file, answers | {name: None})  # a variant that kills the process is not tried again
            answers[name] = _fastest(question, measure, is_fatal)
            save(file, answers)
        chosen[name] = next((variant for variant in question.variants if variant == answers[name]), None)
        if chosen[name] is not None:
            question.use(chosen[name])
    found = [f"{name}: {variant}" for name, variant in chosen.items() if variant is not None]
    share, seconds = f"{len(found)} of {len(questions)}", time.monotonic() - started
    logger.info("kernels: %s launches other than by default, in %.1f s%s", share, seconds, "; ".join(["", *found]))
    return {name: str(variant or "default") for name, variant in chosen.items()}


def _fastest(question: Question, measure: Measure, is_fatal: Callable[[BaseException], bool]) -> Variant | None:
    """Return the fastest right variant, or None if none is faster than the default."""
    default, expected = measure(partial(question.run, None))
    times: dict[Variant, float] = {}
    for variant in question.variants:
        try:
            seconds, found = measure(partial(question.run, variant))
            error = max(map(error_of, found, expected))
        except Exception as raised:  # Triton has errors of its own, which are no RuntimeError
            tried, next_start = f"{question.name}: {variant}", "the next start launches it by default"
            if is_fatal(raised):
                raised.add_note(f"{tried} was tried; {next_start}, and --tune off starts without timing")
                raise
            logger.warning("%s fails on this device and is left out: %r", tried, raised)
            continue
        if error < TOLERANCE:
            times[variant] = seconds
        else:
            logger.warning("%s: %s is wrong on this device and is left out: error %.3g", question.name, variant, error)
    best = min(times, key=times.__getitem__, default=None)
    return None if best is None or times[best] >= WORTH * default else best


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value; NaN counts as infinite."""
    wanted = expected.float()
    error = float((found.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")


def answers_file(folder: Path, device_name: str) -> Path:
    """Return the file of a device's answers. It is for these libraries and these kernels only."""
    sources = [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    key = chr(0).join([device_name, torch.__version__, triton.__version__, *sources])
    return folder / f"launches-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load(file: Path) -> Answers:
    """Return the answers of an earlier start, or none if they cannot be read."""
    try:
        read: Any = json.loads(file.read_text())
        return {str(name): None if variant is None else tuple(map(int, variant)) for name, variant in read.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def save(file: Path, answers: Answers) -> None:
    """Write the answers. A folder that cannot be written to costs the next start the same seconds."""
    try:
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(answers, indent=1))
        draft.replace(file)
    except OSError as error:
        logger.warning("timed launches cannot be saved to %s: %s", file, error)


def seconds_in_a_graph(capture: Callable[[Callable[[], Outputs]], Any], run: Callable[[], Outputs]) -> Any:
    """Return (seconds of `run` from a CUDA graph of it, the least of REPLAYS; copies of what the last replay left)."""
    graph, seconds = capture(run), []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return min(seconds), tuple(x.clone() for x in graph.outputs)
