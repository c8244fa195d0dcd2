"""Prose as the target itself writes it: what the draft has to predict where the corpus leaves the words open."""

import itertools
import json
from pathlib import Path

from rich.progress import track
from tokenizers import Tokenizer

from app.demo.corpus import Sample, samples
from app.demo.generate import Greedy
from app.demo.rows import Encoder

_AT_ONCE = 256


def regenerated_prose(target_folder: Path, tokenizer: Tokenizer, count: int, seed: int, path: Path) -> list[Sample]:
    """`count` requests of the training split, answered by the target; kept in `path` for the next time."""
    requests = list(itertools.islice(samples("prose", "train", seed + 1), count))
    if not path.exists():
        greedy, encoder = Greedy(target_folder), Encoder(tokenizer)
        stories: list[str] = []
        for start in track(range(0, count, _AT_ONCE), "stories"):
            prompts = [encoder.prompt(sample) for sample in requests[start : start + _AT_ONCE]]
            stories += (tokenizer.decode(ids) for ids in greedy(prompts, max_new=140, batch=_AT_ONCE))
        path.write_text(json.dumps(stories))
    stories = json.loads(path.read_text())
    return [Sample("prose", sample.messages, story) for sample, story in zip(requests, stories, strict=True) if story]
