"""What a model of an H200 expects, and prototypes had, of figures of a report on a GPU. Imports no torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

MODEL, PROTOTYPE = "model", "prototype"
"""Computed from bytes, launches and rows; or measured on an H200 by a script with kernels like these."""


class Prediction(NamedTuple):
    """The value of a `figure` of a part of a report."""

    part: str
    figure: str
    value: float
    source: str = MODEL


_STEADY = "tok/s at the mean length"
SPEEDS = {
    "qwen3.8-27b-fp8": {
        "plain at 1": 110,
        "full blocks at 1": 461,
        "full blocks at 8": 3190,
        "full blocks at 32": 5620,
    },
    "qwen3-8b": {"plain at 1": 214, "plain at 32": 5315, "full blocks at 1": 1094},
    "qwen3-8b-fp8": {"full blocks at 1": 1445, "full blocks at 8": 10180},
    "qwen3-30b-a3b-fp8": {"plain at 1": 337, "full blocks at 1": 715},
    "gpt-oss-20b": {"plain at 1": 453, "full blocks at 1": 753},
}
"""Tokens per second of steps in which all requests decode."""
RATIOS = {
    "qwen3-8b": {1: 1.72, 16: 1.67, 32: 1.57, 64: 1.76, 128: 1.37, 256: 1.16, 512: 1.19},
    "qwen3.8-27b": {1: 1.81, 16: 1.80, 32: 1.57, 64: 1.92, 128: 1.27, 256: 1.02, 512: 0.99},
}
"""Rows -> time of a layer's products in 16 bits, over e4m3's. Above 64 rows K was not split."""
PREDICTIONS = [
    Prediction("qwen3.8-27b-fp8, prompts", "512 tokens, ms", 45),
    Prediction("qwen3.8-27b-fp8, prompts", "8192 tokens, ms", 650),
    *(Prediction(f"{model}, {way}", _STEADY, tokens) for model, ways in SPEEDS.items() for way, tokens in ways.items()),
    *(
        Prediction(f"products of {model} in e4m3", f"ratio at {rows}", ratio, PROTOTYPE)
        for model, ratios in RATIOS.items()
        for rows, ratio in ratios.items()
    ),
]


def rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each prediction, with what the report has measured of it."""
    results = {part["name"]: part["result"] for section in report["sections"].values() for part in section["parts"]}
    found = []
    for part, figure, value, source in PREDICTIONS:
        measured = results.get(part, {}).get(figure)
        row = {"figure": f"{part}: {figure}", "predicted": float(value), "by": source, "measured": measured}
        found.append(row | {"measured / predicted": measured and round(measured / value, 2)})
    return found
