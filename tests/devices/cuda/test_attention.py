"""Our attention is a softmax over each sequence's own tokens, however the launch is cut up, whatever lies elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.cuda import attention, launch
from app.engine.cuda.attention import TILE_ROWS, Geometry, Heads, geometry, paged_attention
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv
from app.engine.device.comparison import check_attention
from app.engine.errors import UnsupportedError
from app.engine.step.graph_plan import settle_graph_sizes
from tests.costs import landing_ones
from tests.fast.engine.paged import Paged

torch.set_num_threads(1)

CPU = torch.device("cpu")
LENGTHS = {
    "one block over its context": ([16], [150]),
    "a block and nothing before it": ([16], [16]),
    "plain decoding": ([1, 1, 1], [5, 130, 1]),
    "ragged widths": ([1, 16, 3, 7], [70, 90, 3, 64]),
    "blocks at page edges": ([16, 16, 16], [16, 17, 32]),
    "a decode step from a graph: the last sequence is padding": ([5, 1, 1, 38], [100, 1, 1, 38]),
    "plain decoding from a graph that is full": ([1, 1, 0], [5, 130, 0]),
    "one draft from a graph that is full": ([2, 0], [9, 0]),
    "plain decoding of two": ([1, 1], [9, 40]),
    "blocks from a graph that is full": ([16, 3, 0], [40, 20, 0]),
    "many more rows than a tile": ([40, 1], [77, 9]),
}
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    return CudaBackend(CPU)


def attended(case: Paged, backend: CudaBackend, **changed: int) -> torch.Tensor:
    least = {"least": changed["tokens"]} if "tokens" in changed else {}  # contexts here are short
    launched = replace(backend.geometry(case.q, case.kv, case.meta), **least | changed)
    return paged_attention(case.q, case.kv, case.meta, case.mask, launched, case.sinks)


def check(case: Paged, backend: CudaBackend, **changed: int) -> None:
    found, tolerance = attended(case, backend, **changed), TOLERANCES[case.dtype]
    assert found.dtype == case.dtype
    torch.testing.assert_close(found.double(), case.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_attention_is_a_softmax_over_each_sequences_own_tokens(backend, lengths, causal):
    check(Paged(*lengths, causal=causal), backend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("splits", landing_ones([1, 2, 8], (2,)))
def test_split_tokens_come_together_again_also_where_a_row_sees_nothing_of_a_part(backend, splits, causal):
    for lengths in ([16, 2], [17, 40]), ([1, 1], [3, 200]):
        check(Paged(*lengths, causal=causal), backend, splits=splits, tokens=16)


ORDERS: dict[str, Callable[[int, int], int]] = {
    "as they come": lambda split, count: split,
    "backwards": lambda split, count: count - 1 - split,
    "the middle one last": lambda split, count: (split + count // 2 + 1) % count,
}
"""The split that a program takes, by the order in which the interpreter runs it."""


def test_whichever_program_of_a_tile_is_last_adds_its_partial_results_to_the_same_bits(backend, monkeypatch):
    sinks, found = torch.tensor([-30.0, 0.5, 2.0, 4.0]), []
    for order in ORDERS.values():
        own = InterpreterBuilder.set_grid_idx
        with monkeypatch.context() as patched:
            patched.setattr(
                InterpreterBuilder,
                "set_grid_idx",
                lambda self, x, y, z, own=own, order=order: own(self, order(x, self.grid_dim[0]), y, z),
            )
            cases = [Paged([1, 1], [3, 200], window=window, sinks=sinks) for window in (None, 20)]
            for case in cases:
                check(case, backend, splits=4, tokens=16)
            found.append([attended(case, backend, splits=4, tokens=16) for case in cases])
        assert not launch.counters(CPU).any()
    assert all(torch.equal(*pair) for others in found[1:] for pair in zip(others, found[0], strict=True))


@pytest.mark.parametrize("query_lens", [[3, 1], [1, 1]], ids=["blocks", "single rows"])
@pytest.mark.parametrize("chunk", [0, 32])
def test_a_value_that_is_not_finite_reaches_all_rows_that_see_it_whatever_split_it_is_in(backend, chunk, query_lens):
    """The sequence ends with an error then. Without its split the text would be wrong in silence."""
    for token in (3, 60, 89):
        case = Paged(query_lens, [90, 40], garbage=0.0)
        case.kv.k[case.meta.page_table[0, token // 16], token % 16] = float("nan")
        o = attended(case, backend, splits=4, tokens=16, chunk=chunk)
        assert o[-2].isnan().all() and o[-1].isfinite().all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("window", landing_ones([1, 20, 1000], (20,)))
def test_a_row_sees_its_window_by_absolute_positions(backend, window, causal):
    for lengths in ([1, 16, 3, 7], [70, 90, 3, 64]), ([5, 1, 1, 38], [100, 1, 1, 38]), ([1, 1, 0], [5, 130, 0]):
        case = Paged(*lengths, causal=causal, window=window)
        check(case, backend)
        check(case, backend, splits=4, tokens=16)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_sink_takes_its_share_once_however_tokens_are_split(backend, splits, window):
    sinks = torch.tensor([-30.0, 0.5, 2.0, 4.0])
    for lengths in ([1, 16, 3, 7], [70, 90, 3, 64]), ([1, 1, 0], [5, 130, 0]):
        check(Paged(*lengths, window=window, sinks=sinks), backend, splits=splits, tokens=16)


def test_tokens_behind_every_rows_window_are_not_read(backend):
    case = Paged([16, 1], [150, 100], window=20, extra_columns=0)
    for line, kv_len, rows in zip(case.meta.page_table, case.host_seq_lens, case.query_lens, strict=True):
        line[: (kv_len - rows + 1 - 20) // 16] = 10**6
    check(case, backend, tokens=16)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_types_and_head_sizes_of_real_models(backend, dim, dtype):
    for splits in (1, 4):
        check(Paged([5, 3], [90, 20], heads=8, dim=dim, dtype=dtype), backend, splits=splits, tokens=32)
        check(Paged([1], [90], heads=8, dim=dim, dtype=dtype), backend, splits=splits, tokens=32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (5, 1), (10, 2)])
def test_any_number_of_query_heads_shares_a_kv_head(backend, heads, kv_heads):
    check(Paged([16, 1], [40, 5], heads=heads, kv_heads=kv_heads), backend)
    check(Paged([1, 1], [40, 5], heads=heads, kv_heads=kv_heads), backend)


@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_any_page_size(backend, page_size):
    for causal in (True, False):
        check(Paged([16, 2], [40, 17], page_size=page_size, causal=causal), backend)


def test_what_lies_in_unused_slots_and_pages_changes_no_bit(backend):
    for causal in (True, False):
        for splits in (1, 2):
            outputs = [
                attended(Paged([4, 1], [20, 33], causal=causal, garbage=garbage), backend, splits=splits, tokens=16)
                for garbage in (0.0, float("nan"), -1e30)
            ]
            assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_lengths_and_pages_are_read_when_the_kernel_runs(backend):
    """Host lengths of another step change nothing, so that a graph may be captured with them."""
    case = Paged([2, 16], [40, 90])
    meta = replace(case.meta, query_lens=[9, 9], host_seq_lens=[9, 9], plans={case.mask: None})
    found = backend.attention(case.q, case.kv, meta, case.mask)
    torch.testing.assert_close(found.double(), case.expected, atol=2e-6, rtol=2e-6)


def shape(query_lens: list[int]) -> Geometry:
    return geometry(query_lens, Heads(32, 8, 128), torch.bfloat16, multiprocessors=132)


@pytest.mark.parametrize("block_size", [2, 3, 10, 16])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 64])
def test_a_graphs_tiles_have_room_for_all_rows_however_a_replay_spreads_them(block_size, max_num_seqs):
    sizes = settle_graph_sizes(max_num_seqs, block_size, 48, draft_graphs=True, spare=0)
    for seqs, rows in sizes.targets:
        each = sizes.padding_rows(seqs, rows)
        at = shape([each] * seqs + [rows - each * seqs])
        assert at.rows == (1 if seqs == rows else TILE_ROWS)
        for longest in (1, min(rows, block_size)) if seqs < rows else (1,):
            spread = [longest] * (rows // longest)
            spread = [*spread, rows - sum(spread)][: seqs + 1]
            assert at.tiles >= sum(-(-count // at.rows) for count in spread)
            assert at.rows > 1 or at.tiles >= len(spread)


@pytest.mark.parametrize(("num_seqs", "splits"), [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2), (32, 1), (64, 1)])
def test_one_row_a_sequence_is_split_over_two_tiles_a_multiprocessor(num_seqs, splits):
    """A sequence without rows, which a graph has behind the others, takes no splits from them."""
    assert shape([1] * num_seqs).splits == shape([1] * num_seqs + [0]).splits == splits


@pytest.mark.parametrize(("num_seqs", "splits"), [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1), (32, 1), (64, 1)])
def test_blocks_are_split_over_one_tile_a_multiprocessor(num_seqs, splits):
    assert shape([16] * num_seqs).splits == shape([0] * num_seqs + [16 * num_seqs]).splits == splits
    assert shape([4] * num_seqs).splits == splits


def test_few_kv_heads_are_split_over_the_multiprocessors_too():
    """Of 27B's kind, whose 4 KV heads in 16 splits would leave half of an H200 idle."""
    for kv_heads, of_a_row, of_a_block in ((8, 32, 16), (4, 32, 32), (2, 32, 32)):
        for rows, splits in ((1, of_a_row), (16, of_a_block)):
            assert geometry([rows], Heads(32, kv_heads, 256), torch.bfloat16, 132).splits == splits


def test_a_single_row_has_two_stages_where_a_multiprocessor_has_two_programs():
    assert [shape([1] * num_seqs).stages for num_seqs in (1, 2, 32)] == [2, 5, 5]
    assert shape([16]).stages == 5
    assert geometry([1], Heads(32, 4, 128), torch.bfloat16, 132).stages == 5
    assert geometry([1], Heads(32, 8, 128), torch.bfloat16, 132, fixed=True).stages == 5


@pytest.mark.parametrize(
    ("query_lens", "tokens", "window", "used"),
    [
        ([1], 130, None, 3),
        ([1], 1000, None, 16),
        ([1], 1000, 300, 5),
        ([16], 150, None, 2),
        ([16, 3], 1000, None, 8),
        ([16, 3], 1000, 300, 3),
    ],
)
def test_a_split_has_64_tokens_of_a_row_and_128_of_a_block(backend, monkeypatch, query_lens, tokens, window, used):
    """Programs without tokens store nothing, and nothing waits for them."""
    launch_of, sums = attention.attend, []

    class Noted:
        def __getitem__(self, grid):
            def launched(*args, **options):
                sums.append(args[5].fill_(float("nan")))
                launch_of[grid](*args, **options)

            return launched

    monkeypatch.setattr(attention, "attend", Noted())
    case = Paged(query_lens, [tokens] * len(query_lens), window=window)
    check(case, backend, splits=32, tokens=16, least=backend.geometry(case.q, case.kv, case.meta).least)
    assert (sums[0][..., 1].isfinite().sum(dim=-1) == used).all()


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 16)], ids=str)
def test_long_contexts_of_few_kv_heads_come_together_from_all_splits(backend, monkeypatch, dtype, rows):
    monkeypatch.setattr(backend, "multiprocessors", 132)
    case = Paged([rows], [16_000], heads=4, kv_heads=1, dtype=dtype)
    assert backend.geometry(case.q, case.kv, case.meta).splits == 32
    check(case, backend)


def test_eager_steps_find_the_kernels_that_graphs_compiled():
    """No kernel is compiled while serving: one is compiled for being split, and not for a number of sequences."""
    sizes = settle_graph_sizes(48, 16, 48, draft_graphs=True, spare=0)
    captured = set()
    for seqs, rows in sizes.targets:
        each = sizes.padding_rows(seqs, rows)
        captured.add(compiled(shape([each] * seqs + [rows - each * seqs])))
    for num_seqs in range(1, 49):
        for width in (1, 2, 7, 16):
            assert compiled(shape([width] * num_seqs)) in captured


def compiled(at: Geometry) -> tuple[int, ...]:
    return at.rows, at.splits > 1, at.tokens, at.warps, at.stages


def test_more_sequences_than_are_searched_at_a_time_find_their_tiles(backend, monkeypatch):
    monkeypatch.setattr(attention, "SEARCHED_SEQS", 2)
    check(Paged([1, 16, 3, 0, 7], [70, 90, 3, 0, 64]), backend)


def test_long_groups_of_rows_have_tiles_enough_without_splits():
    for num_seqs, rows in ((1, 2048), (4, 512)):
        assert shape([rows] * num_seqs).splits == 1
    assert shape([64]).splits == 4


def test_start_up_checks_pass_and_find_a_draft_attention_that_stays_causal(backend):
    decoder = DecoderConfig(
        16, 16, 2, 4, 2, 16, 10, 1e-6, 1e4, 64, False, "float32", (AttentionMask(True, 9), AttentionMask(False, 9))
    )

    class Causal(CudaBackend):
        def attention(self, q_thd: torch.Tensor, kv: LayerKv, meta: AttentionMetadata, mask: AttentionMask, sinks=None):
            causal = mask._replace(causal=True)
            return super().attention(q_thd, kv, replace(meta, plans={causal: None}), causal)

    for rows in (1, 16):
        for dtype in TOLERANCES:
            check_attention(backend, decoder, 16, rows, dtype)
    with pytest.raises(UnsupportedError, match="bidirectional attention"):
        check_attention(Causal(CPU), decoder, 16, 16, torch.float32)


def test_what_the_kernels_cannot_do_is_refused_by_name(backend):
    backend.check(SimpleNamespace(head_dim=128, gated_delta=None), 16, 16, torch.bfloat16)
    for head_dim, block_size, said in (
        (96, 16, "head_dim 96"),
        (128, 17, "block of 17 rows.*--num-speculative-tokens 15"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            backend.check(SimpleNamespace(head_dim=head_dim, gated_delta=None), block_size, 16, torch.bfloat16)
