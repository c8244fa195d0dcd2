"""The demo pair on "npu:0" and on the CPU: held-out prompts, engines, and what their runs are compared by."""

from functools import cache

from app import demo
from app.doctor.report.npu import demo_pair
from app.doctor.report.npu.demo_pair import Run, engine, run
from app.doctor.report.npu.part import Prompts
from app.engine.core import EngineCore
from app.messages import Request

__all__ = ["Run", "engine", "gap", "prompts", "requests", "run"]


def prompts(count: int) -> Prompts:
    return Prompts(demo.token_ids(count), frozenset(demo.stop_token_ids()))


def requests(count: int, *, greedy: bool = False, max_tokens: int = 48) -> list[Request]:
    """Unless `greedy`, every fourth request is drawn; every seventh is decoded plainly."""
    return demo_pair.requests(prompts(count), greedy=greedy, max_tokens=max_tokens)


def gap(prompt: tuple[int, ...], text: list[int], at: int, other: int) -> float:
    """How far the worse of two candidates for token `at`, the text's own and `other`, lies below the best: float32."""
    return demo_pair.gap(_judge(), prompt, text, at, other)


@cache
def _judge() -> EngineCore:
    return engine("cpu", max_num_seqs=1, max_num_batched_tokens=1024, max_model_len=1024)
