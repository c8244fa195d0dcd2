"""Writes tests/golden/transformers.json: python -m tests.exhaustive.golden, which is `make golden`."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from tests.exhaustive.live import load_transformers
from tests.fast.engine.feeder import SHAPES, random_checkpoint
from tests.fast.engine.lossless import PLAIN_CASES, lucky_subject
from tests.fast.engine.reference import features, teacher_forced
from tests.golden.transformers import FILE, Golden, digest

NUM_ROWS = 3


def made(folder: Path) -> Golden:
    """Write the texts of Transformers."""
    lucky = lucky_subject(folder / "lucky", load_transformers)
    weights = {lucky.name: digest(lucky.target)}
    lossless = {str(case): list(lucky.plain(case)) for case in PLAIN_CASES}
    rows = {}
    for name, shape in SHAPES.items():
        checkpoint = random_checkpoint(folder / name, **shape)
        target, text = load_transformers(checkpoint.folder), checkpoint.prompts[0]
        weights[name] = digest(checkpoint.folder)
        rows[name] = {
            "logits": _rounded(teacher_forced(target, text)),
            "features": _rounded(features(target, text, checkpoint.taps)),
        }
    return Golden(weights, lossless, rows)


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in values[-NUM_ROWS:].tolist()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(asdict(made(Path(folder)))) + "\n", encoding="utf-8")
    print(f"wrote {FILE}")
