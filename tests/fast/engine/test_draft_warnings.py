"""What the log says of a draft that will do badly, or does."""

import logging

import pytest
import torch

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import DEMO, read_config
from app.engine.dflash.report import WINDOW, AcceptanceWarning, log_draft
from app.messages import SpecStep, TokenDelta


def steps(count: int, accepted: int) -> list[TokenDelta]:
    """Return a step of a batch with `count` sequences of 10 drafts."""
    return [TokenDelta(str(n), [7] * (accepted + 1), [SpecStep(accepted + 1, 10, accepted)]) for n in range(count)]


def test_a_draft_that_does_badly_is_warned_of_once_with_the_causes_in_order(caplog: pytest.LogCaptureFixture) -> None:
    acceptance = AcceptanceWarning()
    acceptance.add(steps(WINDOW // 10 - 1, 0))
    assert not caplog.records, "too few to judge"
    acceptance.add([*steps(1, 9), TokenDelta("plain", [7], [SpecStep(1, 0, 0)])])
    (line,) = caplog.messages
    assert line.startswith(f"draft: 0.5 % of {WINDOW} draft tokens were accepted")
    causes = ("another revision", "thinking", "quantised", "float16", "taps", "random tokens")
    assert sorted(causes, key=line.index) == list(causes)
    acceptance.add(steps(WINDOW, 0))
    assert len(caplog.records) == 1


def test_drafts_are_judged_in_windows_so_that_a_good_beginning_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    acceptance = AcceptanceWarning()
    for _ in range(20):
        acceptance.add(steps(WINDOW // 10, 1))
    assert not caplog.records, "a tenth is not less than a tenth"
    acceptance.add(steps(WINDOW // 10, 0))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("models--z-lab--Qwen3-8B-DFlash-b16/snapshots/1", "without thinking, so it is quickest with"),
        ("deepseek-ai/dflash_qwen3_14b_block7", "without thinking"),
        ("z-lab/Qwen3.5-27B-DFlash", "with thinking"),
        ("incoai/Qwen3.8-27B-DFlash2", "with thinking"),
        ("z-lab/Qwen3-Coder-30B-A3B-DFlash", ""),
        ("my/draft", ""),
    ],
)
def test_the_mode_that_a_known_draft_was_trained_for_is_said_at_startup(caplog, name: str, said: str) -> None:
    draft = draft_config(read_config(DEMO / "draft"), target_config(read_config(DEMO / "target")))
    with caplog.at_level(logging.INFO):
        log_draft(draft, torch.float32, 64, name)
    assert bool(caplog.messages) == bool(said) and said in caplog.text
