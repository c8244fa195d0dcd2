"""The whole engine on device "npu:0": its tokens are the CPU engine's.

`OnNpu` is the torch backend moved there, to prove the harness; `NpuBackend` is the server's own.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.engine.core import EngineCore
from app.engine.device.base import Backend, Defaults
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.messages import Request
from tests.costs import landing_ones
from tests.devices.npu.engines import LUCKY, SMALL, engine, requests
from tests.devices.npu.null_device import traced
from tests.fast.engine.pairs import FAMILIES, GPT_OSS, Pair, make_pair

PAGE = 128


class OnNpu(TorchBackend):
    memory_is_host = False

    def __init__(self, device: torch.device) -> None:
        Backend.__init__(self, device)
        self.defaults = Defaults(dtype=torch.float32, page_size=PAGE, max_num_seqs=4)

    upload = NpuBackend.upload
    start_download = NpuBackend.start_download
    memory = NpuBackend.memory
    peak_memory = NpuBackend.peak_memory


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, **SMALL)


def on_cpu(pair: Pair, **config: Any) -> EngineCore:
    return engine(pair, "cpu", "float32", **config)


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("backend", [OnNpu, NpuBackend])
def test_tokens_on_the_null_device_are_the_cpu_engines(pair, monkeypatch, backend):
    wanted = on_cpu(pair).run(requests())
    monkeypatch.setattr(build, "make_backend", lambda name, **_: backend(torch.device(name)))
    assert engine(pair, dtype="float32").run(requests()) == wanted


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("width", landing_ones([16, 8], (16,)))
@pytest.mark.parametrize("eager", [True, False])
def test_drafts_and_how_far_they_are_accepted_are_the_cpu_engines(tmp_path, monkeypatch, eager, width):
    """A mistake in the draft leaves every text right, so texts cannot show it. Narrow blocks fill the first columns."""
    lucky = make_pair(tmp_path, seed=11, block_size=16, num_kv_heads=4, **LUCKY)
    asked = requests(vocab_size=5)
    wanted = drafted(on_cpu(lucky, page_size=PAGE, verify=width), asked, width)
    assert max(accepted for _, accepted in wanted) > 1
    assert drafted(engine(lucky, dtype="float32", enforce_eager=eager, verify=width), asked, width) == wanted


def drafted(core: EngineCore, asked: list[Request], width: int) -> list[tuple[list[list[int]], int]]:
    """Return the drafts of each step in blocks of `width` rows, and how many were accepted."""
    found, drafter = [], core.runner.graphs or core.runner.forward
    draft = drafter.draft

    def kept(inputs: Any) -> torch.Tensor:
        found.append(drafts := draft(inputs))
        return drafts

    drafter.draft = kept  # type: ignore[method-assign]
    steps = []
    for request in asked:
        core.add(request)
    while core.has_work:
        found.clear()
        accepted = sum(delta.steps[0].n_accepted for delta in core.step().deltas)
        steps += [(drafts[:, : width - 1].tolist(), accepted) for drafts in found]
    return steps


FAMILY_SHAPES = FAMILIES | {"gpt-oss": GPT_OSS, "Qwen3-MoE": {"experts": 8}}


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("eager", landing_ones([True, False], (False,)))
@pytest.mark.parametrize("shape", ["Llama 3.1", "Qwen2.5", "Qwen3, biases", "Qwen3, yarn", "gpt-oss", "Qwen3-MoE"])
def test_every_familys_tokens_are_the_cpu_engines(tmp_path, shape, eager):
    pair = make_pair(tmp_path, **FAMILY_SHAPES[shape] | {"head_dim": 64})
    wanted = on_cpu(pair).run(requests())
    assert engine(pair, dtype="float32", enforce_eager=eager).run(requests()) == wanted


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("eager", landing_ones([True, False], (False,)))
def test_a_cann_that_cannot_write_pages_scatters_rows_to_the_same_tokens_and_says_so(pair, monkeypatch, caplog, eager):
    lacking = "aclnnScatterPaKvCache or aclnnScatterPaKvCacheGetWorkspaceSize not in libopapi.so"

    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(lacking)

    wanted = engine(pair).run(requests())
    monkeypatch.setattr("torch_npu.npu_scatter_pa_kv_cache", missing)
    core = engine(pair, enforce_eager=eager)
    assert "scattered by row" in caplog.text and lacking in caplog.text
    with traced() as trace:
        assert core.run(requests()) == wanted
    assert any("ScatterNd" in name for name in trace.launches)


@pytest.mark.usefixtures("numerics")
def test_every_rule_holds_for_an_engine_with_experts_in_bfloat16(tmp_path):
    tokens = engine(make_pair(tmp_path, **SMALL | {"experts": 8})).run(requests())
    assert {len(ids) for ids in tokens.values()} == {12}


@pytest.mark.parametrize(
    ("shape", "config", "named"),
    [
        ({}, {"dtype": "float16"}, "--dtype float16"),
        ({}, {"page_size": 64}, "--page-size 64"),
        ({}, {"device": "npu:3"}, "sees 1 NPUs"),
        ({"block_size": 20}, {"max_num_batched_tokens": 128}, "--num-speculative-tokens 15"),
        ({"experts": 1, "experts_per_tok": 1}, {}, "num_experts 1: "),
    ],
    ids=str,
)
def test_what_the_operators_cannot_do_is_refused_by_name_before_weights_are_read(
    tmp_path, monkeypatch, shape, config, named
):
    monkeypatch.setattr(build, "read_models", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UnsupportedError, match=named):
        engine(make_pair(tmp_path, **SMALL | shape), **config)


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("eager", [True, False])
def test_a_mixed_step_has_one_attention_call_a_layer_and_the_texts_of_two(pair, monkeypatch, eager):
    found = []
    for apart in (False, True):
        monkeypatch.setattr(NpuBackend, "separate_prefill", apart)
        found.append(mixed_steps(engine(pair, enforce_eager=eager)))
    (texts, calls, launches), (same_texts, more_calls, more_launches) = found
    assert texts == same_texts and calls
    assert [more - fewer for fewer, more in zip(calls, more_calls, strict=True)] == [3] * len(calls), "a layer's second"
    assert all(fewer < more for fewer, more in zip(launches, more_launches, strict=True))


def mixed_steps(core: Any) -> tuple[dict[str, list[int]], list[int], list[int]]:
    """Return the texts, and for each mixed step its attention calls and its launches."""
    texts: dict[str, list[int]] = {}
    calls, launches = [], []
    for request in requests():
        core.add(request)
    while core.has_work:
        with traced() as trace:
            step = core.step()
        for delta in step.deltas:
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
        if step.stats.kind == "mixed":
            calls.append(trace.of("launch", "update").count("aclnnFusedInferAttentionScoreV3"))
            launches.append(len(trace.of("launch")))
    return texts, calls, launches
