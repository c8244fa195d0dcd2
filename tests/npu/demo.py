"""The demo pair on "npu:0" and on the CPU: held-out prompts, engines, and what their runs are compared by."""

import itertools
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import app.engine.build as build
from app.checkpoint import DEMO
from app.demo.checkpoint_files import load_pair
from app.demo.corpus import samples
from app.demo.model import Target
from app.engine.config import EngineConfig
from app.engine.core import EngineCore, Step
from app.engine.sequence import Request
from app.text.tokenizer import Tokenizer

DOMAINS = ("math", "copy", "code", "prose", "talk", "jumble")


@cache
def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Held-out prompts of all domains in turn."""
    tokenizer = _tokenizer()
    chosen = zip(*(itertools.islice(samples(domain, "heldout", seed), count) for domain in DOMAINS), strict=True)
    texts = [tokenizer.chat_template.render(list(sample.messages)) for row in chosen for sample in row]
    return [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts[:count]]


def requests(count: int, *, greedy: bool = False, max_tokens: int = 48) -> list[Request]:
    """Unless `greedy`, every fourth request is drawn; every seventh is decoded plainly."""
    stops = frozenset(_tokenizer().eos_ids)
    return [
        Request(
            f"r{i}",
            prompt,
            max_tokens,
            temperature=0.0 if greedy or i % 4 else 0.8,
            seed=i,
            stop_token_ids=stops,
            speculate=i % 7 != 6,
        )
        for i, prompt in enumerate(prompts(count))
    ]


def engine(device: str, dtype: str = "float32", **config: Any) -> EngineCore:
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 160, "max_model_len": 512, "kv_cache_memory": 96 << 20}
    wishes = {"device": device, "dtype": dtype, "page_size": 128} | sizes | config
    return build.build_engine(EngineConfig(target=DEMO / "target", draft=DEMO / "draft", **wishes)).core


@dataclass
class Run:
    """Texts, and for each step that verified drafts how many tokens it gave."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    num_verified: list[int] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step that verified drafts, the bonus included."""
        return 1 + sum(self.accepted) / len(self.accepted)


def run(core: EngineCore, wanted: list[Request]) -> Run:
    done = Run()

    def count(step: Step) -> None:
        done.kinds.add(step.kind)
        for delta in step.deltas:
            if delta.num_verified:
                done.accepted.append(delta.num_accepted)
                done.num_verified.append(delta.num_verified)

    done.texts = core.run(wanted, count)
    return done


@torch.inference_mode()
def gap(prompt: tuple[int, ...], text: list[int], at: int, other: int) -> float:
    """How far the worse of two candidates for token `at`, the text's own and `other`, lies below the best: fp32 logits
    of the demo's training model, teacher-forced."""
    target = _training_model()
    hidden, _ = target(torch.tensor([[*prompt, *text[:at]]]))
    logits = target.logits(hidden[0, -1])
    return float(logits.max() - torch.minimum(logits[text[at]], logits[other]))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")


@cache
def _training_model() -> Target:
    return load_pair()[0]
