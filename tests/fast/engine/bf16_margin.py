"""What bfloat16 may change in a text: as much as other operators do, which a timing may choose by rows."""

from typing import Any

import pytest
import torch

from app.engine.cpu import linear
from tests.fast.engine.feeder import Feeder
from tests.fast.engine.lossless import Difference, Run, Subject, make_engine, run_engine


def measured(subject: Subject, monkeypatch: pytest.MonkeyPatch, chunk: int | None, **sizes: Any) -> float:
    """How much logits differ between our operators and PyTorch's, which read a prompt in chunks."""

    def logits(chunk: int | None) -> torch.Tensor:
        feeders = [(Feeder(make_engine(subject.target, None, **sizes)), prompt) for prompt in subject.prompts[:3]]
        return torch.cat([feeder.logits(feeder.feed_whole(prompt.token_ids, chunk)) for feeder, prompt in feeders])

    alone = logits(1)
    with monkeypatch.context() as without:
        without.setattr(linear, "operator_for", lambda dtype: None)
        return float((alone - logits(chunk)).abs().max())


def drafted(subject: Subject, case: Any, num_seqs: tuple[int, ...], **sizes: Any) -> tuple[list[Run], list[Difference]]:
    """Runs with drafts, and where they differ from plain decoding of one sequence at a time."""
    plain = make_engine(subject.target, None, max_num_seqs=1, **sizes)
    subject.plain_texts[0.0, "plain"] = run_engine(plain, subject.requests(case)).texts
    engines = [make_engine(subject.target, subject.draft, max_num_seqs=seqs, **sizes) for seqs in num_seqs]
    runs = [run_engine(engine, subject.requests(case)) for engine in engines]
    return runs, [difference for run in runs for difference in subject.compare(run.texts, case).differences]
