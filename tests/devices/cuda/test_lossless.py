"""Text with DFlash on == off == the CPU backend's, token for token and in fp32, with all our kernels in every step."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import app.engine.load.engine as build
from app.engine.cuda import attention, gated_delta, integers, rows
from app.engine.cuda.backend import CudaBackend
from app.engine.load.engine import Engine
from app.messages import Request, StepOutput
from tests.devices.cuda import engines
from tests.devices.cuda.engines import DENSE, GRAPHS, use_kernels
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import make_pair

HYBRID: dict[str, Any] = DENSE | {"seed": 11, "vocab_size": 5, "v_heads": 4, "k_heads": 2}
HYBRID |= {"layer_types": ("linear_attention", "full_attention")}
del HYBRID["num_layers"]
PAIRS = {
    "dense": partial(make_pair, **DENSE),
    "experts": partial(make_pair, **DENSE | {"seed": 19, "vocab_size": 5, "experts": 4}),
    "hybrid": partial(make_hybrid_pair, **HYBRID),
}
"""Random pairs, found by trying seeds, of whose drafts some are accepted in texts that wander."""
OFF, CHUNKS = {"draft": False}, {"page_size": 4, "max_num_batched_tokens": 16}
FEW_PAGES = {"page_size": 4, "max_model_len": 28, "block_size": 4, "kv_pages": 10}
CASES = [
    pytest.param("dense", OFF, marks=pytest.mark.slow),
    pytest.param("dense", {}, marks=pytest.mark.slow),
    ("dense", GRAPHS),
    pytest.param("dense", CHUNKS, marks=pytest.mark.slow),
    ("dense", FEW_PAGES),
    ("experts", {}),
    pytest.param("experts", GRAPHS, marks=pytest.mark.slow),
    pytest.param("hybrid", OFF, marks=pytest.mark.slow),
    pytest.param("hybrid", {}, marks=pytest.mark.slow),
    ("hybrid", GRAPHS),
    pytest.param("hybrid", CHUNKS, marks=pytest.mark.slow),
]
"""A pair, and what changes: steps of graphs are padded, and where pages are few a sequence is computed anew."""
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((1, 0.5),)},
}


class Subject:
    """A pair, and the CPU backend's texts of three requests by what is asked."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.pair, self.max_tokens = PAIRS[kind](folder), 11 if kind == "hybrid" else 9
        self.expected = {
            asked: run_engine(self.engine(draft=False), self.requests(asked, count=3)).texts for asked in ASKED
        }

    def requests(self, asked: str = "greedy", count: int = 2) -> list[Request]:
        return engines.requests(count, self.max_tokens, **ASKED[asked])

    def engine(self, draft: bool = True, **wishes: Any) -> Engine:
        return engines.engine(self.pair, draft, **wishes)


@pytest.fixture(scope="module", params=["dense"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def on_cuda(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


def of(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("subject", kinds, indirect=True, scope="module")


@pytest.mark.parametrize(("subject", "wishes"), CASES, indirect=["subject"], ids=str, scope="module")
def test_dflash_changes_no_token_on_our_kernels(subject: Subject, wishes: dict[str, Any]) -> None:
    run = run_engine(subject.engine(**wishes), subject.requests())
    assert run.texts == subject.expected["greedy"][:2]
    assert (run.acceptance_length > 1.2) == wishes.get("draft", True)
    assert (run.preemptions > 0) == ("kv_pages" in wishes)


def test_nor_one_that_is_drawn(subject: Subject) -> None:
    both = subject.requests("drawn")
    run = run_engine(subject.engine(), [both[0], replace(both[1], speculate=False)])
    assert run.texts == subject.expected["drawn"][:2] and run.verify_steps > 0


def test_nor_one_that_penalties_and_a_bias_decide(subject: Subject) -> None:
    greedy, penalised = (subject.expected[asked] for asked in ("greedy", "penalised"))
    run = run_engine(subject.engine(**GRAPHS), [subject.requests()[0], subject.requests("penalised")[1]])
    assert run.texts == [greedy[0], penalised[1]] and run.acceptance_length > 1.2
    assert penalised[1] != greedy[1]


@of("dense", "hybrid")
def test_nor_does_a_cached_prompt_change_one_or_lose_a_draft(subject: Subject) -> None:
    """With recurrent layers the step after a hit reads a checkpoint, which stays as it is for the next one."""
    cold = replace(subject.requests()[0], max_tokens=9)
    tokens_of_steps: dict[str, list[int]] = {"cold": [], "warm": [], "warm again": []}

    def note(step: StepOutput) -> None:
        for delta in step.deltas:
            tokens_of_steps[delta.request_id].append(len(delta.token_ids))

    asked, on_cuda = [replace(cold, request_id=name) for name in tokens_of_steps], subject.engine(page_size=4)
    texts = [on_cuda.core.run([request], note)[request.request_id] for request in asked]
    assert texts == [subject.expected["greedy"][0][:9]] * 3
    assert on_cuda.core.scheduler.prefix_cache_hits == 2 * 16
    cold_steps, *warm_steps = tokens_of_steps.values()
    assert warm_steps == [cold_steps] * 2 and max(cold_steps) > 1


@of("dense", "hybrid")
def test_nor_does_a_step_that_is_launched_before_the_previous_one_is_read(subject: Subject) -> None:
    on_cuda = subject.engine(**GRAPHS)
    log = Log(on_cuda.core)
    run = run_engine(on_cuda, subject.requests(count=3))
    assert run.texts == subject.expected["greedy"] and run.acceptance_length > 1.2
    assert any(len(log.batches[number].decodes) == 2 for number in log.overlapped)
    assert not on_cuda.core.scheduler.states or on_cuda.core.scheduler.states.num_used == 0


@of("hybrid")
def test_in_bfloat16_drafts_hit_and_the_text_is_that_of_plain_decoding(subject: Subject) -> None:
    """The pair's margins are wider than what bfloat16 rounds."""
    asked = [replace(subject.requests()[0], max_tokens=6)]
    off, on = (run_engine(subject.engine(draft, dtype="bfloat16"), asked) for draft in (False, True))
    assert on.texts == off.texts and on.acceptance_length > 1.2


@of("hybrid")
def test_our_kernels_of_recurrent_layers_run_for_rows_that_decode_alone(subject: Subject, monkeypatch) -> None:
    seen: list[int] = []
    launch = gated_delta.commit_and_verify
    noted = staticmethod(lambda step: seen.append(len(step.inputs)) or launch(step))
    monkeypatch.setattr(CudaBackend, "commit_and_verify", noted)
    asked = subject.requests()[:1]
    run_engine(subject.engine(), asked)
    assert seen and max(seen) <= 16 < len(asked[0].token_ids)


def test_heads_of_recurrent_layers_that_do_not_fit_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    pair = make_hybrid_pair(tmp_path, k_dim=512)
    (pair.target / "model.safetensors").unlink()
    with pytest.raises(build.UnsupportedError, match="linear_key_head_dim 512: a GPU takes 256 at most"):
        engines.engine(pair)


def test_what_is_compared_launches_every_kernel(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    for module in (attention, integers, rows):
        for name, kernel in vars(module).copy().items():
            if type(kernel).__name__ == "InterpretedFunction" and not name.endswith(
                ("_tokens", "fold", "locate_tile", "scaled", "_partial", "_partials", "operand")
            ):
                monkeypatch.setattr(module, name, Counted(kernel, launched))
    core = subject.engine(**GRAPHS).core
    core.run([replace(subject.requests()[0], token_ids=(1, 2), max_tokens=3)])
    every = "attend combine locate_rows embed accept norm gated rope_and_write advance".split()
    assert launched == set(every)


class Counted:
    def __init__(self, kernel: Any, launched: set[str]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.add(self._kernel.fn.__name__)
        return self._kernel[grid]
