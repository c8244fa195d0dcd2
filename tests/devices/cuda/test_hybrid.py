"""A hybrid target with all our kernels in every step: text with DFlash on == off == the CPU backend's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.engine.cuda import gated_delta
from app.engine.cuda.backend import CudaBackend
from app.engine.load.engine import Engine
from app.messages import Request
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.launch_log import Log
from tests.fast.engine.lossless import make_engine, run_engine
from tests.fast.engine.pairs import Pair

SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "page_size": 16, "kv_cache_memory": 1 << 20}
GRAPHS: dict[str, Any] = {"enforce_eager": False, "max_graphs": 2}
CASES: dict[str, dict[str, Any]] = {
    "off": {"draft": False},
    "on": {},
    "on, from graphs, whose steps are padded": GRAPHS,
    "prompts in chunks": {"page_size": 4, "max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    layers = ("linear_attention", "full_attention")
    shape: dict[str, Any] = {"seed": 11, "vocab_size": 5, "layer_types": layers, "v_heads": 4, "k_heads": 2}
    draft: dict[str, Any] = {"draft_layers": 1, "taps": (0,), "own_head": True, "num_kv_heads": 1}
    return make_hybrid_pair(tmp_path_factory.mktemp("hybrid"), **shape, **draft)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "make_backend", lambda device, **_: CudaBackend(torch.device(device)))
    monkeypatch.setattr(build, "check_attention", lambda *_: None)
    monkeypatch.setattr(build, "_warm_up", lambda *_: None)


def requests(count: int = 2) -> list[Request]:
    prompts = [tuple(i * i % 3 for i in range(19)), (1, 2), (2, 0, 1)][:count]
    return [flat_request(f"r{i}", prompt, max_tokens=11 - i) for i, prompt in enumerate(prompts)]


def engine(pair: Pair, draft: bool = True, **wishes: Any) -> Engine:
    return make_engine(pair.target, pair.draft if draft else None, **SIZES | {"enforce_eager": True} | wishes)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """The CPU backend's texts."""
    return run_engine(engine(pair, draft=False), requests(count=3)).texts


@pytest.mark.usefixtures("expected", "on_cuda")
@pytest.mark.parametrize("wishes", CASES.values(), ids=CASES)
def test_dflash_changes_no_token(pair: Pair, expected: list[list[int]], wishes: dict[str, Any]) -> None:
    run = run_engine(engine(pair, **wishes), requests())
    assert run.texts == expected[:2]
    assert (run.acceptance_length > 1.2) == wishes.get("draft", True)


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_does_a_step_that_is_launched_before_the_last_one_is_read(pair: Pair, expected: list[list[int]]) -> None:
    on_cuda = engine(pair, **GRAPHS)
    log = Log(on_cuda.core)
    run = run_engine(on_cuda, requests(count=3))
    assert run.texts == expected and run.acceptance_length > 1.2
    assert any(len(log.batches[number].decodes) == 2 for number in log.overlapped)
    assert on_cuda.core.scheduler.states.num_used == 0


@pytest.mark.usefixtures("expected", "on_cuda")
def test_nor_does_a_state_that_the_prefix_cache_has(pair: Pair, expected: list[list[int]]) -> None:
    """The step behind a hit reads a checkpoint, which stays as it is for the next one."""
    asked = [replace(requests()[0], request_id=name, max_tokens=4) for name in ("cold", "warm", "warm again")]
    on_cuda = engine(pair, page_size=4, prefix_caching=True)
    texts = [on_cuda.core.run([request])[request.request_id] for request in asked]
    assert texts == [expected[0][:4]] * 3
    assert on_cuda.core.scheduler.prefix_cache_hits >= 2 * 16


@pytest.mark.usefixtures("expected", "on_cuda")
def test_in_bfloat16_drafts_hit_and_the_text_is_that_of_plain_decoding(pair: Pair) -> None:
    """The pair's margins are wider than what bfloat16 rounds."""
    asked = [replace(requests()[0], max_tokens=6)]
    off, on = (run_engine(engine(pair, draft, dtype="bfloat16"), asked) for draft in (False, True))
    assert on.texts == off.texts and on.acceptance_length > 1.2


@pytest.mark.usefixtures("on_cuda")
def test_what_is_compared_runs_our_kernels_for_rows_that_decode_alone(pair, monkeypatch):
    """Rows of prompts go through PyTorch's operators."""
    seen: list[int] = []
    launch = gated_delta.commit_and_verify

    def noted(step: Any) -> Any:
        seen.append(len(step.inputs))
        return launch(step)

    monkeypatch.setattr(CudaBackend, "commit_and_verify", staticmethod(noted))
    run_engine(engine(pair), requests()[:1])
    assert seen and max(seen) <= 16 < len(requests()[0].token_ids)


@pytest.mark.usefixtures("on_cuda")
def test_sizes_that_do_not_fit_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    pair = make_hybrid_pair(tmp_path, k_dim=512)
    (pair.target / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(build.UnsupportedError, match="linear_key_head_dim 512: a GPU takes 256 at most"):
        engine(pair)
