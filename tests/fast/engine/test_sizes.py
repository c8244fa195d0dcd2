"""Sizes the user left open are derived, and those that cannot work are refused with the number to use."""

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from app.config.engine import EngineConfig
from app.config.flags import serve_parser
from app.engine.cpu import backend as cpu_backend
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import Defaults
from app.engine.device.gated_delta import CHUNK
from app.engine.errors import UnsupportedError
from app.engine.load.engine import build_engine
from app.engine.load.memory import CHECKPOINTS_FRACTION, CPU_KV_BYTES, MIN_MODEL_LEN, PER_SEQUENCE, settle_pages
from app.engine.load.plan import MIN_BATCHED_TOKENS, PREFILL_SHARE, Sizes, settle_sizes
from app.engine.models.page_pool import SCRATCH_PAGES
from app.engine.npu import rules as npu_rules
from app.engine.schedule.pace import FEWEST_ROWS
from app.messages import Request, SamplingParams
from tests import UNTIMED
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.pairs import Pair, make_pair

DEFAULTS = Defaults(dtype=torch.float32, page_size=16, max_num_seqs=32)
LIMIT = 1000
MIB = 2**20


def asked(**wishes: int) -> EngineConfig:
    return EngineConfig(target=Path("somewhere"), **UNTIMED | wishes)


def settled(block_size: int = 8, **wishes: int) -> Sizes:
    return settle_sizes(asked(**wishes), block_size, LIMIT, DEFAULTS)


# Sizes


@pytest.mark.parametrize(("block_size", "seqs"), [(1, 256), (16, 64)])
def test_with_a_draft_a_device_may_run_fewer_sequences_by_default(block_size: int, seqs: int) -> None:
    defaults = Defaults(dtype=torch.float32, page_size=16, max_num_seqs=256, max_blocks=64)
    assert settle_sizes(asked(), block_size, LIMIT, defaults).max_num_seqs == seqs
    assert settle_sizes(asked(max_num_seqs=200), block_size, LIMIT, defaults).max_num_seqs == 200


@pytest.mark.parametrize(
    ("block_size", "wishes", "sizes"),
    [
        pytest.param(8, {}, (LIMIT, 32, 2048, 16), id="the device and the model decide"),
        pytest.param(16, {"max_num_seqs": 200}, (LIMIT, 200, 200 * 16 + 512, 16), id="blocks, and prefill goes on"),
        pytest.param(16, {"max_num_seqs": 2}, (LIMIT, 2, 2048, 16), id="at least 2048 tokens"),
        *((8, {"max_num_batched_tokens": n}, (LIMIT, seqs, n, 16)) for n, seqs in ((64, 8), (63, 7), (8, 1))),
        pytest.param(8, {"max_num_batched_tokens": 100_000}, (LIMIT, 32, 100_000, 16), id="at most the device's"),
        pytest.param(
            8,
            {"max_model_len": 500, "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 128},
            (500, 4, 32, 128),
            id="wishes are kept",
        ),
    ],
)
def test_sizes_that_are_left_open_follow_from_the_others(block_size, wishes, sizes):
    assert settled(block_size, **wishes) == Sizes(block_size, *sizes)


@settings(max_examples=100)
@given(st.integers(1, 32), st.integers(1, 300), st.integers(1, 3000))
def test_a_budget_too_small_is_refused_and_either_number_it_names_will_do(block_size, seqs, tokens):
    assume(block_size <= tokens < seqs * block_size)
    with pytest.raises(UnsupportedError, match=rf"--max-num-batched-tokens {tokens} is too small") as refusal:
        settled(block_size, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    at_least, at_most = map(int, re.findall(r"at least (\d+), or --max-num-seqs (\d+) at most", str(refusal.value))[0])
    assert at_least == seqs * block_size
    assert settled(block_size, max_num_seqs=seqs, max_num_batched_tokens=at_least).max_num_seqs == seqs
    assert settled(block_size, max_num_seqs=at_most, max_num_batched_tokens=tokens).max_num_seqs == at_most
    with pytest.raises(UnsupportedError):
        settled(block_size, max_num_seqs=at_most + 1, max_num_batched_tokens=tokens)


def test_a_budget_below_one_block_is_refused_with_the_least_that_works():
    with pytest.raises(UnsupportedError, match="give at least 16"):
        settled(block_size=16, max_num_batched_tokens=15)


@pytest.mark.parametrize(("page_size", "pages"), [(1, 516), (16, 33), (128, 5)])
def test_tables_reach_two_blocks_past_the_context_limit(page_size, pages):
    sizes = settled(block_size=8, max_model_len=500, page_size=page_size)
    assert sizes.padded_len == 516
    assert sizes.pages_per_sequence == pages


def test_help_has_the_defaults_of_the_devices() -> None:
    cpu, shown = CpuBackend.defaults, " ".join(serve_parser().format_help().split())
    assert f"(default: {cpu.max_num_seqs} on a CPU, 256 on NPU and GPU, 64 on a GPU with a draft)" in shown
    assert f"(default: {npu_rules.PAGE_SIZE} on NPU, {cpu.page_size} elsewhere)" in shown
    assert f"(default: on a CPU {CPU_KV_BYTES >> 30}GiB, or half of free memory" in shown
    assert f"(default: {PER_SEQUENCE} states for each of --max-num-seqs, in at most a quarter" in shown
    assert CHECKPOINTS_FRACTION == 1 / 4
    assert f"(default: {MIN_BATCHED_TOKENS}, or {PREFILL_SHARE} more than the blocks" in shown


# Pages


@pytest.mark.parametrize(
    ("kv_bytes", "pages"), [(20 * 16 * 64 + 63, 20), (1 << 40, 3 * 8 + SCRATCH_PAGES)], ids=["memory", "sequences"]
)
def test_pages_are_as_many_as_the_memory_holds_and_all_sequences_can_use(kv_bytes, pages):
    config = asked(max_model_len=100, max_num_seqs=3)
    sizes = settle_sizes(config, 8, LIMIT, DEFAULTS)  # pages of 16 tokens, 8 pages a sequence
    assert settle_pages(config, sizes, kv_bytes, 64) == (sizes, pages)


def test_one_sequence_of_the_asked_length_must_fit_and_the_refusal_names_the_memory_it_takes():
    config = asked(max_model_len=100)
    sizes = settle_sizes(config, 8, LIMIT, DEFAULTS)
    token_bytes = 3 * MIB // 16 + 7  # no whole number of MiB
    page_bytes = 16 * token_bytes
    enough = (8 + SCRATCH_PAGES) * page_bytes
    assert settle_pages(config, sizes, enough, token_bytes) == (sizes, 8 + SCRATCH_PAGES)
    with pytest.raises(UnsupportedError, match="--kv-cache-memory"):
        settle_pages(config, sizes, -5 * MIB, token_bytes)  # all of it is spent already
    with pytest.raises(UnsupportedError, match="--max-model-len 100") as refusal:
        settle_pages(config, sizes, enough - 1, token_bytes)
    (mebibytes,) = re.findall(r"--kv-cache-memory (\d+)MiB", str(refusal.value))
    assert settle_pages(config, sizes, int(mebibytes) * MIB, token_bytes)[1] >= 8 + SCRATCH_PAGES
    assert int(mebibytes) * MIB < enough + MIB


def test_a_context_that_memory_cuts_short_is_warned_of_with_the_memory_for_all_of_it(caplog):
    config = asked(max_num_seqs=1)
    sizes = settle_sizes(config, 8, LIMIT, DEFAULTS)
    whole = (sizes.pages_per_sequence + SCRATCH_PAGES) * 16 * MIB
    assert settle_pages(config, sizes, whole, MIB)[0].max_model_len == LIMIT and not caplog.records
    shorter, _ = settle_pages(config, sizes, whole - 1, MIB)
    (warned,) = caplog.records
    assert warned.levelname == "WARNING"
    said = f"context shortened from {LIMIT} to {shorter.max_model_len} tokens, because {whole // MIB} MiB for KV hold"
    assert said in warned.getMessage() and shorter.max_model_len < LIMIT
    mebibytes, length = map(int, re.findall(r"--kv-cache-memory (\d+)MiB, or --max-model-len (\d+)", caplog.text)[0])
    caplog.clear()
    assert settle_pages(config, sizes, mebibytes * MIB, MIB)[0].max_model_len == LIMIT
    meant = asked(max_num_seqs=1, max_model_len=length)
    assert settle_pages(meant, settle_sizes(meant, 8, LIMIT, DEFAULTS), whole - 1, MIB)[0].max_model_len == length
    assert not caplog.records


@settings(max_examples=100)
@given(st.integers(1, 16), st.sampled_from([1, 3, 16, 128]), st.integers(0, 3000))
def test_a_length_that_is_not_set_is_the_longest_that_fits(block_size, page_size, kv_tokens):
    config = asked(page_size=page_size)
    sizes = settle_sizes(config, block_size, LIMIT, DEFAULTS)
    pages = kv_tokens // page_size
    room = (pages - SCRATCH_PAGES) * page_size - 2 * block_size
    if room < MIN_MODEL_LEN:
        with pytest.raises(UnsupportedError):
            settle_pages(config, sizes, kv_tokens * 10, 10)
        return
    shorter, found = settle_pages(config, sizes, kv_tokens * 10, 10)
    assert shorter.max_model_len == min(LIMIT, room)
    assert shorter.pages_per_sequence + SCRATCH_PAGES <= found <= pages
    assert shorter.max_num_seqs == sizes.max_num_seqs


# Graphs


@pytest.mark.parametrize("page_size", [4, 16, 128])
def test_padding_has_slots_and_positions_in_the_largest_graphs(tmp_path: Path, page_size: int) -> None:
    pair = make_pair(tmp_path, block_size=16)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 20, "page_size": page_size}
    requests = [
        Request(f"r{i}", tuple(range(1, 6 + i % 6)), sampling=SamplingParams(seed=i), max_tokens=9) for i in range(11)
    ]
    texts = [
        build_engine(
            EngineConfig(target=pair.target, draft=pair.draft, device="cpu", enforce_eager=eager, **UNTIMED | sizes)
        ).core.run(requests)
        for eager in (True, False)
    ]
    assert texts[0] == texts[1]


def test_a_runner_without_references_frees_its_memory_at_once(tmp_path: Path):
    """The profile run's is dropped before KV memory is sized: a cycle would keep its pools until some collection."""
    pair = make_pair(tmp_path)
    engine = build_engine(
        EngineConfig(pair.target, pair.draft, device="cpu", dtype="float32", kv_cache_memory=1 << 20, **UNTIMED)
    )
    pools = [weakref.ref(pool) for pool in engine.core.runner.pools]
    gc.disable()
    try:
        del engine
        assert [pool() for pool in pools] == [None, None]
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


def test_kv_memory_that_does_not_fit_says_what_would(pair: Pair) -> None:
    with pytest.raises(UnsupportedError) as caught:
        build_engine(EngineConfig(pair.target, device="cpu", kv_cache_memory=1 << 60, **UNTIMED))
    told = str(caught.value)
    free, fitting = re.search(r"(\d+) MiB are free on cpu; give at most (\d+)MiB$", told).groups()  # type: ignore[union-attr]
    assert free == fitting and "for a step" not in told


@pytest.mark.parametrize(("dtype", "warned"), [("float16", 1), ("float32", 0)])
def test_a_dtype_that_is_slow_on_a_cpu_is_warned_of_once(pair, dtype, warned, caplog):
    build_engine(EngineConfig(pair.target, pair.draft, device="cpu", dtype=dtype, verify="full"))
    assert [record.levelname for record in caplog.records if "float16 is slow" in record.message] == [
        "WARNING"
    ] * warned


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_weights_that_do_not_fit_are_refused_with_both_numbers_before_any_is_read(pair, dtype, bytes_each, monkeypatch):
    read: list[str] = []
    parts = [load_file(folder / "model.safetensors") for folder in (pair.target, pair.draft)]
    needed = bytes_each * sum(tensor.numel() for part in parts for tensor in part.values())
    settings = {"device": "cpu", "dtype": dtype, "draft_quantization": "none", "kv_cache_memory": 1 << 20}
    config = EngineConfig(pair.target, pair.draft, **UNTIMED | settings)
    monkeypatch.setattr(cpu_backend.CpuBackend, "memory", lambda self: (needed - 1, 1 << 40))
    with pytest.raises(UnsupportedError) as caught:
        build_engine(config, on_progress=lambda stage, done, total: read.append(stage))
    told = str(caught.value)
    assert f"take {needed >> 20} MiB" in told and f"{needed - 1 >> 20} MiB are free on cpu" in told
    assert str(pair.target) in told and str(pair.draft) in told and not read


@pytest.mark.parametrize(("hybrid", "rows"), [(False, FEWEST_ROWS), (True, CHUNK)])
def test_a_cpu_begins_a_prompt_with_few_rows_and_a_hybrids_with_a_chunk_of_the_delta_rule(
    tmp_path: Path, hybrid: bool, rows: int
) -> None:
    make = make_hybrid_pair if hybrid else make_pair
    pair = make(tmp_path, max_position_embeddings=400)
    engine = build_engine(EngineConfig(pair.target, pair.draft, device="cpu", max_model_len=300, **UNTIMED))
    engine.core.add(Request("r", (1,) * 250, 4))
    engine.core.step()
    assert [seq.num_computed for seq in engine.core.scheduler.running] == [rows]
