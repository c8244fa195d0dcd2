"""The demo pair on "npu:0" and on the CPU: held-out prompts, engines, and what their runs are compared by."""

from typing import Any

from app import demo
from app.engine.core import EngineCore
from tools.lab.in_process import Run, run
from tools.report.engine import demo_engine, gap, requests

__all__ = ["Run", "engine", "gap", "prompts", "requests", "run"]


def engine(device: str, dtype: str = "float32", **config: Any) -> EngineCore:
    return demo_engine(device, dtype, **config).core


def prompts(count: int) -> list[tuple[int, ...]]:
    return demo.token_ids(count)
