"""Text with DFlash on == off == the CPU backend's, token for token and in fp32, with all our kernels in every step.

A launch takes the interpreter tens of milliseconds, so there are few steps, of a pair with two layers and three tokens.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import app.engine.build as build
from app.engine.build import Engine
from app.engine.cuda import attention, inputs, rows
from app.engine.cuda.backend import CudaBackend
from app.engine.sequence import Request
from tests.engine.lossless import Run, make_engine, run_engine
from tests.engine.pairs import Pair, make_pair

SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "kv_cache_memory": 1 << 20}
CASES: dict[str, dict[str, Any]] = {
    "off": {"draft": False},
    "on": {},
    "on, from graphs, whose steps are padded": {"enforce_eager": False, "max_graphs": 2},
    "small pages, prompts in chunks": {"page_size": 4, "max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    shape: dict[str, Any] = {"seed": 3, "vocab_size": 3, "num_layers": 2, "draft_layers": 1, "taps": (0,)}
    return make_pair(tmp_path_factory.mktemp("pair"), **shape, own_head=True, num_kv_heads=1)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a start-up computes first: the self-test is in test_attention.py."""
    monkeypatch.setattr(build, "make_backend", lambda device, **_: CudaBackend(torch.device(device)))
    monkeypatch.setattr(build, "check_attention", lambda *_: None)
    monkeypatch.setattr(build, "_warm_up", lambda *_: None)


def requests(**sampling: Any) -> list[Request]:
    prompts = [tuple(i * i % 3 for i in range(19)), (1, 2)]
    return [Request(f"r{i}", prompt, max_tokens=9 - i, seed=i, **sampling) for i, prompt in enumerate(prompts)]


def engine(pair: Pair, draft: bool = True, **wishes: Any) -> Engine:
    return make_engine(pair.target, pair.draft if draft else None, **SIZES | {"enforce_eager": True} | wishes)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[float, Run]:
    """Of the CPU backend, by temperature."""
    return {t: run_engine(engine(pair, draft=False), requests(temperature=t)) for t in (0.0, 1.0)}


@pytest.mark.usefixtures("expected", "on_cuda")
@pytest.mark.parametrize("wishes", CASES.values(), ids=CASES.keys())
def test_dflash_changes_no_token_on_our_kernels(pair: Pair, expected: dict[float, Run], wishes: dict[str, Any]) -> None:
    run = run_engine(engine(pair, **wishes), requests())
    assert run.texts == expected[0.0].texts
    assert (run.acceptance_length > 1.2) == wishes.get("draft", True)


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_one_that_is_drawn(pair: Pair, expected: dict[float, Run]) -> None:
    both = requests(temperature=1.0)
    run = run_engine(engine(pair), [both[0], replace(both[1], speculate=False)])
    assert run.texts == expected[1.0].texts and run.verify_steps > 0


@pytest.mark.usefixtures("on_cuda")
def test_what_is_compared_launches_every_kernel(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    for module in (attention, inputs, rows):
        for name, kernel in vars(module).copy().items():
            if type(kernel).__name__ == "InterpretedFunction" and name != "norm_and_rope":
                monkeypatch.setattr(module, name, Counted(kernel, launched))
    core = engine(pair, enforce_eager=False, max_graphs=2).core
    core.run([replace(requests()[0], token_ids=(1, 2), max_tokens=3)])
    every = "attend combine place embed accept norm gated rope_and_write context_rope_and_write begin".split()
    assert launched == set(every)


class Counted:
    def __init__(self, kernel: Any, launched: set[str]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.add(self._kernel.fn.__name__)
        return self._kernel[grid]
