"""Rows that go through an engine's own runner: a batch made by hand is launched, and its target's forward recorded."""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from app.engine.comm.comm import ALONE
from app.engine.load.engine import Engine
from app.engine.load.models import use_operator
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence
from app.messages import Request
from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import make_engine
from tests.fast.engine.pairs import make_pair

SHAPES: dict[str, dict] = {
    "gqa 4:2, untied": {},
    "gqa 4:1, tied": {"num_kv_heads": 1, "tied": True},
    "mha, tied": {"num_kv_heads": 4, "tied": True},
    "wide heads, other RoPE": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "rope_theta": 1e6},
}
EXPERTS: dict[str, dict] = {
    "8 experts, 2 a row": {"experts": 8},
    "experts in fused tensors": {"experts": 8, "fused_experts": True},
    "3 experts a row, not renormalised, layer 1 dense": {
        "experts": 8,
        "experts_per_tok": 3,
        "norm_topk_prob": False,
        "dense_layers": (1,),
    },
}


HYBRIDS: dict[str, dict] = {
    "4 v heads to 2": {},
    "every second layer, mha": {"layer_types": ("linear_attention", "full_attention") * 2, "num_kv_heads": 4},
    "3 v heads to each": {"k_heads": 2, "v_heads": 6, "k_dim": 16, "v_dim": 8, "tied": True},
    "experts": {"experts": 8},
    "Next": {"experts": 8, "grouped": True},
    "attention first": {"layer_types": ("full_attention", *("linear_attention",) * 4), "k_heads": 4},
}
HYBRIDS = {f"hybrid, {name}": {"hybrid": True, "seed": 4, **shape} for name, shape in HYBRIDS.items()}
TAPS = (0, 1, 2)
"""Every layer that may be tapped, the last one being excluded."""


FP32 = 1e-4
"""Largest difference, as a share of the largest logit."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    taps: tuple[int, ...]
    prompts: list[list[int]]
    """Three texts. The first one is cut in all ways, and the others run beside it."""
    draft: Path | None = None

    def engine(self, **settings) -> Engine:
        settings = {"page_size": 4, "max_model_len": 256, "max_num_seqs": 4} | settings
        engine = make_engine(self.folder, self.draft, **settings)
        if self.draft is None:
            target = engine.core.runner.forward.target
            target.target_layer_ids, backend = self.taps, engine.core.runner.backend
            use_operator(target, target.config, backend, ALONE, self.taps)
        assert engine.core.runner.forward.target.target_layer_ids == self.taps
        return engine


def random_checkpoint(folder: Path, seed: int = 0, *, hybrid: bool = False, **shape) -> Checkpoint:
    """A hybrid target's first text has several chunks of 64 rows, which the delta rule solves together."""
    pair = (make_hybrid_pair if hybrid else make_pair)(folder, seed=seed, taps=TAPS, **shape)
    rng = random.Random(seed)
    lengths = (200 if hybrid else 61, 38, 9)
    texts = [[rng.randrange(pair.vocab_size) for _ in range(length)] for length in lengths]
    return Checkpoint(pair.target, TAPS, texts, pair.draft)


class Feeder:
    """Feeds sequences to an engine's runner piece by piece and collects what its target hands out for each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._outputs: dict[Sequence, list[tuple[Tensor, Tensor | None]]] = {}
        self._rng = random.Random(0)
        target = engine.core.runner.forward.target
        forward = target.forward

        def recorded(*args):
            self._last = forward(*args)
            return self._last

        target.forward = recorded

    def sequence(self, token_ids: Seq[int]) -> Sequence:
        """A sequence that owns its pages in an order that is not theirs in memory."""
        seq = Sequence(Request(str(len(self._outputs)), tuple(token_ids), max_tokens=1), arrival=len(self._outputs))
        self.engine.core.scheduler.pool.grow(seq.pages, len(token_ids))
        self._rng.shuffle(seq.pages)
        self._outputs[seq] = []
        seq.state_slot = len(self._outputs)  # of recurrent layers, where there are any
        return seq

    def feed(self, *, decodes: Seq[Sequence] = (), prefills: Seq[tuple[Sequence, int]] = ()) -> None:
        """One step: the next row of each decode, and the next `count` rows of each prefill."""
        batch = Batch([self._rows(seq, 1) for seq in decodes], [self._rows(seq, count) for seq, count in prefills])
        self.engine.core.launch(batch).read()
        hidden, tapped = self._last
        at = 0
        for entry in batch.entries:
            part = slice(at, at + entry.count)
            self._outputs[entry.seq].append((hidden[part], None if tapped is None else tapped[part]))
            entry.seq.num_computed += entry.count
            at += entry.count
        assert at == len(hidden)

    def _rows(self, seq: Sequence, count: int) -> ScheduledSequence:
        count = min(count, seq.num_tokens - seq.num_computed)
        return ScheduledSequence(seq, seq.num_computed, count, needs_logits=seq.num_computed + count == seq.num_tokens)

    def feed_whole(self, token_ids: Seq[int], chunk: int | None) -> Sequence:
        seq = self.sequence(token_ids)
        while seq.num_computed < seq.num_tokens:
            self.feed(prefills=[(seq, chunk or seq.num_tokens)])
        return seq

    def logits(self, seq: Sequence) -> Tensor:
        """[T, V] of everything fed so far."""
        hidden = torch.cat([hidden for hidden, _ in self._outputs[seq]])
        runner = self.engine.core.runner
        return runner.backend.logits(hidden, runner.forward.target.lm_head).float()

    def features(self, seq: Sequence) -> Tensor:
        return torch.cat([tapped for _, tapped in self._outputs[seq]])


def assert_logits_close(found: Tensor, wanted: Tensor) -> None:
    error, allowed = float((found - wanted).abs().max()), FP32 * float(wanted.abs().max())
    assert found.shape == wanted.shape
    assert error <= allowed, f"logits differ by {error:.2g}, allowed are {allowed:.2g}"
