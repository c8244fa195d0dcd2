"""One operator for a forward on a CPU: like the layers, the same for a row in every batch, and few calls a step."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.cpu import linear
from app.engine.cpu.backend import CpuBackend
from app.engine.cpu.library import compiler, operators
from app.engine.device.base import AttentionMetadata, LayerKv
from app.engine.load.engine import Engine
from app.engine.models.kv_pool import KvPool
from app.engine.models.layers import StepRows
from app.messages import Request
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import FAMILIES, make_pair

pytestmark = pytest.mark.skipif(not shutil.which(compiler()), reason="there is no g++")
CPU = torch.device("cpu")
LENGTHS = ((3, 3), (1, 20), (9, 40), (16, 16), (4, 5))
"""(rows, tokens) of each sequence: whole prompts, one row and blocks behind a context."""
PAGE = 4
WIDE: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 136, "num_layers": 6}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    yield
    linear.set_up(threads=1, most_rows=1 << 30)


def engine_of(folder: Path, dtype: str = "float32", **shape: Any) -> Engine:
    pair = make_pair(folder, **shape)
    return make_engine(pair.target, pair.draft, page_size=PAGE, max_num_seqs=8, max_model_len=64, dtype=dtype)


class Rows:
    """Rows of some of LENGTHS over one random past, in pages that lie in no order."""

    def __init__(self, engine: Engine, chosen: tuple[int, ...] = tuple(range(len(LENGTHS)))) -> None:
        forward = engine.core.runner.forward
        self.model, self.backend, dtype = forward.target, forward.backend, forward.target.embedding.dtype
        noise = torch.Generator().manual_seed(5)
        self.pool = KvPool(self.model.config, 80, PAGE, dtype, self.backend)
        for kv in (self.pool.all_layers.k, self.pool.all_layers.v):
            kv.copy_(torch.randn(kv.shape, generator=noise))
        tokens = [torch.randint(0, 97, (rows,), generator=noise) for rows, _ in LENGTHS]
        tables = torch.randperm(79, generator=noise)[: 10 * len(LENGTHS)].view(len(LENGTHS), 10).int() + 1
        lengths = [LENGTHS[i] for i in chosen]
        counts, ends = zip(*lengths, strict=True)
        positions = torch.cat([torch.arange(end - rows, end) for rows, end in lengths])
        seq_ids = torch.repeat_interleave(torch.tensor(chosen), torch.tensor(counts))
        slots = tables[seq_ids, positions // PAGE] * PAGE + positions % PAGE
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        meta = AttentionMetadata(starts, torch.tensor(ends).int(), tables[list(chosen)], list(counts), list(ends), PAGE)
        self.tokens = torch.cat([tokens[i] for i in chosen]).int()
        self.rows = StepRows(forward.rotary.at(positions), slots.int(), [meta])

    def run(self, *, whole: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, features, and the K of all layers."""
        operator = self.model.whole
        assert operator
        try:
            self.model.whole = operator if whole else None
            hidden, features = self.model.forward(self.tokens, self.rows, self.pool)
        finally:
            self.model.whole = operator
        assert features is not None
        return hidden, features, self.pool.all_layers.k.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [{}, WIDE, *FAMILIES.values()], ids=str)
def test_the_operator_has_the_results_of_the_layers(tmp_path, family, dtype):
    engine = engine_of(tmp_path, dtype, **family)
    limit = 2e-5 if dtype == "float32" else 0.06
    for mine, theirs in zip(Rows(engine).run(), Rows(engine).run(whole=False), strict=True):
        assert (mine.float() - theirs.float()).abs().max() < limit * theirs.float().abs().max()
        assert (mine.float() - theirs.float()).abs().mean() < limit / 2 * theirs.float().abs().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_threads(tmp_path, dtype):
    engine = engine_of(tmp_path, dtype, **WIDE)
    hidden, features, _ = Rows(engine).run()
    first = 0
    for i, (rows, _) in enumerate(LENGTHS):
        alone = Rows(engine, (i,)).run()
        assert torch.equal(alone[0], hidden[first : first + rows])
        assert torch.equal(alone[1], features[first : first + rows])
        first += rows
    for threads in (2, 3, 5):
        linear.set_up(threads=threads)
        for _ in range(20):
            again = Rows(engine).run()
            assert torch.equal(again[0], hidden) and torch.equal(again[1], features)


@pytest.mark.parametrize("dtype", linear.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 97, 2560])
def test_the_choice_is_the_first_of_the_largest_logits_and_names_rows_that_are_lost(dtype, vocab):
    backend, noise = CpuBackend(CPU), torch.Generator().manual_seed(vocab)
    head = torch.randn(vocab, 40, generator=noise).to(dtype)
    head[vocab // 2 :] = head[: vocab - vocab // 2].clone()  # ties
    hidden = torch.randn(21, 40, generator=noise).to(dtype)
    hidden[3, 7], hidden[4, 0], hidden[5] = torch.nan, torch.inf, 0
    for threads in (1, 3):
        linear.set_up(threads=threads)
        logits = linear.float32(hidden, head)
        found = backend.choose(hidden, head)
        best = logits.max(dim=1).values
        first = (logits == best[:, None]).int().argmax(dim=1)
        assert found is not None and found.tolist() == torch.where(best.isfinite(), first, -1).tolist()
    head[vocab - 1] = torch.nan
    found = backend.choose(hidden, head)
    assert found is not None and set(found.tolist()) == {-1}, "NaN is larger than every number"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_context_kv_by_one_operator_is_that_of_several(tmp_path, dtype, monkeypatch):
    drafter = engine_of(tmp_path, dtype, **LUCKY).core.runner.forward.drafter
    assert drafter
    noise = torch.Generator().manual_seed(3)
    features = torch.randn(7, drafter.model.fc.shape[1], generator=noise).to(drafter.model.fc.dtype)
    features[2, 5] = torch.nan
    positions, slots = torch.arange(7).int(), torch.arange(8, 15).int()

    def written() -> LayerKv:
        for kv in (drafter.pool.all_layers.k, drafter.pool.all_layers.v):
            kv.zero_()
        drafter.write_context(features, positions, slots)
        return LayerKv(drafter.pool.all_layers.k.clone().float(), drafter.pool.all_layers.v.clone().float())

    one = written()
    monkeypatch.setattr(CpuBackend, "write_context", lambda *_: False)
    several = written()
    for mine, theirs in ((one.k, several.k), (one.v, several.v)):
        assert theirs.any() and torch.equal(mine.flatten(2).any(-1), theirs.flatten(2).any(-1))
        torch.testing.assert_close(mine, theirs, atol=1e-5 if dtype == "float32" else 0.05, rtol=0.02)
        assert mine.isfinite().all()


def test_a_step_calls_few_operators(tmp_path, monkeypatch):
    """A plain step calls two, one of them with context KV now and then, and a step with drafts five."""
    core, called, ops = engine_of(tmp_path, **LUCKY).core, Counter[str](), operators(torch.float32)

    def counted(name: str) -> Any:
        run = getattr(ops, name)
        return lambda *args: (called.update([name]), run(*args))[1]

    for name in ("decoder", "context", "best_of", "linear", "linear_float32", "attention", "rotate_into"):
        monkeypatch.setattr(ops, name, counted(name), raising=False)
    core.run([Request("r", (1, 2, 3), 24)])
    assert set(called) == {"decoder", "context", "best_of"}
    assert called["decoder"] == called["best_of"] and called["context"] <= called["decoder"]


def test_a_step_of_more_rows_than_the_operator_is_faster_for_goes_through_the_layers(tmp_path):
    rows = Rows(engine_of(tmp_path))
    rows.backend.use_operators(8)
    assert rows.model.whole
    assert rows.model.whole(torch.zeros(9, 32), *[None] * 4) is None
    by_layers = rows.run()
    torch.testing.assert_close(by_layers[0], Rows(engine_of(tmp_path / "again")).run()[0], atol=1e-4, rtol=1e-4)


def test_slots_outside_of_the_pool_are_refused_before_anything_is_written(tmp_path):
    rows = Rows(engine_of(tmp_path))
    before = rows.pool.all_layers.k.clone()
    for wrong in (-1, 80 * PAGE * 4):
        rows.rows.slot_mapping[2] = wrong
        with pytest.raises(RuntimeError, match="slots must be those of K and V"):
            rows.run()
    assert torch.equal(rows.pool.all_layers.k, before)
