"""What every section is made of: named parts that give numbers, or an error in words."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.engine.npu.error_codes import explain

Result = dict[str, Any]
"""JSON. `passed` False says that what was found is wrong; without it nothing is judged. With `error` the device may be
in no state for more, so the next part has a process of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    run: Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Held-out prompts of the demo pair as token ids, and the tokens that end an answer."""

    prompts: list[tuple[int, ...]]
    stop_token_ids: frozenset[int]


def answer(part: Part) -> Result:
    """`{"name", "status", "seconds", "result"}`, with `error` where the part raised or met one. Raises nothing."""
    started = time.perf_counter()
    result: Result = {}
    try:
        result = part.run()
        status = "ok" if result.pop("passed", True) else "failed"
    except Exception as error:
        result, status = {"error": describe(error)}, "failed"
    met = {"error": result.pop("error")} if "error" in result else {}
    seconds = rounded(time.perf_counter() - started)
    return {"name": part.name, "status": status, "seconds": seconds, "result": result} | met


def describe(error: BaseException) -> Result:
    says = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return {"says": says, "meaning": explain(str(error)), "traceback": "".join(traceback.format_exception(error))}


def rounded(x: float) -> float:
    """To four digits, so that the report shows what its JSON holds."""
    return float(f"{x:.4g}")


def milliseconds(seconds: float) -> float:
    return rounded(1e3 * seconds)
