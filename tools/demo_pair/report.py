"""The shipped pair on held-out samples, decoded by the serving engine: `python -m tools.demo_pair.report`.

The table goes into README.md beside the checkpoint.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import track

from app.config.engine import EngineConfig
from app.engine.load.engine import Engine, build_engine
from app.messages import Request, SamplingParams, StepOutput
from app.text.tokenizer import Tokenizer
from tools.bench.markdown import Row, markdown, write_page
from tools.demo_pair.checkpoint_files import CHECKPOINT, load_target
from tools.demo_pair.corpus import DOMAINS, FIRST, TOOLS, Sample, is_right, samples
from tools.demo_pair.model import Target
from tools.parts import ToolParser

POSITIONS = (1, 2, 4, 8, 12, 15)
_COUNTED = ("math", "copy", "jumble", "code", TOOLS, FIRST)
_MAX_TOKENS = 400
_AT_ONCE = 16


@dataclass
class Measured:
    """Counts of one domain. `steps` verified drafts and emitted `tokens`.

    `verified[k]` steps checked a draft at position k, and `accepted[k]` kept it. `entropy` is the target's over its own
    answers, in nats a token.
    """

    domain: str
    samples: int
    right: int = 0
    tokens: int = 0
    steps: int = 0
    entropy: float = 0.0
    verified: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(1, 16), 0))
    accepted: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(1, 16), 0))

    def row(self) -> Row:
        return {
            "domain": self.domain,
            "samples": self.samples,
            "right": f"{100 * self.right / self.samples:.1f} %" if self.domain in _COUNTED else "-",
            "acceptance length": f"{self.tokens / max(1, self.steps):.2f}",
            **{f"at {k}": f"{self.accepted[k] / max(1, self.verified[k]):.2f}" for k in POSITIONS},
            "entropy": f"{self.entropy:.3f}",
        }


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

    def count(step: StepOutput) -> None:
        for delta in step.deltas:
            if delta.steps[0].n_verified:
                measured.tokens += len(delta.token_ids)
                measured.steps += 1
                for k in range(1, delta.steps[0].n_verified + 1):
                    measured.verified[k] += 1
                    measured.accepted[k] += k <= delta.steps[0].n_accepted

    entropy = answer_tokens = 0.0
    for start in track(range(0, len(chosen), _AT_ONCE), domain):
        batch = chosen[start : start + _AT_ONCE]
        texts = [tokenizer.chat_template.render(list(sample.messages), tools=list(sample.tools)) for sample in batch]
        prompts = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        stops = frozenset(tokenizer.eos_ids)
        requests = [
            Request(
                str(i),
                prompt,
                _MAX_TOKENS,
                sampling=SamplingParams(temperature=temperature, seed=start + i),
                stop_token_ids=stops,
            )
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


def write_report(folder: Path = CHECKPOINT, count: int = 200, seed: int = 1) -> None:
    """Measure the pair in `folder` on `count` samples a domain, print the table, and put it into the README beside."""
    engine = build_engine(EngineConfig(folder / "target", folder / "draft", device="cpu", verify="full"))
    tokenizer = Tokenizer(folder / "target")
    target = load_target(folder)
    rows = []
    with_tools = [TOOLS] if "tools" in tokenizer.chat_template.variables else []
    for domain in (*DOMAINS, FIRST, *with_tools):
        chosen = list(itertools.islice(samples(domain, "heldout", seed), count))
        rows.append(measure(engine, tokenizer, target, domain, chosen))
        if domain == "prose":  # greedy stories are the same few sentences
            rows.append(measure(engine, tokenizer, target, domain, chosen, temperature=1.0))
    table = markdown([measured.row() for measured in rows])
    print(table)
    if (page := folder.parent / "README.md").exists():
        write_page(page, [f"`python -m tools.demo_pair.report --samples {count} --seed {seed}`:", table])


def main() -> None:
    parser = ToolParser(prog="python -m tools.demo_pair.report", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200, help="a domain")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_report(count=options.samples, seed=options.seed)


if __name__ == "__main__":
    main()
