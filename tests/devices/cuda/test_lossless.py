"""Text with DFlash on == off == the CPU backend's, token for token and in fp32, with all our kernels in every step.

A launch takes the interpreter tens of milliseconds, so there are few steps, of a pair with two layers and six tokens.
Its drafts, found by trying seeds, are accepted now and then in texts that wander.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.engine.cuda import attention, integers, rows
from app.engine.cuda.backend import CudaBackend
from app.engine.load.engine import Engine
from app.messages import Request, StepOutput
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import make_engine, run_engine
from tests.fast.engine.pairs import Pair, make_pair

Texts = dict[str, list[list[int]]]

SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "kv_cache_memory": 1 << 20}
GRAPHS: dict[str, Any] = {"enforce_eager": False, "max_graphs": 2}
CASES: dict[str, dict[str, Any]] = {
    "off": {"draft": False},
    "on": {},
    "on, from graphs, whose steps are padded": GRAPHS,
    "small pages, prompts in chunks": {"page_size": 4, "max_num_batched_tokens": 16},
    "few pages, so that one is computed anew": {"page_size": 4, "max_model_len": 28, "block_size": 4, "kv_pages": 10},
}
SLOW = dict.fromkeys(("off", "small pages, prompts in chunks"), pytest.mark.slow)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((1, 0.5),)},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    shape: dict[str, Any] = {"seed": 34, "vocab_size": 6, "num_layers": 2, "draft_layers": 1, "taps": (0,)}
    return make_pair(tmp_path_factory.mktemp("pair"), **shape, own_head=True, num_kv_heads=1)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a start-up computes first: the self-test is in test_attention.py."""
    monkeypatch.setattr(build, "make_backend", lambda device, **_: CudaBackend(torch.device(device)))
    monkeypatch.setattr(build, "check_attention", lambda *_: None)
    monkeypatch.setattr(build, "_warm_up", lambda *_: None)


def requests(asked: str = "greedy", count: int = 2) -> list[Request]:
    prompts = [tuple(i * i % 3 for i in range(19)), (1, 2), (2, 0, 1)][:count]
    return [flat_request(f"r{i}", prompt, max_tokens=9 - i, seed=i, **ASKED[asked]) for i, prompt in enumerate(prompts)]


def engine(pair: Pair, draft: bool = True, **wishes: Any) -> Engine:
    return make_engine(pair.target, pair.draft if draft else None, **SIZES | {"enforce_eager": True} | wishes)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[list[int]]]:
    """The CPU backend's texts, by what is asked."""
    return {asked: run_engine(engine(pair, draft=False), requests(asked, count=3)).texts for asked in ASKED}


@pytest.mark.usefixtures("expected", "on_cuda")
@pytest.mark.parametrize("wishes", [pytest.param(CASES[name], id=name, marks=SLOW.get(name, ())) for name in CASES])
def test_dflash_changes_no_token_on_our_kernels(pair: Pair, expected: Texts, wishes: dict[str, Any]) -> None:
    run = run_engine(engine(pair, **wishes), requests())
    assert run.texts == expected["greedy"][:2]
    assert (run.acceptance_length > 1.2) == wishes.get("draft", True)
    assert (run.preemptions > 0) == ("kv_pages" in wishes)


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_one_that_is_drawn(pair: Pair, expected: Texts) -> None:
    both = requests("drawn")
    run = run_engine(engine(pair), [both[0], replace(both[1], speculate=False)])
    assert run.texts == expected["drawn"][:2] and run.verify_steps > 0


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_one_that_penalties_and_a_bias_decide(pair: Pair, expected: Texts) -> None:
    run = run_engine(engine(pair, **GRAPHS), [requests()[0], requests("penalised")[1]])
    assert run.texts == [expected["greedy"][0], expected["penalised"][1]] and run.acceptance_length > 1.2
    assert expected["penalised"][1] != expected["greedy"][1]


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_does_a_cached_prompt_change_one_or_lose_a_draft(pair: Pair, expected: Texts) -> None:
    cold = requests()[0]
    tokens_of_steps: dict[str, list[int]] = {"cold": [], "warm": []}

    def note(step: StepOutput) -> None:
        for delta in step.deltas:
            tokens_of_steps[delta.request_id].append(len(delta.token_ids))

    both = [replace(cold, request_id=name) for name in tokens_of_steps]
    run = run_engine(engine(pair, page_size=4), both, note)
    assert run.texts == 2 * expected["greedy"][:1] and run.cached_tokens == 16
    assert tokens_of_steps["cold"] == tokens_of_steps["warm"] and run.acceptance_length > 1.2


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_does_a_step_that_is_launched_before_the_previous_one_is_read(pair: Pair, expected: Texts) -> None:
    on_cuda = engine(pair, **GRAPHS)
    log = Log(on_cuda.core)
    run = run_engine(on_cuda, requests(count=3))
    assert run.texts == expected["greedy"] and run.acceptance_length > 1.2
    assert any(len(log.batches[number].decodes) == 2 for number in log.overlapped)


@pytest.mark.usefixtures("on_cuda")
def test_what_is_compared_launches_every_kernel(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    for module in (attention, integers, rows):
        for name, kernel in vars(module).copy().items():
            if type(kernel).__name__ == "InterpretedFunction" and not name.endswith(
                ("_tokens", "fold", "wait_if_chained", "locate_tile", "scaled", "_partial", "_partials", "operand")
            ):
                monkeypatch.setattr(module, name, Counted(kernel, launched))
    core = engine(pair, enforce_eager=False, max_graphs=2).core
    core.run([replace(requests()[0], token_ids=(1, 2), max_tokens=3)])
    every = "attend combine locate_rows embed accept norm gated rope_and_write advance".split()
    assert launched == set(every)


class Counted:
    def __init__(self, kernel: Any, launched: set[str]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.add(self._kernel.fn.__name__)
        return self._kernel[grid]
