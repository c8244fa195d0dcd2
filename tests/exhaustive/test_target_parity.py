"""The engine's target computes what Transformers' Qwen3ForCausalLM computes, however its rows are cut and batched.

ScheduledSequence go through the engine's own runner: a hand-made batch is launched and the target's forward is
recorded.
"""

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.build.engine import Engine
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Request, Sequence
from tests.fast.engine.lossless import demo_folder, demo_prompts, make_engine
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.reference import features, greedy, load_target, teacher_forced

SHAPES: dict[str, dict] = {
    "gqa 4:2, untied": {},
    "gqa 4:1, tied": {"num_kv_heads": 1, "tied": True},
    "mha, tied": {"num_kv_heads": 4, "tied": True},
    "wide heads, other RoPE": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "rope_theta": 1e6},
}
TAPS = (0, 1, 2)
"""Every layer that may be tapped, the last one being excluded."""
CHUNKS = (1, 4, 7, None)
FP32 = 1e-4
"""Of the largest logit."""
BF16 = 1.5
"""Times Transformers' own error, RMS over all logits, against fp32 on the same (bf16) weights."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    taps: tuple[int, ...]
    prompts: list[list[int]]
    """Three texts; the first is the one that is cut in all ways, the others keep it company."""
    draft: Path | None = None

    def engine(self, **settings) -> Engine:
        settings = {"page_size": 4, "max_model_len": 256, "max_num_seqs": 4} | settings
        engine = make_engine(self.folder, self.draft, **settings)
        if self.draft is None:
            engine.core.runner.forward.target.taps = self.taps
        assert engine.core.runner.forward.target.taps == self.taps
        return engine


def random_checkpoint(folder: Path, seed: int = 0, **shape) -> Checkpoint:
    pair = make_pair(folder, seed=seed, taps=TAPS, **shape)
    rng = random.Random(seed)
    texts = [[rng.randrange(pair.vocab_size) for _ in range(length)] for length in (61, 38, 9)]
    return Checkpoint(pair.target, TAPS, texts, pair.draft)


def demo_checkpoint() -> Checkpoint:
    """The demo target without its draft, on three of its conversations."""
    folder = demo_folder("target")
    target = load_target(folder)
    prompts = [demo_prompts(domain, 1, max_tokens=0)[0].token_ids for domain in ("math", "copy", "prose")]
    texts = [[*prompt, *greedy(target, prompt, 24)] for prompt in prompts]
    return Checkpoint(folder, (0, 2, target.config.num_hidden_layers - 2), texts)


@pytest.fixture(scope="module", params=[*SHAPES, "demo"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    if request.param == "demo":
        return demo_checkpoint()
    return random_checkpoint(tmp_path_factory.mktemp("target"), **SHAPES[request.param])


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
        return seq

    def feed(self, *, decodes: Seq[Sequence] = (), prefills: Seq[tuple[Sequence, int]] = ()) -> None:
        """One step: the next row of each decode, and the next `count` rows of each prefill."""
        batch = Batch([self._rows(seq, 1) for seq in decodes], [self._rows(seq, count) for seq, count in prefills])
        self.engine.core.runner.launch(batch).read()
        hidden, tapped = self._last
        at = 0
        for rows in batch.rows:
            part = slice(at, at + rows.count)
            self._outputs[rows.seq].append((hidden[part], None if tapped is None else tapped[part]))
            rows.seq.num_computed += rows.count
            at += rows.count
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
        return F.linear(hidden, self.engine.core.runner.forward.target.lm_head).float()

    def features(self, seq: Sequence) -> Tensor:
        return torch.cat([tapped for _, tapped in self._outputs[seq]])


def assert_logits_close(found: Tensor, wanted: Tensor) -> None:
    error, allowed = float((found - wanted).abs().max()), FP32 * float(wanted.abs().max())
    assert found.shape == wanted.shape
    assert error <= allowed, f"logits differ by {error:.2g}, allowed are {allowed:.2g}"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_in_chunks_gives_transformers_logits_and_hidden_states(checkpoint: Checkpoint, chunk: int | None):
    feeder, text = Feeder(checkpoint.engine()), checkpoint.prompts[0]
    seq = feeder.feed_whole(text, chunk)
    target = load_target(checkpoint.folder)
    assert_logits_close(feeder.logits(seq), teacher_forced(target, text))
    assert_logits_close(feeder.features(seq), features(target, text, checkpoint.taps))


def test_decoding_token_by_token_gives_transformers_logits_and_hidden_states(checkpoint: Checkpoint):
    feeder, text = Feeder(checkpoint.engine(page_size=16)), checkpoint.prompts[0]
    seq = feeder.sequence(text)
    feeder.feed(prefills=[(seq, 5)])
    while seq.num_computed < len(text):
        feeder.feed(decodes=[seq])
    target = load_target(checkpoint.folder)
    assert_logits_close(feeder.logits(seq), teacher_forced(target, text))
    assert_logits_close(feeder.features(seq), features(target, text, checkpoint.taps))


@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_a_ragged_batch_of_decodes_and_chunks_gives_each_its_own_logits(checkpoint: Checkpoint, page_size: int):
    feeder = Feeder(checkpoint.engine(page_size=page_size))
    first, second, third = (feeder.sequence(text) for text in checkpoint.prompts)
    feeder.feed(prefills=[(first, 7), (second, 3)])
    feeder.feed(decodes=[second], prefills=[(first, 4), (third, 5)])
    feeder.feed(decodes=[first, second, third])
    while any(seq.num_computed < seq.num_tokens for seq in (first, second, third)):
        left = [seq for seq in (second, third) if seq.num_computed < seq.num_tokens]
        if first.num_computed < first.num_tokens:
            feeder.feed(decodes=left, prefills=[(first, 3)])
        else:
            feeder.feed(decodes=left)
    target = load_target(checkpoint.folder)
    for seq, text in zip((first, second, third), checkpoint.prompts, strict=True):
        assert_logits_close(feeder.logits(seq), teacher_forced(target, text))
        assert_logits_close(feeder.features(seq), features(target, text, checkpoint.taps))


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("source", ["gqa 4:2, untied", "mha, tied", "demo"])
def test_bf16_logits_are_no_worse_than_transformers_bf16_logits(tmp_path: Path, source: str, chunk: int | None):
    if source == "demo":
        checkpoints = [demo_checkpoint()]
    else:
        checkpoints = [
            random_checkpoint(tmp_path / str(seed), seed=seed, dtype=torch.bfloat16, **SHAPES[source])
            for seed in range(4)
        ]
    ours, theirs = 0.0, 0.0
    for checkpoint in checkpoints:
        engine = checkpoint.engine(dtype="bfloat16")
        transformers = load_target(checkpoint.folder, torch.bfloat16)
        feeder, found, rival = Feeder(engine), [], []
        for text in checkpoint.prompts:
            found.append(feeder.logits(feeder.feed_whole(text, chunk)))
            rival.append(teacher_forced(transformers, text))
        exact = transformers.float()  # the same rounded weights, so that only arithmetic differs
        wanted = torch.cat([teacher_forced(exact, text) for text in checkpoint.prompts])
        ours += float((torch.cat(found) - wanted).square().mean())
        theirs += float((torch.cat(rival) - wanted).square().mean())
    ratio = (ours / theirs) ** 0.5
    print(f"{source}, chunk {chunk}: RMS error is {ratio:.2f} of Transformers'")
    assert theirs > 0
    assert ratio <= BF16, f"RMS error of bf16 logits is {ratio:.2f} times Transformers' own"
