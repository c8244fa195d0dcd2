"""Steps with short prompt chunks run from the graphs of decode steps, and their texts are those of eager code."""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch_npu

from app.engine.core import EngineCore
from app.engine.schedule.batch import Batch
from app.engine.schedule.graph_sizes import CHUNK_ROWS
from app.engine.step.inputs import StepInputs
from app.messages import Request
from tests.costs import landing_ones
from tests.devices.npu.engines import LUCKY, SMALL, engine
from tests.devices.npu.null_device import Trace, traced
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair, make_pair

SEQS, BLOCK = 13, 16
GRAPH_ROWS = SEQS * BLOCK + 1
"""Rows of the only target graph: one is spare, and each sequence that is missing takes one."""
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": SEQS,
    "max_graphs": 2,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "kv_cache_memory": 14 * (PAGE_BYTES := 3 << 19),
    "verify": "full",
}
SAMPLED: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
    {"temperature": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"temperature": 0.8, "logit_bias": ((2, 1.5),)},
]


@dataclass
class Step:
    """A step, and what it did on the device."""

    batch: Batch
    tokens: dict[str, list[int]]
    drafts: list[list[int]]
    in_graph: bool
    trace: Trace

    @property
    def rows(self) -> int:
        return sum(entry.count for entry in self.batch.entries)

    @property
    def fits(self) -> bool:
        """True if all rows have a place in the graph, with one for each missing sequence and the spare one."""
        return self.rows + SEQS - len(self.batch.entries) + 1 <= GRAPH_ROWS


@dataclass
class Watched:
    """An engine whose steps are kept."""

    core: EngineCore
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._batches: list[Batch] = []
        self._drafts: list[torch.Tensor] = []
        self.inputs: list[StepInputs] = []
        scheduler, runner = self.core.scheduler, self.core.runner
        drafter = runner.graphs or runner.forward
        schedule, launch, draft = scheduler.schedule, runner.launch, drafter.draft

        def kept(to: list[Any], result: Any) -> Any:
            to.append(result)
            return result

        scheduler.schedule = lambda: kept(self._batches, schedule())  # type: ignore[method-assign]
        runner.launch = lambda inputs: launch(kept(self.inputs, inputs))  # type: ignore[method-assign]
        drafter.draft = lambda inputs: kept(self._drafts, draft(inputs))  # type: ignore[method-assign]

    def step(self) -> Step:
        self._drafts.clear()
        with traced() as trace:
            output = self.core.step()
        assert not any(delta.error for delta in output.deltas)
        batch, inputs = self._batches[-1], self.inputs[-1]
        drafts = [rows[: batch.block_rows - 1] for each in self._drafts for rows in each[: batch.num_drafting].tolist()]
        tokens = {delta.request_id: delta.token_ids for delta in output.deltas}
        self.steps.append(Step(batch, tokens, drafts, inputs.in_graph, trace))
        return self.steps[-1]

    def run(self, *requests: Request) -> list[Step]:
        """Run to the end, and return the steps."""
        for request in requests:
            self.core.add(request)
        while self.core.has_work:
            self.step()
        return self.steps


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, seed=11, block_size=BLOCK, num_kv_heads=4, **LUCKY)


def traffic(seed: int) -> list[tuple[int, Request, int]]:
    """Return (step of arrival, request, step of its abort): prompts of 1 to 460 tokens, some with a common start."""
    random, found, arrival = Random(seed), [], 0
    common = [random.randrange(5) for _ in range(300)]
    for i in range(24):
        arrival += random.choice([0, 0, 1, 1, 3, 20 * (i % 6 == 5)])
        own = [random.randrange(5) for _ in range(random.choice([1, 2, 7, 17, 40, 90, 150, 200]))]
        prompt = (common[: random.choice([130, 260])] if random.random() < 0.4 else []) + own
        most, gone = random.choice([1, 9, 25]), arrival + 2 if random.random() < 0.15 else 10**6
        asked = {"seed": i, "temperature": 0.0} | random.choice(SAMPLED)
        found.append((arrival, flat_request(f"r{i}", tuple(prompt), most, speculate=i % 7 != 6, **asked), gone))
    return found


def run(core: EngineCore, seed: int) -> list[Step]:
    """Return the steps of the traffic. Now and then the newest sequence is preempted."""
    watched, waiting = Watched(core), traffic(seed)
    while waiting or core.has_work:
        now = len(watched.steps)
        for _, request, _ in [each for each in waiting if each[0] <= now]:
            core.add(request)
        for _, request, gone in traffic(seed):
            if gone == now:
                core.abort(request.request_id)
        waiting = [each for each in waiting if each[0] > now]
        if now % 8 == 3 and core.scheduler.running:
            core.scheduler.preempt(core.scheduler.running[-1])
        if not core.has_work:
            waiting = [(now, request, gone) for _, request, gone in waiting]
            continue
        watched.step()
    return watched.steps


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("seed", landing_ones([0, 1, 2], (1,)))
def test_texts_and_drafts_of_any_traffic_are_those_of_eager_code(pair: Pair, seed: int) -> None:
    """Drafts are compared too, because a wrong context of a prompt would leave texts as they are."""
    fewer = SIZES | {"kv_cache_memory": 13 * PAGE_BYTES}  # padding needs a scratch page more
    eager, graphs = engine(pair, enforce_eager=True, **fewer), engine(pair, **SIZES)
    assert eager.scheduler.pool.num_free == graphs.scheduler.pool.num_free
    wanted, found = run(eager, seed), run(graphs, seed)
    for step, other in zip(wanted, found, strict=True):
        assert (step.tokens, step.drafts) == (other.tokens, other.drafts)
        assert not step.in_graph and other.in_graph == other.fits
    chunks = [step for step in found if step.batch.prefills and step.in_graph]
    assert {step.batch.kind for step in chunks} == {"mixed", "prefill"}
    entries = [entry for step in chunks for entry in step.batch.prefills]
    assert any(entry.start >= 128 for entry in entries), "after pages that the cache or a chunk had"
    assert max(entry.count for entry in entries) > 100 and min(entry.count for entry in entries) < 17
    assert any(step.batch.prefills and not step.in_graph for step in found), "and some do not fit"
    assert graphs.scheduler.num_preemptions and graphs.scheduler.prefix_cache_hits


@pytest.mark.usefixtures("in_float32")
def test_a_prompt_that_goes_on_has_rows_in_a_graph_and_no_result(pair: Pair) -> None:
    """It takes the last seat, because a chunk that is cut fills the step's budget, and the graph has no more rows."""
    sizes = SIZES | {"max_num_batched_tokens": GRAPH_ROWS - 1, "kv_cache_memory": 32 * PAGE_BYTES}
    runs = []
    for eager in (True, False):
        watched = Watched(engine(pair, enforce_eager=eager, **sizes))
        for i in range(SEQS - 1):
            asked = {"seed": i, "temperature": 0.8 * (i % 2)}
            watched.core.add(flat_request(f"r{i}", (1, 2, i % 5), 20, speculate=i == 3, **asked))
        watched.step()
        runs.append(watched.run(flat_request("long", (3, 1, 4, 1, 0) * 60, 20, temperature=0.8)))
    for step, other in zip(*runs, strict=True):
        assert (step.tokens, step.drafts) == (other.tokens, other.drafts)
    first = runs[1][1]
    (entry,) = first.batch.prefills
    assert first.in_graph and not entry.needs_logits and len(first.batch.decodes) == SEQS - 1
    assert "long" not in first.tokens and "long" in runs[1][2].tokens


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 3}], ids=str)
def test_a_step_with_at_most_192_rows_launches_graphs_and_nothing_else(pair: Pair, asked: dict[str, Any]) -> None:
    """Nothing waits but the one read, and there are as many updates as attention calls."""
    watched = Watched(engine(pair, **SIZES))
    layers, of_draft = (len(model.layers) for model in (_target(watched), _draft(watched)))
    for i, lengths in enumerate([(192,), (30, 100), (1,), (7, 64, 70)]):
        for j, length in enumerate(lengths):
            watched.core.add(flat_request(f"{i} {j}", (1, 2, 3, 4) * (length // 4) + (1,) * (length % 4), 60, **asked))
        step = watched.step()
        drafting, sampled = bool(step.batch.num_drafting), bool(asked)
        assert step.batch.prefills and step.in_graph and step.rows <= 192
        assert not step.trace.of("launch") and step.trace.waits == ["aclrtSynchronizeEvent"]
        assert len(step.trace.of("replay")) == 1 + drafting + sampled
        assert len(step.trace.of("update")) == layers + of_draft * drafting
        assert len(step.trace.of("copy")) == 2 + drafting + sampled
        for request_id in [entry.seq.request.request_id for entry in step.batch.entries][2:]:
            watched.core.abort(request_id)
    assert {step.batch.kind for step in watched.steps} == {"prefill", "mixed"}


@pytest.mark.usefixtures("numerics")
def test_workspaces_are_taken_for_rows_as_many_as_a_chunk_may_have(tmp_path: Path, monkeypatch: Any) -> None:
    """torch_npu asks the operator for the largest workspace, with the lengths that a capture is given (N42)."""
    name, asked = "_npu_fused_infer_attention_score_get_max_workspace", []
    ask = getattr(torch_npu, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append((kwargs["actual_seq_lengths"], kwargs["actual_seq_lengths_kv"], kwargs["block_table"].shape[1]))
        return ask(*args, **kwargs)

    monkeypatch.setattr(torch_npu, name, noted)
    pair = make_pair(tmp_path, **SMALL)
    graphs = engine(pair, draft=None).runner.layout.graphs
    assert graphs
    for seqs, rows in graphs.targets:
        own = [each for each in asked if each[0][-1] == rows and len(each[0]) == seqs + 1]
        assert len(own) == pair.num_layers
        longest_chunk = rows - graphs.spare - (seqs - 1)
        for ends, host_seq_lens, pages in own:
            assert max(end - start for start, end in pairwise([0, *ends])) == longest_chunk
            assert set(host_seq_lens) == {128 * pages}


def _target(watched: Watched) -> Any:
    return watched.core.runner.forward.target


def _draft(watched: Watched) -> Any:
    drafter = watched.core.runner.forward.drafter
    assert drafter
    return drafter.model


@pytest.mark.usefixtures("in_float32")
def test_a_chunk_that_does_not_fit_is_eager_and_so_is_one_past_the_limit(pair: Pair) -> None:
    (first, *_) = Watched(engine(pair, **SIZES)).run(flat_request("a", (1, 2) * 98 + (1,), 1))
    assert first.rows == 197 and not first.in_graph and first.trace.of("launch") and not first.trace.of("replay")
    wide = SIZES | {"max_num_seqs": 32, "max_num_batched_tokens": 640, "max_graphs": 2}
    watched = Watched(engine(pair, **wide))
    (first, *_) = watched.run(flat_request("a", (1, 2) * 60, 1))
    graphs = watched.core.runner.layout.graphs
    assert graphs and graphs.targets == [(32, 513)] and CHUNK_ROWS < 512
    assert not first.in_graph and first.trace.of("launch"), "its graph has far more rows than it"


@pytest.mark.usefixtures("numerics")
def test_a_recurrent_state_keeps_chunks_eager(tmp_path: Path) -> None:
    hybrid = make_hybrid_pair(tmp_path, block_size=8, **LUCKY | {"seed": 22, "taps": (0, 1), "draft_layers": 1})
    watched = Watched(engine(hybrid, max_graphs=2, max_model_len=256))
    watched.core.add(flat_request("a", (1, 2, 3, 4), 20))
    watched.step()
    steps = watched.run(flat_request("b", (4, 3, 2, 1), 20))
    assert {step.batch.kind for step in steps} == {"prefill", "mixed", "decode"}
    assert all(step.in_graph == (step.batch.kind == "decode") for step in steps)
    assert all(bool(step.trace.of("launch")) == bool(step.batch.prefills) for step in steps)


@pytest.mark.usefixtures("numerics")
def test_every_rule_holds_in_bfloat16_from_the_sizes_that_are_captured_by_default(tmp_path: Path) -> None:
    """Short prompts take the smallest graph that has room, and rows of padding are few."""
    pair = make_pair(tmp_path, **SMALL)
    watched = Watched(engine(pair))
    for i, length in enumerate((3, 7, 14, 29)):
        steps = watched.run(flat_request(f"r{i}", tuple(range(length)), 12))
        assert all(step.in_graph for step in steps)
    sizes = [len(inputs.target.token_ids) for inputs in watched.inputs]
    assert [sizes[0], max(sizes)] == [5, 33]
