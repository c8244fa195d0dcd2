"""The whole engine on device "npu:0": its tokens are the CPU engine's.

`OnNpu` is the torch backend moved there, to prove the harness; `NpuBackend` is the server's own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import app.engine.load.engine as build
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.device.base import Backend, Defaults
from app.engine.device.torch import TorchBackend
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.engine.step.inputs import DraftInputs
from app.messages import Request, SamplingParams
from tests import UNTIMED
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
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
    return make_pair(tmp_path, head_dim=64, num_layers=3, draft_layers=1, taps=(0, 1))


def engine(pair: Pair, **config: Any) -> EngineCore:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory": 8 << 20, "dtype": "float32"}
    return build.build_engine(EngineConfig(target=pair.target, draft=pair.draft, **UNTIMED | sizes | config)).core


def requests() -> list[Request]:
    prompts = [tuple(range(1, 12)), tuple(range(30, 75)), (5, 6, 5, 6, 5, 6), tuple(range(1, 90))]
    return [
        Request(f"r{i}", prompt, sampling=SamplingParams(temperature=0.7 * (i == 2), seed=i), max_tokens=12)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("backend", [OnNpu, NpuBackend])
def test_tokens_on_the_null_device_are_the_cpu_engines(pair, monkeypatch, backend):
    wanted = engine(pair, device="cpu").run(requests())
    monkeypatch.setattr(build, "make_backend", lambda name, **_: backend(torch.device(name)))
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        assert engine(pair, device="npu:0").run(requests()) == wanted


@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize("eager", [True, False])
def test_drafts_and_how_far_they_are_accepted_are_the_cpu_engines(tmp_path, monkeypatch, eager, width):
    """A mistake in the draft leaves every text right, so texts cannot show it. Narrow blocks fill the first columns."""
    lucky = make_pair(
        tmp_path, head_dim=64, seed=11, block_size=16, vocab_size=5, num_kv_heads=4, tied=True, own_head=True
    )
    asked = [replace(request, token_ids=tuple(token % 5 for token in request.token_ids)) for request in requests()]
    wanted = drafted(engine(lucky, device="cpu", page_size=PAGE, verify=width), asked, width)
    assert max(accepted for _, accepted in wanted) > 1
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        assert drafted(engine(lucky, device="npu:0", enforce_eager=eager, verify=width), asked, width) == wanted


def drafted(core: EngineCore, asked: list[Request], width: int) -> list[tuple[list[list[int]], int]]:
    """Return the drafts of each step in blocks of `width` rows, and how many were accepted."""
    found, runner = [], core.runner
    draft = runner._draft

    def kept(inputs: DraftInputs) -> torch.Tensor:
        found.append(drafts := draft(inputs))
        return drafts

    runner._draft = kept  # type: ignore[method-assign]
    steps = []
    for request in asked:
        core.add(request)
    while core.has_work:
        found.clear()
        accepted = sum(delta.num_accepted for delta in core.step().deltas)
        steps += [(drafts[:, : width - 1].tolist(), accepted) for drafts in found]
    return steps


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("shape", ["Llama 3.1", "Qwen2.5", "Qwen3, biases", "Qwen3, yarn", "gpt-oss"])
def test_every_familys_tokens_are_the_cpu_engines(tmp_path, monkeypatch, shape, eager):
    pair = make_pair(tmp_path, **(FAMILIES | {"gpt-oss": GPT_OSS})[shape] | {"head_dim": 64})
    wanted = engine(pair, device="cpu").run(requests())
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        assert engine(pair, device="npu:0", enforce_eager=eager).run(requests()) == wanted


@pytest.mark.parametrize("eager", [True, False])
def test_a_cann_that_cannot_write_pages_scatters_rows_to_the_same_tokens(pair, monkeypatch, eager):
    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("aclnnScatterPaKvCache or aclnnScatterPaKvCacheGetWorkspaceSize not in libopapi.so")

    with torch.inference_mode(), Numerics():
        wanted = engine(pair, device="npu:0", dtype="bfloat16").run(requests())
        monkeypatch.setattr("torch_npu.npu_scatter_pa_kv_cache", missing)
        core = engine(pair, device="npu:0", dtype="bfloat16", enforce_eager=eager)
        with traced() as trace:
            assert core.run(requests()) == wanted
    assert any("ScatterNd" in name for name in trace.launches)


def test_every_rule_holds_for_the_engine_in_bfloat16(pair: Pair) -> None:
    with torch.inference_mode(), Numerics():
        tokens = engine(pair, device="npu:0", dtype="bfloat16").run(requests())
    assert {len(ids) for ids in tokens.values()} == {12}


def test_the_fused_operators_are_what_an_eager_step_launches(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NpuBackend, "dtypes", (torch.float32,))
    with torch.inference_mode(), Numerics(lift=["N7"]):
        core = engine(pair, device="npu:0", enforce_eager=True)
        for request in requests():
            core.add(request)
        while core.step().stats.kind != "decode":
            pass
        with traced() as trace:
            core.step()
    layers = 3 + 1
    assert trace.launches["aclnnFusedInferAttentionScoreV3"] == layers
    assert trace.launches["aclnnSwiGlu"] == layers
    assert [wait for wait in trace.waits if wait.startswith("d2h")] == []
    assert trace.waits.count("aclrtSynchronizeEvent") == 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"dtype": "float16"}, "--dtype float16"),
        ({"dtype": "bfloat16", "page_size": 64}, "--page-size 64"),
        ({"dtype": "bfloat16", "device": "npu:3"}, "sees 1 NPUs"),
    ],
)
def test_what_the_operators_cannot_do_is_refused_by_name(pair: Pair, config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        engine(pair, **{"device": "npu:0"} | config)


def test_a_block_above_sixteen_rows_is_refused_by_name(tmp_path: Path) -> None:
    wide = make_pair(tmp_path, head_dim=64, num_layers=3, draft_layers=1, taps=(0, 1), block_size=20)
    with pytest.raises(UnsupportedError, match="--num-speculative-tokens 15"):
        engine(wide, device="npu:0", dtype="bfloat16", max_num_batched_tokens=128)


@pytest.mark.parametrize("eager", [True, False])
def test_a_mixed_step_has_one_attention_call_a_layer_and_the_texts_of_two(pair, monkeypatch, eager):
    found = []
    for apart in (False, True):
        monkeypatch.setattr(NpuBackend, "separate_prefill", apart)
        with torch.inference_mode(), Numerics():
            found.append(mixed_steps(engine(pair, device="npu:0", dtype="bfloat16", enforce_eager=eager)))
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
