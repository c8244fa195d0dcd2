"""Measures the saved pair on held-out samples: `python -m app.demo.evaluate`.

Right answers come from greedy generation with Transformers. Acceptance is the DFlash loop, run over the target's own
greedy text: a draft is kept while it equals the next token of that text, which is what verification would keep.
"""

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from app.demo.checkpoint_files import CHECKPOINT, load_pair
from app.demo.corpus import DOMAINS, Sample, is_right, samples
from app.demo.generate import Greedy
from app.demo.losses import block_embeddings
from app.demo.model import Draft, Target
from app.demo.rows import Encoder
from app.demo.tokenizer import MASK

_ANCHORS_AT_ONCE = 128


@dataclass(frozen=True)
class Measured:
    """`tokens` were written in `steps` verify steps; the first token of an answer counts in neither."""

    name: str
    samples: int
    right: int
    tokens: int
    steps: int
    entropy: float  # of the target, nats a token, over its own text

    @property
    def acceptance_length(self) -> float:
        return self.tokens / max(self.steps, 1)


@torch.inference_mode()
def accepted_drafts(target: Target, draft: Draft, ids: Sequence[int], first: int, mask_id: int) -> list[int]:
    """How many drafts hold at every anchor `first .. len(ids) - 2` of one sequence, by one forward of the target."""
    row = torch.tensor([ids])
    _, features = target(row)
    counts: list[int] = []
    size = target.shape.block
    padded = torch.cat((row[0], torch.full((size,), -1)))
    for anchors in torch.arange(first, len(ids) - 1).split(_ANCHORS_AT_ONCE):
        hidden = draft(features, anchors[None], block_embeddings(target, row, anchors[None], mask_id))
        drafts = target.logits(hidden[0, :, 1:]).argmax(-1)
        wanted = padded[anchors[:, None] + torch.arange(1, size)]
        counts += (drafts == wanted).cumprod(-1).sum(-1).tolist()
    return counts


def verify_steps(accepted: list[int]) -> int:
    """Steps to write the tokens after the first, when a step at anchor i writes `accepted[i] + 1` of them."""
    place = steps = 0
    while place < len(accepted):
        place += accepted[place] + 1
        steps += 1
    return steps


@torch.inference_mode()
def entropy_of(target: Target, ids: Sequence[int], first: int) -> float:
    """Sum over the answer's tokens of the entropy of the target's distribution, in nats."""
    hidden, _ = target(torch.tensor([ids]))
    log_p = target.logits(hidden[0, first - 1 : -1]).log_softmax(-1)
    return float(-(log_p.exp() * log_p).sum())


def measure(
    name: str, chosen: list[Sample], target: Target, draft: Draft | None, tokenizer: Tokenizer, greedy: Greedy
) -> Measured:
    encoder, mask_id = Encoder(tokenizer), tokenizer.token_to_id(MASK)
    prompts = [encoder.prompt(sample) for sample in chosen]
    answers = greedy(prompts, max_new=400)
    right = tokens = steps = written = 0
    entropy = 0.0
    for sample, prompt, answer in zip(chosen, prompts, answers, strict=True):
        right += is_right(sample, tokenizer.decode(answer))
        ids = prompt + answer
        entropy += entropy_of(target, ids, len(prompt))
        written += len(answer)
        if draft is not None:
            accepted = accepted_drafts(target, draft, ids, len(prompt), mask_id)
            tokens += len(accepted)
            steps += verify_steps(accepted)
    return Measured(name, len(chosen), right, tokens, steps, entropy / written)


def late_in_a_chat(domain: str, count: int, seed: int, encoder: Encoder, most: int = 1024) -> list[Sample]:
    """Held-out samples asked at the end of a chat about other things, so that the answer ends near `most` tokens."""
    rng = Random(seed)
    sources = {d: samples(d, "heldout", rng.getrandbits(48)) for d in DOMAINS}
    late = []
    for sample in itertools.islice(sources[domain], count):
        messages = sample.messages
        room = most - len(encoder.prompt(sample)) - len(encoder.rows([[("assistant", sample.answer)]])[0][0]) - 8
        while True:
            earlier = next(sources[rng.choice(DOMAINS)])
            turns = [*earlier.messages, {"role": "assistant", "content": earlier.answer}]
            room -= len(encoder.rows([[(m["role"], m["content"]) for m in turns]])[0][0])
            if room < 0:
                break
            messages = turns + messages
        late.append(Sample(domain, messages, sample.answer))
    return late


def measure_all(folder: Path, count: int, seed: int = 1) -> list[Measured]:
    target, draft, tokenizer = load_pair(folder)
    greedy = Greedy(folder / "target")
    rows = [(domain, list(itertools.islice(samples(domain, "heldout", seed), count))) for domain in DOMAINS]
    rows += [
        (f"{domain}, near 1024", late_in_a_chat(domain, count // 4, seed, Encoder(tokenizer)))
        for domain in ("math", "copy")
    ]
    return [measure(name, chosen, target, draft, tokenizer, greedy) for name, chosen in rows]


def print_report(folder: Path, console: Console, count: int = 200) -> None:
    table = Table(title=f"held-out templates, greedy, fp32, {folder}")
    for column in ("domain", "samples", "right", "acceptance length", "tokens", "verify steps", "entropy (nats/token)"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for m in measure_all(folder, count):
        right = "-" if m.name in ("prose", "talk") else f"{m.right / m.samples:.1%}"
        length = f"{m.acceptance_length:.2f}" if m.steps else "-"
        table.add_row(m.name, str(m.samples), right, length, str(m.tokens), str(m.steps), f"{m.entropy:.3f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m app.demo.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--samples", type=int, default=200, help="a domain")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_report(options.checkpoint, Console(), options.samples)


if __name__ == "__main__":
    main()
