"""The candidates of a path head, and the path through them, by the definition in loops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.engine.checkpoint.shapes import PathConfig
from app.engine.comm.comm import ALONE, Comm
from app.engine.device.factory import make_backend
from app.engine.dflash.path import PathHead
from tests.fast.engine.thread_ranks import on_ranks

torch.set_num_threads(1)
BACKEND = make_backend("cpu")
RANK = 3


class Drawn:
    """Tables by name, in place of a checkpoint."""

    names: tuple[str, ...] = ()

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def head(vocab: int, hidden: int, comm: Comm = ALONE, **path: Any) -> PathHead:
    decoder = SimpleNamespace(vocab_size=vocab, hidden_size=hidden)
    made = SimpleNamespace(path=PathConfig(rank=RANK, **path), decoder=decoder, draft_vocab_size=vocab)
    return PathHead(made, Drawn(), BACKEND, comm, lambda ids: ids)


@pytest.mark.parametrize("vocab", [16, 97, 32 * 128, 32 * 128 + 1, 6000])
def test_candidates_are_the_best_in_order_whatever_the_vocabulary(vocab: int) -> None:
    """Of 6,000 some chunks have several, and the last one is not full. The best stands in the last."""
    noise = torch.Generator().manual_seed(vocab)
    hidden, lm_head = torch.randn(5, 8, generator=noise), torch.randn(vocab, 8, generator=noise)
    lm_head[-1] = 3 * hidden[2]
    found = head(vocab, 8, kind="vanilla", top_k=16).candidates(hidden, lm_head)
    values, ids = (hidden @ lm_head.T).sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(found[0], values[:, :16])
    assert torch.equal(found[1], ids[:, :16])
    assert found[1][2, 0] == vocab - 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_candidates_have_the_lowest_ids_on_any_number_of_ranks(size: int) -> None:
    """All logits are one of three numbers, so the edge goes through equal ones."""
    noise = torch.Generator().manual_seed(0)
    hidden, lm_head = torch.ones(3, 1), torch.zeros(256, 1)
    lm_head[torch.randperm(256, generator=noise)[:10], 0] = 1.0
    lm_head[torch.randperm(256, generator=noise)[:14], 0] = 2.0

    def found(comm: Comm) -> tuple[Tensor, Tensor]:
        part = comm.part(256)
        made = head(256, 1, comm, kind="vanilla", top_k=16)
        return made.candidates(hidden, lm_head[part.start : part.stop])

    order = sorted(range(256), key=lambda token: (-lm_head[token, 0], token))[:16]
    for values, ids in on_ranks(size, found):
        assert ids.tolist() == [order] * 3
        assert values.tolist() == lm_head[order, 0].expand(3, -1).tolist()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 17), blocks=st.integers(1, 3), k=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_path_is_the_greedy_one_for_any_number_of_rows(rows: int, blocks: int, k: int, seed: int) -> None:
    """Tokens stand among the candidates of several rows, and pairs decide."""
    noise = torch.Generator().manual_seed(seed)
    made = head(12, 4, kind="selector", top_k=k, scale=2.0, softcap=3.0)
    hidden = torch.randn(blocks, rows, 4, generator=noise)
    values = torch.randn(blocks, rows, k, generator=noise).sort(dim=-1, descending=True)[0]
    ids = torch.stack([torch.randperm(12, generator=noise)[:k] for _ in range(blocks * rows)]).view(blocks, rows, k)
    anchors = torch.randint(12, (blocks,), generator=noise, dtype=torch.int32)
    assert made.projection is not None
    wanted = []
    for block in range(blocks):
        token, path = int(anchors[block]), []
        for row in range(rows):
            of_row = made.projection @ hidden[block, row]
            unary = 3.0 * torch.tanh(2.0 * values[block, row] / 3.0)
            scores = [
                unary[i] + (made.predecessors[token] * of_row) @ made.successors[ids[block, row, i]] for i in range(k)
            ]
            path.append(token := int(ids[block, row, int(torch.stack(scores).argmax())]))
        wanted.append(path)
    assert made.walk(hidden, values, ids, anchors).tolist() == wanted


@pytest.mark.parametrize("kind", ["selector", "vanilla", "gated", "rnn"])
def test_rows_that_are_not_finite_get_tokens(kind: str) -> None:
    hidden, lm_head = torch.randn(6, 8), torch.randn(300, 8)
    hidden[2] = torch.nan
    hidden[4] = torch.inf
    drafts = head(300, 8, kind=kind, top_k=16).propose(hidden, lm_head, torch.tensor([1, 299]), max_rows=4)
    assert drafts.shape == (2, 3) and ((drafts >= 0) & (drafts < 300)).all()
