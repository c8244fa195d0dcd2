"""Ranks with all our kernels in every step decode what one rank on the CPU backend does.

The ranks are threads, and Triton's interpreter holds the place in a grid for the whole process, and parses a kernel in
its first run, which Python 3.11 cannot do in two threads (SystemError): one kernel runs at a time. Not run on two GPUs.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

from app.config.engine import EngineConfig
from tests import UNTIMED
from tests.devices.cuda.engines import EAGER, GRAPHS, SIZES, engine, requests, use_kernels
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import run_engine
from tests.fast.engine.pairs import Pair, make_pair
from tests.fast.engine.thread_ranks import ThreadRanks

DRAFT: dict[str, Any] = {"draft_layers": 1, "taps": (0,), "own_head": True}
KERNELS = {"dense": (), "experts": ("route", "expert_rows"), "hybrid": ("mix", "recur")}
LAYERS = ("linear_attention", "full_attention")


def pair_of(folder: Path, kind: str) -> Pair:
    """Return a random pair, found by trying seeds, of whose drafts some are accepted in texts that wander."""
    if kind == "hybrid":
        return make_hybrid_pair(folder, seed=19, vocab_size=4, layer_types=LAYERS, **DRAFT)
    sizes = {"vocab_size": 4, "experts": 4} if kind == "experts" else {"vocab_size": 6}
    return make_pair(folder, seed=26, num_layers=2, **sizes, **DRAFT)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the kernels that run, one at a time."""
    own, lock, names = InterpretedFunction.run, threading.Lock(), set[str]()

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with lock:
            names.add(kernel.fn.__name__)
            return own(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return names


@pytest.mark.parametrize(
    ("kind", "asked", "wishes"),
    [
        ("dense", {}, GRAPHS),
        pytest.param("dense", {"temperature": 1.0, "top_k": 4}, EAGER, marks=pytest.mark.slow),
        pytest.param("dense", {}, GRAPHS | {"draft": False}, marks=pytest.mark.slow),
        pytest.param("experts", {}, GRAPHS, marks=pytest.mark.slow),
        ("hybrid", {}, GRAPHS),
    ],
    ids=["dense", "dense, drawn", "dense, off", "experts", "hybrid"],
)
def test_ranks_on_our_kernels_decode_what_one_does(tmp_path, monkeypatch, launched, kind, asked, wishes):
    """Four ranks share the hybrid, which has two KV heads and two key heads, and two the others."""
    pair, wishes = pair_of(tmp_path, kind), wishes.copy()
    expected = run_engine(engine(pair, draft=False), requests(**asked)).texts
    use_kernels(monkeypatch)
    draft = pair.draft if wishes.pop("draft", True) else None
    config: dict[str, Any] = {"device": "cpu", "dtype": "float32", "tensor_parallel_size": 4 if kind == "hybrid" else 2}
    ranks = ThreadRanks(EngineConfig(pair.target, draft, **UNTIMED | config | SIZES | wishes))
    log = Log(ranks.engine.core)
    run = run_engine(ranks.engine, requests(**asked))
    ranks.close()
    assert run.texts == expected
    assert (run.verify_tokens > (1.05 if asked else 1.2) * run.verify_steps) == (draft is not None)
    assert len(ranks.verified[0]) > 3
    ranks.check_alike()
    assert bool(log.overlapped) == (not asked), "steps from graphs are launched ahead"
    assert {"attend", "rope_and_write", *KERNELS[kind]} <= launched
