"""The engine's target computes what Transformers computes: its last rows, as tests/golden has them.

tests/exhaustive/test_target_parity.py compares all rows, cut and batched in all ways, with Transformers live.
"""

from pathlib import Path

import pytest

from tests.fast.engine.feeder import SHAPES, Feeder, assert_logits_close, random_checkpoint
from tests.golden.transformers import golden


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_transformers_however_the_text_is_cut(tmp_path: Path, shape: str, chunk: int | None) -> None:
    checkpoint = random_checkpoint(tmp_path, **SHAPES[shape])
    wanted = golden().last_rows(shape, checkpoint.folder)
    feeder = Feeder(checkpoint.engine())
    sequence = feeder.feed_whole(checkpoint.prompts[0], chunk)
    assert_logits_close(feeder.logits(sequence)[-len(wanted.logits) :], wanted.logits)
    assert_logits_close(feeder.features(sequence)[-len(wanted.features) :], wanted.features)
