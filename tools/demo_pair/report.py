"""Measures the shipped pair on held-out samples with the engine itself: `python -m tools.demo_pair.report`.

Writes the table into README.md beside the checkpoint. Whatever it says was decoded by the code that serves requests.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import track

from app.engine.build.config import EngineConfig
from app.engine.build.engine import Engine, build_engine
from app.engine.core import Step
from app.engine.sequence import Request
from app.text.tokenizer import Tokenizer
from tools.demo_pair.checkpoint_files import CHECKPOINT, load_pair
from tools.demo_pair.corpus import DOMAINS, Sample, is_right, samples
from tools.demo_pair.model import Target

POSITIONS = (1, 2, 4, 8, 12, 15)
_COUNTED = ("math", "copy", "jumble", "code")
_MAX_TOKENS = 400
_AT_ONCE = 16


@dataclass
class Measured:
    """`tokens` were emitted by `steps` steps that verified drafts. `verified[k]` steps checked a draft at position k
    and `accepted[k]` kept it; `entropy` is the target's over its own answers, in nats a token."""

    domain: str
    samples: int
    right: int = 0
    tokens: int = 0
    steps: int = 0
    entropy: float = 0.0
    verified: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(1, 16), 0))
    accepted: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(1, 16), 0))

    def row(self) -> list[str]:
        right = f"{100 * self.right / self.samples:.1f} %" if self.domain in _COUNTED else "-"
        rates = [f"{self.accepted[k] / max(1, self.verified[k]):.2f}" for k in POSITIONS]
        return [
            self.domain,
            str(self.samples),
            right,
            f"{self.tokens / max(1, self.steps):.2f}",
            *rates,
            f"{self.entropy:.3f}",
        ]


def measure(
    engine: Engine,
    tokenizer: Tokenizer,
    target: Target,
    domain: str,
    chosen: Sequence[Sample],
    temperature: float = 0.0,
) -> Measured:
    """Answers to `chosen`, 16 at a time, with every block verified whole."""
    measured = Measured(f"{domain}, T = {temperature:g}" if temperature else domain, len(chosen))

    def count(step: Step) -> None:
        for delta in step.deltas:
            if delta.num_verified:
                measured.tokens += len(delta.token_ids)
                measured.steps += 1
                for k in range(1, delta.num_verified + 1):
                    measured.verified[k] += 1
                    measured.accepted[k] += k <= delta.num_accepted

    entropy = answer_tokens = 0.0
    for start in track(range(0, len(chosen), _AT_ONCE), domain):
        batch = chosen[start : start + _AT_ONCE]
        texts = [tokenizer.chat_template.render(list(sample.messages)) for sample in batch]
        prompts = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        stops = frozenset(tokenizer.eos_ids)
        requests = [
            Request(str(i), prompt, _MAX_TOKENS, temperature=temperature, seed=start + i, stop_token_ids=stops)
            for i, prompt in enumerate(prompts)
        ]
        answers = engine.core.run(requests, count)
        for sample, prompt, answer in zip(batch, prompts, answers.values(), strict=True):
            measured.right += is_right(sample, tokenizer.decode(answer))
            entropy += entropy_of(target, [*prompt, *answer], len(prompt))
            answer_tokens += len(answer)
    measured.entropy = entropy / answer_tokens
    return measured


@torch.inference_mode()
def entropy_of(target: Target, ids: Sequence[int], first: int) -> float:
    """Sum over the tokens from `first` on of the entropy of the target's distribution, in nats."""
    hidden, _ = target(torch.tensor([ids]))
    log_p = target.logits(hidden[0, first - 1 : -1]).log_softmax(-1)
    return float(-(log_p.exp() * log_p).sum())


def page(rows: Sequence[Measured], command: str) -> str:
    """The README of the demo pair, as Markdown."""
    head = ["domain", "samples", "right", "acceptance length", *(f"at {k}" for k in POSITIONS), "entropy"]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *(m.row() for m in rows))]
    return _PAGE.format(table="\n".join(lines), command=command)


_PAGE = """# The demo pair

A Qwen3-shaped target and its DFlash draft, small enough to ship and trained by the code in this folder on
generated text. It is here to show drafting, acceptance and real text on any machine; it knows nothing else.

`python -m tools.demo_pair.train` makes a pair from nothing, on two CPU cores in about two hours, and goes on where it
was stopped. It needs the `dev` extra. The shipped pair took 67 minutes for the target and 58 for the draft on two cores
that did other work besides. Its draft went on twice with more steps, and its tokenizer and target come from the time
when copy and jumble were one domain, in the same shares.

| domain | what is asked |
|---|---|
| math | small arithmetic problems in many wordings, answered in worked steps |
| prose | short stories from a grammar in which many words fit at every place |
| code | small Python functions and their explanation |
| copy | to repeat, reverse, sort, number or capitalise known sentences and sets of words, some with a word changed |
| jumble | the same with words in no order at all, so that nothing but the prompt says what comes next |
| talk | greetings, thanks, what the model is, and one honest line for everything it cannot do |

## Held-out samples

Templates that training never saw, fp32, block 16, every block verified whole, greedy unless a temperature is named.
Printed by
`{command}`:

{table}

*acceptance length*: tokens per verify step, the bonus included, token-weighted. *at k*: of the drafts verified at
position k, the share kept (all before them being kept). *entropy*: the target's own uncertainty over its answers, in
nats a token: where it is high, as in prose, no draft can know the next word. *right*: the final number in math, the
exact text in copy, jumble and code; stories and talk have many good answers.
"""


def write_report(folder: Path = CHECKPOINT, count: int = 200, seed: int = 1) -> None:
    """Measure the pair in `folder` on `count` samples a domain; print the page and write it beside the folder."""
    engine = build_engine(EngineConfig(folder / "target", folder / "draft", device="cpu"))
    tokenizer = Tokenizer(folder / "target")
    target, _, _ = load_pair(folder)
    rows = []
    for domain in DOMAINS:
        chosen = list(itertools.islice(samples(domain, "heldout", seed), count))
        rows.append(measure(engine, tokenizer, target, domain, chosen))
        if domain == "prose":  # People let stories be drawn; greedy ones are the same few sentences.
            rows.append(measure(engine, tokenizer, target, domain, chosen, temperature=1.0))
    text = page(rows, f"python -m tools.demo_pair.report --samples {count} --seed {seed}")
    (folder.parent / "README.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_pair.report", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200, help="a domain")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_report(count=options.samples, seed=options.seed)


if __name__ == "__main__":
    main()
