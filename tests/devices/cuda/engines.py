"""Engines on our kernels. A launch takes the interpreter tens of milliseconds, so models and texts are small."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.engine.cuda.backend import CudaBackend, InvariantCudaBackend
from app.engine.load.engine import Engine
from app.messages import Request
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import Pair

SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "kv_cache_memory": 1 << 20}
EAGER: dict[str, Any] = {"enforce_eager": True}
GRAPHS: dict[str, Any] = {"enforce_eager": False, "max_graphs": 2}
DENSE: dict[str, Any] = {
    "seed": 34, "vocab_size": 6, "num_layers": 2, "draft_layers": 1, "taps": (0,), "own_head": True, "num_kv_heads": 1,
}  # fmt: skip
"""A random pair, found by trying seeds, of whose drafts some are accepted in texts that wander."""


def use_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.device], CudaBackend] = CudaBackend) -> None:
    """Engines that are built from now on have this backend, without a start-up's self-test."""
    monkeypatch.setattr(build, "make_backend", lambda device, **_: make(torch.device(device)))
    monkeypatch.setattr(build, "check_attention", lambda *_: None)


def interpreted(device: str, *, batch_invariant: bool = False) -> CudaBackend:
    """Return the backend of a GPU, on a CPU."""
    return (InvariantCudaBackend if batch_invariant else CudaBackend)(torch.device("cpu"))


def engine(pair: Pair, draft: bool = True, **wishes: Any) -> Engine:
    return make_engine(pair.target, pair.draft if draft else None, **SIZES | EAGER | wishes)


def requests(count: int = 2, max_tokens: int = 9, **asked: Any) -> list[Request]:
    prompts = [tuple(i * i % 3 for i in range(19)), (1, 2), (2, 0, 1)][:count]
    return [flat_request(f"r{i}", prompt, max_tokens - i, seed=i, **asked) for i, prompt in enumerate(prompts)]
