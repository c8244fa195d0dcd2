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


@dataclass(frozen=True, slots=True)
class Options:
    """Device of a report, and the load of its engines: `model` has a name like "qwen3-8b", or is a config.json.

    `sections` are made in this order, or all if there are none.
    """

    device: str
    model: str = "qwen3-8b"
    concurrency: Sequence[int] = (1, 32)
    prompt: int = 512
    answer: int = 1024
    rounds: int = 3
    sections: Sequence[str] = ()
    seconds: int | None = None

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    @property
    def index(self) -> int:
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement of a section."""

    name: str
    run: Callable[[], Result]


def answer(part: Part) -> Result:
    """Return `{"name", "status", "seconds", "result"}`, with `error` if the part raised or met one. Raises nothing."""
    started = time.perf_counter()
    result: Result = {}
    try:
        result = part.run()
        status = "ok" if result.pop("passed", True) else "failed"
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
