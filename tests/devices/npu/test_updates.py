"""Updates of a graph's attention: their order, what calls share, and what is left after one that is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from app.engine.device.base import AttentionMask
from app.engine.device.comparison import Attention, Inputs, Paged
from app.engine.errors import UnsupportedError
from app.engine.npu.attention import AttentionPlan
from app.engine.npu.backend import NpuBackend
from app.engine.npu.graph import NpuGraph
from tests.devices.npu.null_device import traced

pytestmark = pytest.mark.usefixtures("numerics")

CAUSAL = AttentionMask(causal=True)
LAYERS = 3


class Layers:
    """A graph of some attention calls over the same pages, each on the result of the one before."""

    def __init__(self) -> None:
        backend = NpuBackend(torch.device("npu:0"))
        at = Inputs(backend, torch.bfloat16, torch.bfloat16)
        self.call: Attention = Paged([(4, 300), (16, 200)], 4, 2, 128, CAUSAL, 128)(at)
        self.plan([300, 200])
        self.graph: NpuGraph = backend.capture(self.run, [self.call.meta])

    def plan(self, kv_lens: list[int]) -> None:
        backend, meta = self.call.backend, self.call.meta
        meta.plans = {CAUSAL: backend.plan_attention(replace(meta, host_seq_lens=kv_lens), CAUSAL, 2)}

    def run(self) -> tuple[Tensor, ...]:
        q = self.call.q
        for _ in range(LAYERS):
            q = replace(self.call, q=q)()
        return (q,)

    def check(self) -> None:
        torch.testing.assert_close(self.graph.outputs[0].cpu(), self.run()[0].cpu(), rtol=0, atol=0)


def test_updates_wait_for_all_work_before_a_launch_and_never_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of a step must not reach a call that the replay of the step before has not run. The null device runs
    everything at once, so the order of the calls is looked at."""
    layers, calls = Layers(), list[str]()

    def noted(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), original(*args))[1])

    noted(torch_npu.npu.Stream, "wait_stream")
    noted(torch_npu.npu.NPUGraph, "replay")
    noted(torch_npu.npu, "graph_task_update_begin")
    for _ in range(2):
        layers.graph.replay()
    updates = ["graph_task_update_begin"] * LAYERS
    assert calls == 2 * ["wait_stream", "replay", *updates]
    calls.clear()
    layers.graph.try_replay()
    assert calls == ["wait_stream", *updates, "replay"]


def test_updates_come_in_the_order_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device begins with the first layer while the host updates the others."""
    layers, handles, begin = Layers(), [], torch_npu.npu.graph_task_update_begin

    def noted(stream: Any, handle: Any) -> None:
        handles.append(handle)
        begin(stream, handle)

    monkeypatch.setattr(torch_npu.npu, "graph_task_update_begin", noted)
    layers.graph.replay()
    assert handles == [record.handle for record in layers.graph._records] and len(handles) == LAYERS


def test_a_capture_leaves_the_plans_of_its_caller() -> None:
    layers = Layers()
    assert layers.call.meta.plans[CAUSAL].host_seq_lens == [300, 200]
    layers.graph.replay()
    layers.check()


def test_calls_of_one_mask_share_their_lengths_which_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 256 sequences of 36 layers, numbers that each call reads again took three quarters of the updates."""
    layers = Layers()
    monkeypatch.setattr("app.engine.npu.attention.LONG_LIST", 2)
    layers.plan([250, 180])
    layers.graph.replay()
    first, *others = [record.kwargs for record in layers.graph._records]
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        assert isinstance(first[name], torch._C.ScriptList) and all(call[name] is first[name] for call in others)
    layers.check()


def test_lists_of_sixteen_sequences_are_read_once_by_default() -> None:
    lengths = AttentionPlan(list(range(1, 17)), [100] * 16, None, 0).lengths(sinks=False)
    assert all(isinstance(numbers, torch._C.ScriptList) for numbers in lengths.values())


@pytest.mark.parametrize("way", ["replay", "try_replay"])
def test_a_replay_has_the_lengths_of_its_plan(way: str) -> None:
    layers = Layers()
    for kv_lens in ([16, 16], [300, 17], [129, 200]):
        layers.plan(kv_lens)
        getattr(layers.graph, way)()
        layers.check()


def refusing(graph: NpuGraph, kv_len: int, *, more: int = 0) -> None:
    """Let the second call refuse updates with a sequence of so many tokens, and `more` updates after each of these."""
    record = graph._records[1]
    taken, left = record.op_cache_entry, 0

    def refuse(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        is_refused = kv_len in list(kwargs["actual_seq_lengths_kv"])
        left = more if is_refused else left - 1
        if is_refused or left >= 0:
            raise RuntimeError("call aclnnFusedInferAttentionScoreV3 failed, error code is 561002")
        return taken(*args, **kwargs)

    record.op_cache_entry = refuse


@pytest.mark.parametrize("first", [True, False], ids=["before any replay", "after one"])
def test_a_graph_whose_update_was_refused_is_right_again_in_the_next_replay(first: bool) -> None:
    """Events of the calls that were updated before must not be left: the next replay would not wait for its updates."""
    layers = Layers()
    layers.plan([200, 100])
    if not first:
        layers.graph.replay()
    refusing(layers.graph, 290)
    layers.plan([290, 190])
    with traced() as trace, pytest.raises(RuntimeError, match="561002"):
        layers.graph.try_replay()
    assert len(trace.of("replay")) == 1
    layers.plan([250, 150])
    layers.graph.replay()
    layers.check()


def test_a_graph_that_refuses_its_last_lengths_too_ends_the_start() -> None:
    """Nothing may go on with events that a replay would take for its updates."""
    layers = Layers()
    refusing(layers.graph, 290, more=1)
    layers.plan([290, 190])
    with pytest.raises(UnsupportedError, match=r"--prompts-in-graphs off .*561002") as raised:
        layers.graph.try_replay()
    assert "561002" in str(raised.value.__cause__)
