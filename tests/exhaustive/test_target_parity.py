"""The engine's target computes what Transformers' own class computes, however its rows are cut and batched.

ScheduledSequence go through the engine's own runner: a hand-made batch is launched and the target's forward is
recorded.
"""

from pathlib import Path

import pytest
import torch

from tests.costs import landing_ones
from tests.exhaustive.live import load_transformers
from tests.fast.engine.feeder import (
    EXPERTS,
    HYBRIDS,
    SHAPES,
    Checkpoint,
    Feeder,
    assert_logits_close,
    random_checkpoint,
)
from tests.fast.engine.lossless import demo_folder, demo_prompts
from tests.fast.engine.pairs import FAMILIES, GPT_OSS
from tests.fast.engine.reference import features, greedy, teacher_forced

CHUNKS = (1, 4, 7, 64, None)
MORE_SHAPES: dict[str, dict] = SHAPES | FAMILIES | EXPERTS | HYBRIDS | {"gpt-oss": GPT_OSS}
IN_BF16 = [
    *("gqa 4:2, untied", "mha, tied", "8 experts, 2 a row", "demo"),
    *("hybrid, 4 v heads to 2", "hybrid, experts", "hybrid, Next"),
]
BF16 = 1.5
"""Times Transformers' own error, RMS over all logits, against fp32 on the same (bf16) weights."""


def demo_checkpoint() -> Checkpoint:
    """The demo target without its draft, on three of its conversations."""
    folder = demo_folder("target")
    target = load_transformers(folder)
    prompts = [demo_prompts(domain, 1, max_tokens=0)[0].token_ids for domain in ("math", "copy", "prose")]
    texts = [[*prompt, *greedy(target, prompt, 24)] for prompt in prompts]
    return Checkpoint(folder, (0, 2, target.config.num_hidden_layers - 2), texts)


@pytest.fixture(scope="module", params=[*MORE_SHAPES, "demo"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    if request.param == "demo":
        return demo_checkpoint()
    return random_checkpoint(tmp_path_factory.mktemp("target"), **MORE_SHAPES[request.param])


@pytest.mark.parametrize("chunk", landing_ones(CHUNKS, (7,)))
def test_prefill_in_chunks_gives_transformers_logits_and_hidden_states(checkpoint: Checkpoint, chunk: int | None):
    feeder, text = Feeder(checkpoint.engine()), checkpoint.prompts[0]
    seq = feeder.feed_whole(text, chunk)
    target = load_transformers(checkpoint.folder)
    assert_logits_close(feeder.logits(seq), teacher_forced(target, text))
    assert_logits_close(feeder.features(seq), features(target, text, checkpoint.taps))


@pytest.mark.parametrize("page_size", landing_ones([1, 4, 128], (4,)))
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
    target = load_transformers(checkpoint.folder)
    for seq, text in zip((first, second, third), checkpoint.prompts, strict=True):
        assert_logits_close(feeder.logits(seq), teacher_forced(target, text))
        assert_logits_close(feeder.features(seq), features(target, text, checkpoint.taps))


@pytest.mark.parametrize("chunk", landing_ones([1, 7, None], (7,)))
@pytest.mark.parametrize("source", IN_BF16)
def test_bf16_logits_are_no_worse_than_transformers_bf16_logits(tmp_path: Path, source: str, chunk: int | None):
    if source == "demo":
        checkpoints = [demo_checkpoint()]
    else:
        checkpoints = [
            random_checkpoint(tmp_path / str(seed), **MORE_SHAPES[source] | {"seed": seed, "dtype": torch.bfloat16})
            for seed in range(4)
        ]
    ours, theirs = 0.0, 0.0
    for checkpoint in checkpoints:
        engine = checkpoint.engine(dtype="bfloat16")
        transformers = load_transformers(checkpoint.folder, torch.bfloat16)
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
