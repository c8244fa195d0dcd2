"""The laboratory of a CPU runs the right ways, and its table has the right verdicts."""

import pytest
import torch

from app.engine.checkpoint.files import DEMO
from tools.bench.paired import Claim, Comparison
from tools.lab import cpu, in_process, loads

torch.set_num_threads(1)


@pytest.mark.exhaustive
def test_transformers_answers_as_many_tokens_as_the_engine():
    core = in_process.engine("plain", DEMO / "target", DEMO / "draft", max_num_seqs=1)
    requests = loads.requests("math", 2)
    theirs, counted = cpu.Transformers(DEMO / "target"), []
    generate = theirs._model.generate
    theirs._model.generate = lambda prompt, **kw: counted.append(generate(prompt, **kw)) or counted[-1]
    assert theirs.run(requests) > 0
    answers = [out[0, len(r.token_ids) :].tolist() for out, r in zip(counted, requests, strict=True)]
    assert list(core.run(requests).values()) == answers


@pytest.mark.parametrize(("speeds", "said"), [([300.0] * 6, "met"), ([200.0] * 6, "missed")])
def test_a_row_says_what_was_aimed_at_and_whether_it_was_reached(speeds, said):
    claims = [Claim("full", "plain", 2.5)]
    rows = cpu.rows_of(4, Comparison({"plain": [100.0] * 6, "full": speeds}, claims))
    plain, full = rows
    assert plain["verdict"] == "-" == plain["as fast as"]
    assert full["verdict"] == said and "of plain, aim 2.5" in full["as fast as"] and full["tok/s"] == f"{speeds[0]:.0f}"
