"""The demo pair on "npu:0" and on the CPU: held-out prompts, engines, and what their runs are compared by."""

from app import demo
from tools.report.engine import Run, gap, requests, run
from tools.report.engine import demo_engine as engine

__all__ = ["Run", "engine", "gap", "prompts", "requests", "run"]


def prompts(count: int) -> list[tuple[int, ...]]:
    return demo.token_ids(count)
