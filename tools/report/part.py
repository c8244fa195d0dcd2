"""What a report is asked for, and its parts: a name, and a function that returns numbers or raises.

Imports no torch.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.npu.error_codes import explain

Result = dict[str, Any]
"""JSON of one part. `cases` are rows of a table, and `found` is a sentence for the summary.

`passed` False means that the part has failed. With `error` the state of the device may be unknown."""


REAL_PAIR = "real pair"
MODELS = ("qwen3.8-27b-fp8", "qwen3-8b", "qwen3-8b-fp8", REAL_PAIR, "qwen3-30b-a3b-fp8", "gpt-oss-20b")
"""Models whose speeds are measured, those first that should not lack where time is short."""


@dataclass(frozen=True, slots=True)
class Options:
    """Device of a report, and the load of its engines: each of `models` has a name like "qwen3-8b", or is a
    config.json, or REAL_PAIR if `real_pair` names its target and draft.

    `sections` are made in this order, or all if there are none. On an NPU the real pair answers questions of `dataset`.
    """

    device: str
    models: Sequence[str] = MODELS
    real_pair: Sequence[str] = ()
    concurrency: Sequence[int] = (1, 8, 32)
    prompt: int = 512
    answer: int = 256
    rounds: int = 1
    sections: Sequence[str] = ()
    seconds: int | None = None
    dataset: str = "demo:math"

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def index(self) -> int:
        return int(self.device.partition(":")[2] or 0)


class NotTriedError(Exception):
    """Raised by a part that this host or these options leave without an answer. The message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement of a section."""

    name: str
    run: Callable[[], Result]


def answer(part: Part) -> Result:
    """Return `{"name", "status", "seconds", "result"}`, with `error` if the part raised or met one. Raises nothing.

    `status` is ok, failed or "not tried".
    """
    started = time.perf_counter()
    result: Result = {}
    try:
        result = part.run()
        status = "ok" if result.pop("passed", True) else "failed"
    except NotTriedError as reason:
        result, status = {"found": str(reason)}, "not tried"
    except Exception as error:
        result, status = {"error": describe(error)}, "failed"
    met = {"error": result.pop("error")} if "error" in result else {}
    seconds = time.perf_counter() - started
    answered: Result = rounded({"name": part.name, "status": status, "seconds": seconds, "result": result} | met)
    return answered


def describe(error: BaseException) -> Result:
    says = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return {"says": says, "meaning": explain(str(error)), "traceback": "".join(traceback.format_exception(error))}


def rounded(value: Any) -> Any:
    """Return `value` with every number cut to four digits, so that the page shows what the JSON holds."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
