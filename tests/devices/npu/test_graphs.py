"""NPUGraph with numbers computes the captured calls at every replay. Checked with torch_npu 2.13.0."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.errors import UnsupportedError
from app.engine.npu.backend import NpuBackend
from app.engine.step.graph_plan import plan_graphs
from tests.devices.npu.calls import BLOCK, Sequences, causal_mask, normal
from tests.devices.npu.numerics import NumericsError
from tools.npu_contract.check import ContractError

pytestmark = pytest.mark.usefixtures("numerics")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 128, 2


class Step:
    """Two layers of (write K/V, attend, project) for 2 sequences of 2 rows, from buffers that stay where they are."""

    def __init__(self) -> None:
        device = torch.device("npu:0")
        self.x = torch.zeros(4, HEADS, DIM, dtype=torch.bfloat16, device=device)
        self.slot_mapping = torch.arange(4, dtype=torch.int32, device=device)
        self.table = torch.tensor([[2, 1], [4, 3]], dtype=torch.int32, device=device)
        shape = (LAYERS, 5, BLOCK, KV_HEADS, DIM)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
        self.weights = [(normal(HEADS * DIM, HEADS * DIM, seed=i) * 0.05).to(device) for i in range(LAYERS)]
        self.mask = causal_mask()

    def fill(self, turn: int) -> list[int]:
        """New rows behind `turn` and 2 * `turn` rows; the KV lengths of the two sequences."""
        starts = [126 + turn, 3 * turn]
        slot_mapping = [
            int(block) * BLOCK + place for s, start in enumerate(starts) for block, place in self._places(s, start)
        ]
        self.x.copy_(normal(4, HEADS, DIM, seed=turn))
        self.slot_mapping.copy_(torch.tensor(slot_mapping, dtype=torch.int32))
        return [start + 2 for start in starts]

    def _places(self, sequence: int, start: int) -> list[tuple[int, int]]:
        blocks = [[2, 1], [4, 3]][sequence]
        return [(blocks[i // BLOCK], i % BLOCK) for i in (start, start + 1)]

    def run(self, host_seq_lens: list[int], query_lens: tuple[int, int] = (2, 2)) -> Tensor:
        x = self.x
        for layer, weight in enumerate(self.weights):
            k, v = (cache[layer] for cache in self.caches)
            kv_rows = x[:, :KV_HEADS].contiguous()
            torch_npu.npu_scatter_pa_kv_cache(kv_rows, kv_rows, k, v, self.slot_mapping, cache_mode="Norm")
            o, _ = torch_npu.npu_fused_infer_attention_score(
                x,
                k.view(-1, BLOCK, KV_HEADS * DIM),
                v.view(-1, BLOCK, KV_HEADS * DIM),
                atten_mask=self.mask,
                actual_seq_lengths=list(accumulate(query_lens)),
                actual_seq_lengths_kv=host_seq_lens,
                block_table=self.table,
                num_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                scale=DIM**-0.5,
                input_layout="TND",
                sparse_mode=3,
                block_size=BLOCK,
            )
            x = F.linear(o.view(4, -1), weight).view(4, HEADS, DIM)
        return x

    def capture(self) -> tuple[torch.npu.NPUGraph, Tensor]:
        """Captured with lengths that no later step has."""
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            y = self.run([2, 2])
        return graph, y


def lengths(host_seq_lens: list[int]) -> list[dict[str, list[int]]]:
    """One entry for each recorded attention call."""
    return [{"actual_seq_lengths": [2, 4], "actual_seq_lengths_kv": list(host_seq_lens)} for _ in range(LAYERS)]


@pytest.mark.parametrize("update_first", [True, False], ids=["update, replay", "replay, update"])
def test_replays_with_updated_lengths_equal_eager_steps(update_first: bool) -> None:
    captured, eager = Step(), Step()
    graph, y = captured.capture()
    for turn in range(4):
        host_seq_lens = captured.fill(turn)
        if update_first:
            graph.update(lengths(host_seq_lens))
            graph.replay()
        else:
            graph.replay()
            graph.update(lengths(host_seq_lens))
        eager.fill(turn)
        assert torch.equal(y.cpu(), eager.run(host_seq_lens).cpu())
    for mine, other in zip(captured.caches, eager.caches, strict=True):
        assert torch.equal(mine.cpu(), other.cpu())


def test_a_capture_computes_nothing() -> None:
    step = Step()
    step.fill(0)
    _, y = step.capture()
    assert not step.caches[0].cpu().any()
    assert y.cpu().isnan().any()


def test_two_metas_in_one_graph_each_keep_their_mode_and_get_their_own_lengths() -> None:
    """A draft's blocks, which see all tokens, and a target's causal rows: each output against the dense reference."""
    turns = [
        (Sequences([16, 16], [40, 150]), Sequences([3, 5], [130, 9])),
        (Sequences([16, 16], [129, 16]), Sequences([3, 5], [7, 250])),
        (Sequences([16, 16], [17, 256]), Sequences([3, 5], [3, 5])),
    ]
    backend, masks = NpuBackend(torch.device("npu:0")), (AttentionMask(causal=False), AttentionMask(causal=True))
    calls = [(torch.zeros_like(it.q).to("npu:0"), _pages(), _meta(it)) for it in turns[0]]

    def fill(turn: tuple[Sequences, Sequences]) -> None:
        for it, mask, (q, kv, meta) in zip(turn, masks, calls, strict=True):
            q.copy_(it.q)
            table = it.table()
            meta.page_table[:, : table.shape[1]] = table.to("npu:0")
            for pages, tokens in ((kv.k, it.k), (kv.v, it.v)):
                pool = it.pool(tokens)
                pages[: len(pool)] = pool.view(len(pool), BLOCK, KV_HEADS, DIM).to("npu:0")
            meta.plans[mask] = backend.plan_attention(_meta(it), mask, HEADS // KV_HEADS)

    fill(turns[0])
    graph = backend.capture(
        lambda: tuple(backend.attention(q, kv, meta, mask) for mask, (q, kv, meta) in zip(masks, calls, strict=True)),
        [meta for _, _, meta in calls],
    )
    for turn in turns:
        fill(turn)
        graph.replay()
        for it, mask, o in zip(turn, masks, graph.outputs, strict=True):
            torch.testing.assert_close(o.cpu().double(), it.dense(causal=mask.causal), rtol=2e-2, atol=2e-2)


def _pages() -> LayerKv:
    shape = (6, BLOCK, KV_HEADS, DIM)
    return LayerKv(*(torch.zeros(shape, dtype=torch.bfloat16, device="npu:0") for _ in range(2)))


def _meta(it: Sequences) -> AttentionMetadata:
    starts, lengths = torch.tensor([0, *accumulate(it.query_lens)]), torch.tensor(it.host_seq_lens)
    table = torch.zeros(len(lengths), 2, dtype=torch.int32, device="npu:0")
    device = (x.to("npu:0", torch.int32) for x in (starts, lengths))
    return AttentionMetadata(*device, table, list(it.query_lens), list(it.host_seq_lens), BLOCK)


def test_a_replay_without_an_update_of_its_own_is_an_error_and_not_a_hang() -> None:
    step = Step()
    graph, y = step.capture()
    host_seq_lens = step.fill(0)
    graph.replay()
    with pytest.raises(RuntimeError, match="507046"):
        torch.npu.synchronize()
    with pytest.raises(NumericsError, match="waits for its update"):
        y + 1
    graph.update(lengths(host_seq_lens))
    assert not y.cpu().isnan().any()
    graph.replay()  # lengths of before are not used again in silence
    with pytest.raises(RuntimeError, match="507046"):
        torch.npu.synchronize()
    graph.update(lengths(host_seq_lens))
    torch.npu.synchronize()


@pytest.mark.parametrize("wrong", [[200, 2], [300, 2], [0, 2]], ids=["foreign", "too long", "empty"])
def test_rules_hold_for_updates_and_replays_too(wrong: list[int]) -> None:
    step = Step()
    graph, _ = step.capture()
    step.fill(0)
    step.table.copy_(torch.tensor([[2, 9], [4, 3]], dtype=torch.int32))
    with pytest.raises((ContractError, RuntimeError), match=r"N3:|N13:"):
        graph.update(lengths(wrong))
        graph.replay()


def captured(sequences: Sequences, ends: list[int], *, causal: bool) -> Tensor:
    """Return attention of a graph that was captured with other lengths, `ends`, and a long KV."""
    graph, arguments = torch.npu.NPUGraph(), sequences.arguments(causal=causal)
    longest = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": [arguments["block_table"].shape[1] * BLOCK] * 2}
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        o, _ = torch_npu.npu_fused_infer_attention_score(**arguments | longest)
    graph.replay()
    graph.update([{name: arguments[name] for name in longest}])
    return o


def test_a_captured_draft_has_no_more_rows_than_a_block() -> None:
    """A target's rows may be a prompt's, so more of them are a chunk (N12, N42)."""
    with pytest.raises(RuntimeError, match="N12:"):
        captured(Sequences([17, 1], [20, 5]), [16, 18], causal=False)


@pytest.mark.parametrize("chunk", [17, 180])
def test_a_prompts_rows_in_a_graph_that_was_captured_for_blocks_are_right(chunk: int) -> None:
    sequences = Sequences([3, chunk], [150, chunk + 40])
    o = captured(sequences, [chunk, chunk + 3], causal=True)
    torch.testing.assert_close(o.cpu().double(), sequences.dense(causal=True), rtol=2e-2, atol=2e-2)


def test_an_environment_that_forbids_captures_is_refused_before_weights_are_loaded(run_python, monkeypatch) -> None:
    """With the words of torch_npu's own refusal, which would come behind minutes of loading."""
    capture = (
        "torch.npu.set_device(0); graph = torch_npu.npu.NPUGraph()\n"
        "try:\n    with torch_npu.npu.graph(graph, auto_dispatch_capture=True): pass\n"
        "except RuntimeError as error: print(error)"
    )
    assert "Do not support TASK_QUEUE_ENABLE = 2" in run_python(capture, TASK_QUEUE_ENABLE="2")
    backend = NpuBackend(torch.device("npu:0"))
    for variable, value in (("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1")):
        with monkeypatch.context() as environment, pytest.raises(UnsupportedError, match=f"{variable}={value} allows"):
            environment.setenv(variable, value)
            plan_graphs(EngineConfig(Path("target"), None), 4, 1, backend)
    assert plan_graphs(EngineConfig(Path("target"), None), 4, 1, backend) is not None


def test_the_host_cannot_wait_inside_a_capture() -> None:
    step = Step()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(torch.npu.NPUGraph()):
        step.x.sum().item()


def test_a_size_that_depends_on_values_cannot_be_captured() -> None:
    step = Step()
    with pytest.raises(NumericsError, match="depends on values"), torch.npu.graph(torch.npu.NPUGraph()):
        step.x[step.x > 0]


def test_a_number_that_an_operator_uploads_by_itself_cannot_be_captured() -> None:
    step = Step()
    with pytest.raises(NumericsError, match="uploads a scalar"), torch.npu.graph(torch.npu.NPUGraph()):
        step.slot_mapping >> 3


def test_an_upload_from_pageable_memory_cannot_be_captured() -> None:
    step = Step()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(torch.npu.NPUGraph()):
        step.slot_mapping.copy_(torch.arange(4, dtype=torch.int32))


def test_a_captured_upload_reads_its_pinned_memory_at_each_replay() -> None:
    host, graph = torch.zeros(4, dtype=torch.int32, pin_memory=True), torch.npu.NPUGraph()
    slot_mapping = torch.zeros(4, dtype=torch.int32, device="npu:0")
    with torch.npu.graph(graph):
        slot_mapping.copy_(host, non_blocking=True)
        doubled = slot_mapping * 2
    for turn in range(2):
        host.fill_(turn)
        graph.replay()
        assert doubled.tolist() == [2 * turn] * 4
