"""Ranks that share a model choose what one rank chooses, and all of them the same.

The ranks are threads here. tests/exhaustive/test_tensor_parallel.py has processes over Gloo, and
tests/server/test_ranks_end.py the ends of such processes.
"""

import dataclasses
import itertools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from app.config.engine import EngineConfig
from app.engine.arrays import with_arrays
from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint, read_config
from app.engine.checkpoint.shapes import DecoderConfig, GatedDeltaConfig, RopeConfig
from app.engine.comm import device as comm_device
from app.engine.comm.comm import ALONE, Comm, Meeting
from app.engine.comm.process_group import start_process_group
from app.engine.cpu.backend import CpuBackend
from app.engine.device import factory
from app.engine.device.accelerator import check_ranks
from app.engine.device.base import AttentionMask, AttentionMetadata, Graph, LayerKv
from app.engine.device.factory import make_backend
from app.engine.device.moe import MoeConfig
from app.engine.device.torch import TorchBackend
from app.engine.dflash.model import DFlashModel
from app.engine.errors import GraphsRefusedError, UnsupportedError
from app.engine.load import engine as build
from app.engine.load import loader
from app.engine.load.engine import Engine, build_engine
from app.engine.load.loader import CheckpointWeights, target_class
from app.engine.models.layers import DecoderLayer, StepRows
from app.engine.models.qwen3_5 import GroupedWeights, HybridLayer, TextWeights
from app.engine.models.recurrent_rows import RecurrentRows, prompt_rows
from app.engine.models.rope import RotaryTable
from app.engine.models.state_pool import StatePool
from app.engine.models.weights import ExpertLayout, LayerSource, Part, shard
from app.engine.npu.error_codes import explain
from app.engine.ranks.leader import Followers
from app.engine.ranks.runner import Message, decode, encode, follow
from app.engine.sampling.sampler import Sampler, ShardedSampler
from app.engine.schedule.batch import Batch
from app.engine.sequence import NOT_FINITE
from app.engine.step.inputs import Layout, StepInputs
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import Request, SamplingParams
from tests import UNTIMED
from tests.costs import fast_ones
from tests.fast.engine import lossless, thread_ranks
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.live_bytes import LiveBytes
from tests.fast.engine.lossless import LUCKY, Case, Subject, assert_lossless, random_prompts
from tests.fast.engine.nan_in_one import check_that_nan_ends_one_alone
from tests.fast.engine.pairs import FAMILIES, GPT_OSS, Pair, make_pair
from tests.fast.engine.thread_ranks import ThreadComm, ThreadRanks, on_ranks

LUCKY_EVEN = LUCKY | {"seed": 16, "vocab_size": 4}
"""A pair with four KV heads and four tokens, dense or hybrid, of whose drafts some are accepted."""
BACKEND = make_backend("cpu")
ONE_BY_ONE = ExpertLayout()


class Stored:
    """A checkpoint's tensors by name, made when they are first asked for."""

    names: tuple[str, ...] = ()

    def __init__(self, seed: int, experts: str = "one by one", adapt: Callable[..., Any] | None = None) -> None:
        self.seed = seed
        self.experts = experts
        self.adapt = adapt

    def __contains__(self, name: str) -> bool:
        return name.endswith({"fused": "gate_up_proj", "mxfp4": "gate_up_proj_blocks"}.get(self.experts, "\0"))

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(map(ord, name)))
        if dtype == torch.uint8:
            low, high = (122, 126) if name.endswith("scales") else (0, 256)
            whole = torch.randint(low, high, shape, generator=generator).to(dtype)
        else:
            whole = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        return part.of(whole) if part else whole

    def num_bytes(self, multiplies: object, *, to: torch.dtype | None) -> int:
        return 0

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        return self.get(name, *shape, part=part)


def layer_output(config: DecoderConfig, weights: Stored, comm: Comm, layout: ExpertLayout = ONE_BY_ONE) -> Tensor:
    """Return the residual stream [5, H] after a layer whose rows are a prompt of 5 tokens."""
    own, rows = shard(config, comm.size), 5
    adapted = weights.adapt(weights, own) if weights.adapt else weights
    layer_class = HybridLayer if own.gated_delta else DecoderLayer
    layer = layer_class(LayerSource(0, own, adapted, BACKEND, layout, comm=comm))
    hidden = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(weights.seed))
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    ends, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([rows], dtype=torch.int32)
    meta = AttentionMetadata(ends, lens, table, [rows], [rows], 4)
    meta.plans[own.masks[0]] = BACKEND.plan_attention(meta, own.masks[0], own.num_heads // own.num_kv_heads)
    rotary = RotaryTable(own.rope, own.head_dim, 8, torch.float32, BACKEND)
    slots = torch.arange(4, 4 + rows, dtype=torch.int32)
    step = StepRows(rotary.at(torch.arange(rows, dtype=torch.int32)), slots, [meta])
    memory: Any = LayerKv(*(torch.zeros(3, 4, own.num_kv_heads, own.head_dim) for _ in range(2)))
    if own.gated_delta and 0 in own.gated_delta.layers:
        memory = StatePool(own.gated_delta, 2, 4, torch.float32, BACKEND.zeros).layers[0]
        prompts = with_arrays(prompt_rows([(1, 2, 0)], [0], [[rows]]), lambda _, array: torch.from_numpy(array))
        step = replace(step, recurrent=RecurrentRows(None, prompts))
    return sum(layer.forward(*layer.enter(hidden, None), step, memory))


def check_layer(size: int, config: DecoderConfig, weights: Stored, layout: ExpertLayout = ONE_BY_ONE) -> None:
    """All ranks have the same bits, which are one rank's to rounding: with experts and states of its largest number."""
    whole = layer_output(config, weights, ALONE, layout)
    first, *others = on_ranks(size, lambda comm: layer_output(config, weights, comm, layout))
    assert all(torch.equal(part, first) for part in others)
    scale = float(whole.abs().max()) if config.moe or config.gated_delta else 1.0
    torch.testing.assert_close(first, whole, rtol=2e-5, atol=2e-5 * scale)


SHARED_HEADS = [(2, 2), (2, 4), (3, 3), (4, 4), (2, 1), (3, 1), (4, 2), (4, 1), (6, 3), (8, 2)]
"""Ranks, and heads of which each rank has some, or of which several ranks in a row have the same one."""


@settings(max_examples=12)
@given(
    shared=st.sampled_from(SHARED_HEADS),
    group=st.integers(1, 3),
    inner=st.integers(1, 9),
    biases=st.booleans(),
    qk_norm=st.booleans(),
    seed=st.integers(0, 99),
)
@example(shared=(4, 2), group=2, inner=1, biases=True, qk_norm=True, seed=0)
def test_a_layer_of_ranks_is_the_whole_layer(shared, group, inner, biases, qk_norm, seed):
    size, kv_heads = shared
    config = DecoderConfig(
        hidden_size=12, intermediate_size=inner * size, num_layers=1, num_heads=math.lcm(*shared) * group,
        num_kv_heads=kv_heads, head_dim=8, vocab_size=size, rms_norm_eps=1e-6, rope=RopeConfig(1e4),
        max_position_embeddings=8, tie_word_embeddings=False, dtype="float32", masks=(AttentionMask(True),),
        qkv_bias=biases, o_bias=biases, qk_norm=qk_norm,
    )  # fmt: skip
    check_layer(size, config, Stored(seed))


LAYOUTS = {
    "Qwen3-MoE": ("one by one", ONE_BY_ONE),
    "fused": ("fused", ONE_BY_ONE),
    "gpt-oss": ("fused", ExpertLayout("router", interleaved=True, input_first=True)),
    "gpt-oss in mxfp4": ("mxfp4", ExpertLayout("router", interleaved=True, input_first=True)),
}


@settings(max_examples=8)
@given(
    size=st.sampled_from([2, 4, 8]),
    kv_heads=st.sampled_from([2, 8]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 99),
)
@example(size=8, kv_heads=2, layout="gpt-oss in mxfp4", seed=0)  # a rank's columns begin inside of a block of 32
def test_a_layer_of_ranks_that_share_experts_is_the_whole_layer(size: int, kv_heads: int, layout: str, seed: int):
    has_bias, (stored, layout_of) = "gpt-oss" in layout, LAYOUTS[layout]
    moe = MoeConfig(4, 2, 64, norm_topk_prob=True, has_bias=has_bias, swiglu_limit=7.0 if has_bias else None)
    config = DecoderConfig(
        hidden_size=32, intermediate_size=64, num_layers=1, num_heads=8, num_kv_heads=kv_heads, head_dim=4,
        vocab_size=8, rms_norm_eps=1e-6, rope=RopeConfig(1e4), max_position_embeddings=8, tie_word_embeddings=False,
        dtype="float32", masks=(AttentionMask(True),), qkv_bias=has_bias, o_bias=has_bias, sinks=has_bias, moe=moe,
    )  # fmt: skip
    check_layer(size, config, Stored(seed, stored), layout_of)


@settings(max_examples=16)
@given(
    shared=st.sampled_from(SHARED_HEADS),
    group=st.integers(1, 3),
    recurrent=st.booleans(),
    grouped=st.booleans(),
    experts=st.booleans(),
    seed=st.integers(0, 99),
)
@example(shared=(4, 2), group=2, recurrent=True, grouped=False, experts=False, seed=0)
@example(shared=(4, 2), group=2, recurrent=True, grouped=True, experts=False, seed=0)
@example(shared=(4, 2), group=2, recurrent=False, grouped=False, experts=True, seed=0)
def test_a_hybrid_layer_of_ranks_is_the_whole_layer(shared, group, recurrent, grouped, experts, seed):
    (size, heads), values = shared, math.lcm(*shared) * group
    config = DecoderConfig(
        hidden_size=16, intermediate_size=8 * size, num_layers=1, num_heads=values, num_kv_heads=heads, head_dim=8,
        vocab_size=size, rms_norm_eps=1e-6, rope=RopeConfig(1e4, dim=4), max_position_embeddings=8,
        tie_word_embeddings=False, dtype="float32", masks=(AttentionMask(True),), qk_norm=True,
        moe=MoeConfig(4, 2, 8 * size, norm_topk_prob=True, shared_size=3 * size) if experts else None,
        gated_delta=GatedDeltaConfig((0,) if recurrent else (1,), 4, heads, values, 4, 6),
    )  # fmt: skip
    adapt = GroupedWeights if grouped else TextWeights
    check_layer(size, config, Stored(seed, adapt=adapt))


NUMBERS = st.sampled_from([0.0, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf]) | st.floats(-9, 9, width=32)


@settings(max_examples=40)
@given(data=st.data(), size=st.sampled_from([2, 3, 4]), own=st.integers(1, 4), rows=st.integers(1, 3))
def test_the_choice_of_ranks_is_that_of_one(data: st.DataObject, size: int, own: int, rows: int):
    vocab = size * own
    logits = [data.draw(st.lists(NUMBERS, min_size=vocab, max_size=vocab)) for _ in range(rows)]

    def choices(sampler: Sampler, ids: range) -> list[list[int]]:
        heads = (torch.tensor(row)[ids.start : ids.stop, None] for row in logits)
        one = torch.ones(1, 1)
        return [
            [sampler.choose(one, head).item(), sampler.propose(one, head).item()] for head in heads
        ]  # a row alone, because NaN times 0 would be NaN in all

    whole = choices(Sampler(vocab, BACKEND), range(vocab))
    found = on_ranks(size, lambda comm: choices(ShardedSampler(vocab, BACKEND, comm), comm.part(vocab)))
    assert all(each == found[0] for each in found)
    for (choice, proposal), (right, right_proposal) in zip(found[0], whole, strict=True):
        assert choice == right
        assert right == NOT_FINITE or proposal == right_proposal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_are_exact_in_a_vocabulary_of_a_quarter_of_a_million(dtype: torch.dtype):
    """Logits of a GPU are in bfloat16, which holds no such id: ids are exchanged in fp32."""
    own = 128_000

    def choose(comm: Comm) -> int:
        head = torch.zeros(own, 1, dtype=dtype)
        head[own - 2] = comm.rank
        sampler = ShardedSampler(2 * own, TorchBackend(torch.device("cpu")), comm)
        return int(sampler.choose(torch.ones(1, 1, dtype=dtype), head))

    assert on_ranks(2, choose) == [2 * own - 2] * 2


def test_a_device_gathers_into_memory_that_a_captured_graph_may_read_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comm_device, "start_process_group", lambda *_: None)
    monkeypatch.setattr(comm_device, "_gather", lambda gathered, x: gathered.copy_(x))
    comm = comm_device.DeviceComm(Meeting(0, 1, Path("store"), 1), "gloo")
    first = comm.all_gather(torch.ones(3))
    second = comm.all_gather(torch.full((2, 4), 2.0))
    assert first.data_ptr() == second.data_ptr() and second.shape == (1, 2, 4) and (second == 2).all()


def test_a_sum_is_added_in_the_order_of_ranks_whatever_is_beside_it():
    wide = torch.randn(3, 4, 700)
    sums = on_ranks(3, lambda comm: comm.all_reduce(wide[comm.rank].clone()))
    narrow = on_ranks(3, lambda comm: comm.all_reduce(wide[comm.rank, :1, 13:14].clone()))
    in_order = (wide[0] + wide[1]) + wide[2]
    assert all(torch.equal(each, in_order) for each in sums)
    assert all(torch.equal(each, in_order[:1, 13:14]) for each in narrow)


# The engine


@dataclasses.dataclass
class SharedSubject(Subject):
    """A pair that `size` ranks share. The draft of `draft_size` 1 is whole on each."""

    size: int = 2
    draft_size: int | None = None
    ranks: list[ThreadRanks] = dataclasses.field(default_factory=list)

    def build(self, case: Case, block: int, kv_pages: int | None) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lossless, "build_engine", self._build)
            return super().build(case, block, kv_pages)

    def _build(self, config: EngineConfig) -> Engine:
        sizes: dict[str, Any] = {"tensor_parallel_size": self.size, "draft_tensor_parallel_size": self.draft_size}
        config = replace(config, max_graphs=4, **sizes)
        self.ranks.append(ThreadRanks(config))
        return self.ranks[-1].engine

    def check_and_close(self) -> None:
        """Close the engines, and assert that all ranks verified alike in every step."""
        for ranks in self.ranks:
            ranks.close()
            ranks.check_alike()
        self.ranks.clear()


def subjects(pair: Pair, count: int = 3, tokens: int = 10, **options: Any) -> tuple[Subject, SharedSubject]:
    """Return a pair on one rank, and shared."""
    prompts = [replace(p, max_tokens=min(p.max_tokens, tokens)) for p in random_prompts(pair.vocab_size, 12)[-count:]]
    of_pair = pair.target, pair.draft, prompts
    return Subject("alone", *of_pair), SharedSubject("shared", *of_pair, **options)


CASES = {
    "alone, two ranks": (Case(), {}),
    "drawn, with filters and penalties": (Case(concurrency=4, temperature=None, sampling="all"), {}),
    "preempted": (Case(concurrency=4, page_size=4, preempted=True, chunked=True), {}),
    "cached": (Case(concurrency=4, page_size=4, cached=True, block_size=4), {}),
    "four ranks, two KV heads": (Case(concurrency=4), {"size": 4}),
    "four ranks, one KV head, a whole draft": (Case(concurrency=4, temperature=None), {"size": 4, "draft_size": 1}),
    "eight ranks, two KV heads": (Case(concurrency=4), {"size": 8}),
    "four ranks, a hybrid": (Case(concurrency=4, page_size=4, cached=True), {"size": 4}),
    "from graphs": (Case(concurrency=4, path="graphs", page_size=4, cached=True), {}),
    "overlapped": (Case(concurrency=4, path="overlap"), {}),
    "a hybrid, cached": (Case(concurrency=4, page_size=4, cached=True), {}),
    "a whole draft on each": (Case(concurrency=4, temperature=0.7), {"draft_size": 1}),
}


FAST_CASES = {
    *("drawn, with filters and penalties", "preempted", "a hybrid, cached", "a whole draft on each"),
    "four ranks, two KV heads",
}
OUTNUMBERED: dict[str, dict[str, Any]] = {
    "four ranks, two KV heads": LUCKY | {"seed": 30, "vocab_size": 4, "num_kv_heads": 2},
    "four ranks, one KV head, a whole draft": LUCKY | {"seed": 26, "vocab_size": 4, "num_kv_heads": 1},
    "eight ranks, two KV heads": LUCKY | {"seed": 7, "vocab_size": 8, "num_kv_heads": 2, "num_heads": 8},
    "four ranks, a hybrid": LUCKY | {"seed": 25, "vocab_size": 4, "num_kv_heads": 2, "k_heads": 2},
}
"""Pairs, found by trying seeds, that have fewer KV heads or key heads than ranks share them."""


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("lucky"), **LUCKY_EVEN)


@pytest.mark.parametrize("name", fast_ones(CASES, FAST_CASES))
def test_dflash_on_ranks_changes_no_token(tmp_path: Path, lucky: Pair, name: str):
    """On equals off exactly on the same ranks, equals one rank by the margin rule, and accepts as many drafts."""
    case, options = CASES[name]
    pair = lucky
    if "hybrid" in name or name in OUTNUMBERED:
        pair = (make_hybrid_pair if "hybrid" in name else make_pair)(tmp_path, **OUTNUMBERED.get(name, LUCKY_EVEN))
    alone, shared = subjects(pair, **options)
    run = shared.run(case)
    off = shared.compare(run.texts, case)
    shared.check_and_close()
    assert off.tokens > 20 and not off.differences
    assert_lossless(alone.compare(run.texts, case))
    assert (run.preemptions > 0, run.cached_tokens > 0) == (case.preempted, case.cached)
    by_one = alone.run(case)
    assert run.cached_tokens == by_one.cached_tokens or case.preempted
    assert run.acceptance_length == pytest.approx(by_one.acceptance_length, abs=0.1)
    assert run.acceptance_length > 1.2


SPARSE = {
    "Qwen3-MoE": {"experts": 8, "dense_layers": (1,)},
    "gpt-oss": GPT_OSS,
    "gpt-oss, mxfp4": GPT_OSS | {"mxfp4": True},
}


HYBRID = {
    "Qwen3.5": {},
    "Qwen3.5-MoE": {"experts": 4},
    "Qwen3.5-MoE, one by one": {"experts": 4, "fused": False, "multimodal": True},
    "Qwen3-Next": {"experts": 4, "grouped": True},
}


def pair_of(folder: Path, name: str, **shape: Any) -> Pair:
    """Return a random pair whose target is of a family."""
    if name in HYBRID:
        return make_hybrid_pair(folder, **HYBRID[name] | shape)
    return make_pair(folder, **(FAMILIES | SPARSE)[name] | shape)


@pytest.mark.parametrize("name", fast_ones([*FAMILIES, *SPARSE, *HYBRID], [*FAMILIES, *SPARSE, *HYBRID][::3]))
def test_every_family_is_shared(tmp_path: Path, name: str):
    """Four ranks have two KV heads, and two where an expert has two groups of columns."""
    size = 2 if "experts" in HYBRID.get(name, {}) else 4
    made = pair_of(tmp_path, name, vocab_size=96, block_size=4, **({"expert_size": 32} if name in SPARSE else {}))
    alone, shared = subjects(made, count=2, tokens=9, size=size)
    texts = shared.run(Case(concurrency=2, block_size=4)).texts
    shared.check_and_close()
    assert_lossless(alone.compare(texts, Case()))


def test_checkpoints_are_as_many_as_the_rank_with_the_fewest_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from app.engine.load import memory

    pair, given, own = make_hybrid_pair(tmp_path, vocab_size=96), iter([5, 3]), memory.checkpoints_in
    config = EngineConfig(
        pair.target, device="cpu", max_num_seqs=2, tensor_parallel_size=2, state_cache_memory=1 << 20, **UNTIMED
    )
    by_one = build_engine(replace(config, tensor_parallel_size=1)).states
    ranks = ThreadRanks(config)
    by_two = ranks.engine.states
    ranks.close()
    assert by_one and by_two and by_two.num_checkpoints == pytest.approx(by_one.num_checkpoints, rel=0.1)
    assert 2 * by_two.slot_bytes == pytest.approx(by_one.slot_bytes, rel=0.1), "each rank has the states of its heads"
    monkeypatch.setattr(memory, "checkpoints_in", lambda *args: min(own(*args), next(given)))
    ranks = ThreadRanks(config)
    assert ranks.engine.states and ranks.engine.states.num_checkpoints == 3
    ranks.close()


def test_a_follower_gets_no_texts_and_each_message_once(lucky: Pair):
    _, shared = subjects(lucky)
    shared.run(Case(concurrency=4, temperature=None, sampling="penalties"))
    messages = [decode(message) for message in shared.ranks[0].messages]
    shared.check_and_close()
    assert [message.number for message in messages] == list(range(len(messages)))
    steps = [message.argument for message in messages if isinstance(message.argument, StepInputs)]
    rows = [rows for step in steps for rows in step.sampling]
    assert rows and not any(each.penalties for each in rows)


def test_a_message_that_is_lost_ends_a_follower_by_name():
    messages = iter([encode(Message(1, []))])
    with pytest.raises(RuntimeError, match="message 1 of rank 0 came instead of message 0"):
        follow(Follower(), lambda _: next(messages))


def test_a_scrub_is_sent_with_the_slots_of_each_pool():
    assert decode(encode(Message(3, [[1, 2], []]))) == Message(3, [[1, 2], []])


class Follower(ModelRunner):
    """Runner of a follower whose device fails in the step `failing`, which shows when that is read."""

    def __init__(self, failing: int = 0) -> None:
        self.backend = BACKEND
        self.failing = failing
        self.read: list[int] = []

    def launch(self, inputs: StepInputs) -> PendingStep:
        number = inputs.target.prev_rows[0]

        def wait() -> Tensor:
            self.read.append(number)
            if number == self.failing:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return torch.zeros(1, 1)

        return PendingStep(wait)


def test_a_follower_whose_device_fails_behind_a_launch_ends_because_it_reads_when_rank_0_is_silent():
    """It reads no step behind which the next one has come, so that steps which are launched ahead stay ahead."""
    steps = [encode(Message(number, empty_step(number))) for number in range(4)]
    messages, waited = iter([steps[0], steps[1], None, steps[2], steps[3], None]), []

    def receive(milliseconds: int | None) -> bytes | None:
        waited.append(milliseconds)
        return next(messages)

    follower = Follower(failing=3)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        follow(follower, receive)
    assert follower.read == [1, 3]
    assert [milliseconds is None for milliseconds in waited] == [True, False, False, True, False, False]


def empty_step(number: int) -> StepInputs:
    target = replace(Layout(4).target(Batch(), None, 0), prev_rows=np.array([number], dtype=np.int32))
    return StepInputs(target=target, draft=None, sampling=[], plain_sequences=None, in_graph=False)


def test_a_step_that_raises_ends_the_engine_of_ranks(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    """Other ranks have begun it, so it cannot run again in parts."""
    config = EngineConfig(lucky.target, None, device="cpu", max_num_seqs=2, tensor_parallel_size=2, **UNTIMED)
    ranks = ThreadRanks(config)
    core = ranks.engine.core
    monkeypatch.setattr(core.runner.forward.target, "forward", lambda *_: 1 / 0)
    for name in ("a", "b"):
        core.add(Request(name, (1, 2), max_tokens=3))
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert core.runner.is_fatal(ValueError())
    ranks.meeting.barrier.abort()
    with pytest.raises(threading.BrokenBarrierError):
        ranks.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sequence_that_is_nan_on_one_rank_ends_alone_and_leaves_no_page_dirty_on_any(lucky: Pair, temperature: float):
    """The other rank writes NaN too, behind the next sum, and scrubs these pages before another sequence has them."""
    sizes: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64, "page_size": 4, "kv_cache_memory": 360 << 10}
    ranks = ThreadRanks(
        EngineConfig(lucky.target, lucky.draft, device="cpu", tensor_parallel_size=2, **UNTIMED | sizes)
    )
    core = ranks.engine.core
    late = check_that_nan_ends_one_alone(core, temperature)
    again = core.run([replace(late, request_id=str(i), token_ids=(i, *late.token_ids)) for i in range(3)])
    ranks.close()
    assert all(map(NOT_FINITE.__ne__, itertools.chain(*again.values())))
    assert any(isinstance(decode(message).argument, list) for message in ranks.messages)
    ranks.check_alike()


def test_ranks_launch_alike_because_none_times_its_own_ways(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    def timed(_: object, *, tune: bool) -> None:
        assert not tune, "a rank has chosen by its own clock"

    monkeypatch.setattr("app.engine.cpu.backend.CpuBackend.end_of_load", timed)
    config = EngineConfig(lucky.target, None, device="cpu", max_model_len=32, tensor_parallel_size=2, **UNTIMED)
    ThreadRanks(config).close()
    with pytest.raises(AssertionError, match="own clock"):
        build.build_engine(replace(config, tensor_parallel_size=1))


def test_pages_are_those_of_the_rank_with_the_least_memory(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    own, page = build.kv_bytes, 16 * 2 * 4 * 4 * 16 * 4  # tokens, K and V, layers, KV heads, head dim, bytes
    given = iter([7 * page, 6 * page])
    monkeypatch.setattr(build, "kv_bytes", lambda *args, **kw: min(own(*args, **kw), next(given)))
    config = EngineConfig(lucky.target, None, device="cpu", max_model_len=32, tensor_parallel_size=2, **UNTIMED)
    ranks = ThreadRanks(config)
    pages = ranks.engine.core.scheduler.pool.num_usable
    ranks.close()
    assert pages == 5, "one is for padding"


# Weights


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Callable[[], CheckpointWeights]]:
    pair = make_pair(tmp_path, shards=2)
    yield lambda: CheckpointWeights(Checkpoint(pair.target), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("name", "axis"), [("mlp.down_proj", 1), ("mlp.gate_proj", 0), ("self_attn.o_proj", 1)])
def test_the_parts_of_a_tensor_are_the_tensor(weights: Callable[[], CheckpointWeights], name: str, axis: int):
    name, shape = f"layers.1.{name}.weight", {"mlp.down_proj": (32, 64), "mlp.gate_proj": (64, 32)}.get(name, (32, 64))

    def part(*ranges: range) -> Tensor:
        return weights().get(name, *shape, part=Part(axis, ranges))

    parts = [part(range(i, i + 16)) for i in range(0, shape[axis], 16)]
    assert torch.equal(part(range(16), range(24, 28)), torch.cat((parts[0], parts[1].narrow(axis, 8, 4)), dim=axis))
    assert torch.equal(torch.cat(parts, dim=axis), weights().get(name, *shape))
    assert all(part.is_contiguous() for part in parts)
    with pytest.raises(UnsupportedError, match=re.escape(f"has shape {list(shape)}, but config.json wants [7, 7]")):
        weights().get(name, 7, 7, part=Part(axis, (range(1),)))


def whole_tensors(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of tensors that two ranks read whole, without those of layers."""
    whole: set[str] = set()

    class Watched:
        def __init__(self, file: Any) -> None:
            self.file = file

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

        def get_tensor(self, name: str) -> Tensor:
            whole.add(re.sub(r".*layers\.\d+\.|.*model\.", "", name))
            return self.file.get_tensor(name)

    own = loader.safe_open
    monkeypatch.setattr(loader, "safe_open", lambda *args, **options: Watched(own(*args, **options)))
    ThreadRanks(
        EngineConfig(pair.target, pair.draft, device="cpu", max_num_seqs=1, tensor_parallel_size=2, **UNTIMED)
    ).close()
    return {name.removesuffix(".weight") for name in whole}


WHOLE = {
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "norm"),
    *("hidden_norm", "fc", "embed_tokens"),
}


@pytest.mark.parametrize("name", ["Qwen3, yarn", *SPARSE, *HYBRID])
def test_a_rank_reads_its_parts_alone(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    pair = pair_of(tmp_path, name, vocab_size=96, block_size=4)
    more = {"mlp.gate"} if "experts" in (FAMILIES | SPARSE | HYBRID)[name] else set()
    if "gpt-oss" in name:
        more = {"mlp.router", "mlp.router.bias", "mlp.experts.down_proj_bias", "self_attn.o_proj.bias"}
    elif name in HYBRID:
        more |= {"linear_attn.norm"} | ({"mlp.shared_expert_gate"} if more else set())
    assert whole_tensors(pair, monkeypatch) == WHOLE | more


@pytest.mark.parametrize("name", ["Qwen2.5", *SPARSE, "Qwen3.5", "Qwen3-Next"])
def test_loading_takes_the_share_of_a_rank_and_one_tensor_more(tmp_path: Path, name: str):
    """The embedding is whole on each rank, and here it is one of the largest tensors, as in real models."""
    pair = pair_of(tmp_path, name, vocab_size=512, dtype=torch.bfloat16)
    embedding, (own, peak, largest), (whole, _, _) = 512 * 32 * 4, loaded(pair, 2), loaded(pair, 1)
    print(f"{name}: a rank has {own} of {whole} bytes, and the peak is {peak - own} more; a tensor has {largest}")
    assert 2 * own - whole <= embedding + 0.05 * whole, "beside the embedding, small tensors alone are whole"
    assert peak - own <= largest


def test_loading_a_draft_takes_the_share_of_a_rank_and_its_part_of_one_matrix_twice(tmp_path: Path):
    """These are the rows of gate and up, and both in one. `fc` is whole on each rank, as all of its layers may be."""
    pair = make_pair(tmp_path, vocab_size=512, draft_layers=4)
    (own, peak, _), (whole, _, _) = loaded(pair, 2, "draft"), loaded(pair, 1, "draft")
    fc, gate_and_up = 32 * 64 * 4, 64 * 32 * 4
    assert 2 * own - whole <= fc + 0.05 * whole, "beside fc, small tensors alone are whole"
    assert peak - own <= 2 * gate_and_up
    assert loaded(pair, 2, "whole draft")[0] == whole


def loaded(pair: Pair, size: int, what: str = "target") -> tuple[int, int, int]:
    """Return the bytes of a model on rank 1 of `size`, those at the peak of its load, and those of a whole tensor."""
    folder, largest = pair.target if what == "target" else pair.draft, 0
    raw = read_config(pair.target)
    shape = target_config(raw)
    draft = replace(config := draft_config(read_config(pair.draft), shape), decoder=shard(config.decoder, size))
    comm = ThreadComm(1, thread_ranks.Meeting(size)) if size > 1 else ALONE
    shared = torch.nn.Parameter(torch.empty(0))  # of the target, so not counted
    with LiveBytes() as live:
        weights = CheckpointWeights(Checkpoint(folder), BACKEND.device, torch.float32)

        def noted(get: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def read(name: str, *shape: int, **how: Any) -> Tensor:
                nonlocal largest
                largest = max(largest, 4 * math.prod(shape))
                return live.note(get(name, *shape, **how))

            return read

        weights.get = noted(weights.get)
        kept = register_module_parameter_registration_hook(lambda module, name, parameter: live.note(parameter))
        if what == "target":
            model: torch.nn.Module = target_class(raw["model_type"])(shard(shape, size), weights, BACKEND, (), comm)
        elif what == "draft":
            model = DFlashModel(draft, weights, BACKEND, shared, shared, comm, comm)
        else:
            model = DFlashModel(config, weights, BACKEND, shared, shared, comm)
        own = live.now
        kept.remove()
    assert len(model.layers) == (pair.num_layers if what == "target" else pair.draft_layers)
    return own, live.peak, largest


# Refusals

QWEN3 = {"vocab_size": 96}


@pytest.mark.parametrize(
    ("shape", "wishes", "said"),
    [
        (QWEN3, {"tensor_parallel_size": 3}, "--tensor-parallel-size 3: the target has 4 attention heads, which 3 doe"),
        (
            QWEN3 | {"num_heads": 12, "num_kv_heads": 6},
            {"tensor_parallel_size": 4},
            "the target has 6 KV heads, which 4 does not divide and is no multiple of; give a divisor of it",
        ),
        ({"vocab_size": 97}, {"tensor_parallel_size": 2}, "97 tokens in its vocabulary, which 2 does not divide"),
        (QWEN3 | {"intermediate_size": 63}, {"tensor_parallel_size": 2}, "63 columns in its MLP"),
        (
            QWEN3 | {"experts": 4, "expert_size": 24},
            {"tensor_parallel_size": 2},
            "the target has 3 groups of 8 columns in each expert, which 2 does not divide",
        ),
        (
            QWEN3 | {"experts": 4, "dense_layers": (1,), "intermediate_size": 63},
            {"tensor_parallel_size": 2},
            "the target has 63 columns in its MLP",
        ),
        (QWEN3, {"tensor_parallel_size": 2, "draft_tensor_parallel_size": 4}, "--tensor-parallel-size, which is 2"),
        (QWEN3, {"draft_tensor_parallel_size": 2}, "give 1 or --tensor-parallel-size, which is 1"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name_before_a_rank_is_started(tmp_path, shape, wishes, said):
    pair = make_pair(tmp_path, **shape)

    def started(backend: Any) -> Any:
        raise AssertionError("ranks were started")

    with pytest.raises(UnsupportedError, match=said):
        build_engine(EngineConfig(pair.target, pair.draft, device="cpu", **UNTIMED | wishes), join=started)


def test_a_draft_that_cannot_be_split_as_its_target_can_is_whole_on_each_rank_if_the_user_says_so(tmp_path: Path):
    sizes = {"vocab_size": 96, "num_heads": 6, "hidden_size": 48}
    target, draft = (make_pair(tmp_path / str(heads), num_kv_heads=heads, **sizes) for heads in (2, 3))
    config = EngineConfig(target.target, draft.draft, device="cpu", max_model_len=64, tensor_parallel_size=2, **UNTIMED)
    with pytest.raises(UnsupportedError, match=r"the draft has 3 KV heads, .* --draft-tensor-parallel-size 1 leaves"):
        build_engine(config)
    texts = []
    for wishes in ({"draft_tensor_parallel_size": 1}, {"draft": None}):
        ranks = ThreadRanks(replace(config, **wishes))
        texts.append(ranks.engine.core.run([Request("a", (7, 1, 2), 16)]))
        ranks.close()
        ranks.check_alike()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"k_heads": 1, "v_heads": 3}, "the target has 3 value heads in its recurrent layers, which 2 does not divide"),
        ({"k_heads": 3, "v_heads": 6}, "the target has 3 key heads in its recurrent layers, which 2 does not divide"),
    ],
)
def test_a_hybrid_whose_heads_do_not_divide_is_refused_with_the_number(tmp_path, shape, said):
    pair = make_hybrid_pair(tmp_path, vocab_size=96, **shape)
    with pytest.raises(UnsupportedError, match=said):
        build_engine(EngineConfig(pair.target, pair.draft, device="cpu", tensor_parallel_size=2, **UNTIMED))


def test_ranks_without_devices_of_their_own_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    four = SimpleNamespace(device_count=lambda: 4)
    check_ranks(torch.device("cuda:2"), 2, four, "CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,4,6")
    said = "--tensor-parallel-size 4: .* cuda:2 to cuda:5, and 4 are visible with CUDA_VISIBLE_DEVICES=0,2,4,6"
    with pytest.raises(UnsupportedError, match=said):
        check_ranks(torch.device("cuda:2"), 4, four, "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(("device", "opened"), [("cuda:2", "cuda:3"), ("cuda", "cuda:1"), ("cpu", "cpu")])
def test_each_rank_opens_the_next_device(monkeypatch: pytest.MonkeyPatch, device: str, opened: str):
    made: list[torch.device] = []
    monkeypatch.setattr(factory, "backend_class", lambda kind, batch_invariant: made.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    factory.make_backend(device, rank=1)
    assert made == [torch.device(opened)]


# Graphs and memory of a device


class RankedBackend(CpuBackend):
    """CPU that captures graphs and measures a step's memory like a device. `failing` may fail a capture of a rank."""

    memory_is_host = False
    captures = True

    def __init__(self, rank: int, failing: Callable[[int, list[AttentionMetadata]], bool]) -> None:
        super().__init__(torch.device("cpu"))
        self._rank, self._failing = rank, failing

    def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
        graph = super().capture(run, metas)
        if self._failing(self._rank, metas):
            raise RuntimeError("the error code is 207008")
        return graph

    def explain(self, error: BaseException) -> str | None:
        return explain(str(error))

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def peak_memory(self, run: Callable[[], object]) -> int:
        run()
        return 0


def never(rank: int, metas: list[AttentionMetadata]) -> bool:
    return False


def ranked(
    monkeypatch: pytest.MonkeyPatch, pair: Pair, failing: Callable[..., bool] = never, **wishes: Any
) -> tuple[ThreadRanks, dict[str, list[int]]]:
    """Return the closed ranks of an engine, and its texts."""
    monkeypatch.setattr(build, "make_backend", lambda device, rank, **_: RankedBackend(rank, failing))
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory": 1 << 20, "max_graphs": 10}
    ranks = ThreadRanks(
        EngineConfig(pair.target, pair.draft, device="cpu", tensor_parallel_size=2, **UNTIMED | sizes | wishes)
    )
    requests = [Request(str(i), (3, 1, 2, i), 12 + i, SamplingParams(0.5 * (i % 2), seed=i)) for i in range(4)]
    texts = ranks.engine.core.run(requests)
    ranks.close()
    ranks.check_alike()
    return ranks, texts


def test_ranks_profile_a_step_each_by_itself_before_the_first_message(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    ranks, texts = ranked(monkeypatch, lucky)
    assert [decode(message).number for message in ranks.messages] == list(range(len(ranks.messages)))
    assert ranks.engine.core.runner.graphs
    assert {len(text) for text in texts.values()} == {12, 13, 14, 15}


def test_a_rank_keeps_memory_for_graphs_of_its_own_heads(lucky: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = list[list[int]]()

    def graph_bytes(backend: RankedBackend, decoders: Sequence[DecoderConfig]) -> int:
        noted.append([decoder.num_heads for decoder in decoders])
        return 0

    monkeypatch.setattr(RankedBackend, "graph_bytes", graph_bytes)
    ranked(monkeypatch, lucky)
    assert noted == [[2, 2], [2, 2]]


def test_a_graph_that_one_rank_cannot_capture_is_left_out_by_all(lucky, monkeypatch, caplog):
    """Targets and drafts are. The exchange comes before a replay, which the others could not make alone."""

    def failing(rank: int, metas: list[AttentionMetadata]) -> bool:
        return rank == 1 and len(metas[0].query_lens) == 2  # a block of two, or a sequence with padding behind it

    ranks, texts = ranked(monkeypatch, lucky, failing)
    assert "on rank 1: RuntimeError: the error code is 207008 (207008: no stream" in caplog.text
    sizes = ranks.engine.core.runner.layout.graphs
    assert sizes.targets == [(2, 2), (4, 4), (4, 16), (4, 32), (4, 64)]
    assert sizes.drafts == [(1, 16), (4, 16)]
    assert ranked(monkeypatch, lucky, enforce_eager=True)[1] == texts


@pytest.mark.parametrize("what", ["target of 4 sequences", "draft of 4 blocks"])
def test_a_graph_that_no_larger_one_replaces_ends_all_ranks_with_a_sentence(lucky, monkeypatch, what):
    num_captured = [0, 0]
    last_target = 5 if "draft" in what else 0

    def failing(rank: int, metas: list[AttentionMetadata]) -> bool:
        num_captured[rank] += 1
        return rank == 1 and num_captured[rank] > last_target

    with pytest.raises(UnsupportedError, match=f"{what} .* which all ranks need, .*--enforce-eager"):
        ranked(monkeypatch, lucky, failing, max_graphs=7)


@pytest.mark.parametrize("refusing", [(0, 1), (0,)], ids=["all", "one"])
def test_ranks_run_without_graphs_only_if_all_of_them_refuse(lucky, monkeypatch, caplog, refusing):
    """A rank that goes on alone would make other collectives."""

    class Refusing(RankedBackend):
        def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
            graph = super().capture(run, metas)
            if self._rank in refusing:
                raise GraphsRefusedError("attention with sinks is refused")
            return graph

    eager = ranked(monkeypatch, lucky, enforce_eager=True)[1]
    monkeypatch.setattr(sys.modules[__name__], "RankedBackend", Refusing)
    if refusing == (0,):
        with pytest.raises(UnsupportedError, match="which all ranks need"):
            ranked(monkeypatch, lucky)
        assert "steps run without graphs" not in caplog.text
        return
    ranks, texts = ranked(monkeypatch, lucky)
    assert texts == eager and ranks.engine.core.runner.graphs is None
    assert "steps run without graphs" in caplog.text


def test_a_rank_that_fails_before_a_capture_ends_all(lucky: Pair, monkeypatch: pytest.MonkeyPatch):
    """It has left others in their collectives, so it must not say that it has lost a graph alone."""

    class Broken(RankedBackend):
        def capture(self, run: Callable[[], tuple[Tensor, ...]], metas: list[AttentionMetadata]) -> Graph:
            if self._rank == 1:
                raise RuntimeError("out of memory in the warm-up")
            return super().capture(run, metas)

    monkeypatch.setattr(sys.modules[__name__], "RankedBackend", Broken)
    with pytest.raises(RuntimeError, match="out of memory in the warm-up"):
        ranked(monkeypatch, lucky)


def test_a_rank_that_does_not_come_is_told_by_the_flag(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"rank 0 cannot join 2 ranks \(--distributed-timeout-seconds 1, "):
        start_process_group(Meeting(0, 2, tmp_path / "store", 1), "gloo")


def test_an_interface_that_is_not_there_is_told_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(RuntimeError, match="GLOO_SOCKET_IFNAME nowhere"):
        start_process_group(Meeting(0, 2, tmp_path / "store", 60), "gloo")


# Processes


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('chatter'); print('ValueError: torn'); raise SystemExit(1)", "ended with exit code 1: ValueError: torn"),  # noqa: E501
        ("import os; print('chatter', flush=True); os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_the_end_of_a_rank_is_told_in_a_sentence(tmp_path: Path, program: str, said: str):
    told: list[str] = []
    followers = Followers("{}\n", 2, tmp_path, told.append, (sys.executable, "-c", program))
    followers.start()
    followers.wait_for_end(60)
    followers.close()
    assert told == [f"rank 1 {said}"]


def test_ranks_that_are_closed_tell_no_end(tmp_path: Path):
    told: list[str] = []
    followers = Followers("{}\n", 3, tmp_path, told.append, (sys.executable, "-c", "import sys; sys.stdin.read()"))
    followers.start()
    followers.close()
    followers.wait_for_end(60)
    assert told == []
