"""Every family of targets writes what Transformers writes for it, with DFlash and without, for 50 prompts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.costs import landing_ones
from tests.exhaustive.live import load_transformers
from tests.fast.engine.feeder import Feeder, assert_logits_close, random_checkpoint
from tests.fast.engine.lossless import LUCKY, Case, Subject, assert_lossless, cap, random_prompts
from tests.fast.engine.pairs import FAMILIES, GPT_OSS, make_pair
from tests.fast.engine.reference import teacher_forced

torch.set_num_threads(1)
CASES = [
    Case(concurrency=4, page_size=4, chunked=True),
    Case(concurrency=4, page_size=16, preempted=True, block_size=8),
    Case(concurrency=16, page_size=4, path="graphs", temperature=None, cached=True),
]


SHAPES = FAMILIES | {"gpt-oss": GPT_OSS, "Qwen3 with experts": {"seed": 22, "experts": 8}}


@pytest.mark.parametrize("shape", landing_ones(SHAPES, [*SHAPES][::3]))
def test_text_with_dflash_is_text_without_is_transformers(tmp_path: Path, shape: str) -> None:
    pair = make_pair(tmp_path, **LUCKY | SHAPES[shape])
    subject = Subject(shape, pair.target, pair.draft, random_prompts(pair.vocab_size, 50), load_transformers)
    total = subject.compare(list(subject.plain(Case())), Case())
    verified = emitted = 0
    for case in CASES:
        run = subject.run(case)
        total += subject.compare(run.texts, case)
        verified, emitted = verified + run.verify_steps, emitted + run.verify_tokens
    assert_lossless(total)
    assert len(total.differences) <= cap(total.tokens)
    print(f"{total.tokens} tokens, acceptance length {emitted / verified:.2f}")
    assert total.tokens > 50 * 4 * 4 and emitted > verified


def test_mxfp4_is_the_checkpoint_that_transformers_dequantises(tmp_path: Path) -> None:
    packed = random_checkpoint(tmp_path / "packed", **GPT_OSS | {"mxfp4": True})
    plain = random_checkpoint(tmp_path / "plain", **GPT_OSS)
    tensors, wanted = (load_file(folder.folder / "model.safetensors") for folder in (packed, plain))
    for name in wanted:
        if name.endswith(("gate_up_proj", "down_proj")):
            numbers = convert_moe_packed_tensors(
                tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"), dtype=torch.float32
            )
            assert numbers.shape == wanted[name].shape
            tensors[name] = numbers.contiguous()
    save_file(tensors, plain.folder / "model.safetensors", metadata={"format": "pt"})
    text = packed.prompts[1]
    feeder = Feeder(packed.engine())
    assert_logits_close(
        feeder.logits(feeder.feed_whole(text, 7)), teacher_forced(load_transformers(plain.folder), text)
    )
