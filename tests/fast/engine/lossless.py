"""Lossless promise as a comparison: text with DFlash on == text with it off == Transformers' own, token for token.

A *subject* is a pair with its prompts. A *case* is one setting of everything that could disturb a token. It has the
number of concurrent sequences, page size, chunked prompts, forced preemption and block size. It also has temperature,
filters, penalties, the requests that draft, and hits of a cache. Every case is compared with one plain run of the
target alone, and that run with Transformers.

At a first difference the reference computes the margin, teacher-forced. It is the gap of the two best perturbed logits,
or the distance to the edge of a filter. A margin above MARGIN is a failure. A smaller one is rounding. Such near ties
are counted over all compared tokens, and one is allowed for each 50,000 tokens begun.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch

from app import demo
from app.config.engine import EngineConfig
from app.engine.checkpoint.files import DEMO
from app.engine.cpu.backend import CpuBackend
from app.engine.load.engine import Engine, build_engine
from app.engine.models.page_pool import SCRATCH_PAGES
from app.messages import Request, StepOutput
from app.text.tokenizer import Tokenizer
from tests import UNTIMED
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.reference import PLAIN, Sampling, Target, first_difference, load_target, margin, sampled

# Models this small gain nothing from a second thread, and lose a factor of ten when the other core is busy.
torch.set_num_threads(1)

MARGIN = 1e-4
TOKENS_PER_NEAR_TIE = 50_000
TEMPERATURES = (0.0, 0.7, 1.0)
SAMPLINGS = ("plain", "filters", "penalties", "all")


def cap(num_tokens: int) -> int:
    """Return the number of near ties that `num_tokens` compared tokens may show."""
    return math.ceil(num_tokens / TOKENS_PER_NEAR_TIE)


# Engines


def make_engine(target: Path, draft: Path | None = None, *, kv_pages: int | None = None, **settings: Any) -> Engine:
    """An engine on the CPU, in fp32 by default. `kv_pages` is KV memory for exactly so many, scratch pages included."""
    if kv_pages is not None:
        itemsize = 4 if settings.get("dtype", "float32") == "float32" else 2
        per_token = itemsize * sum(_kv_numbers_per_token(folder) for folder in (target, draft) if folder)
        settings["kv_cache_memory"] = kv_pages * settings["page_size"] * per_token
    return build_engine(
        EngineConfig(target=target, draft=draft, **UNTIMED | {"device": "cpu", "dtype": "float32"} | settings)
    )


def _kv_numbers_per_token(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    layers = sum(kind != "linear_attention" for kind in kinds)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * layers * config["num_key_value_heads"] * head_dim


# Prompts


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()


def random_prompts(vocab_size: int, count: int, seed: int = 0) -> list[Prompt]:
    """Long ones that grow past 128 tokens together, lengths about page edges, then any; limits from 1 token on."""
    rng = random.Random(seed)
    lengths = [110, 112, 1, 16, 120, 113, 15, 2, 17, 105, 4, 108, 3, 31, *(rng.randint(1, 90) for _ in range(count))]
    return [
        Prompt(
            token_ids=tuple(rng.randrange(vocab_size) for _ in range(length)),
            max_tokens=40 if length > 100 else rng.choice((1, 2, 5, 17, 33, 40)),
            stop_token_ids=frozenset([rng.randrange(vocab_size)] if index % 2 == 1 and length < 100 else []),
        )
        for index, length in enumerate(lengths[:count])
    ]


def demo_prompts(domain: str, count: int, max_tokens: int) -> list[Prompt]:
    """The demo pair's first held-out prompts of one domain, through its chat template, to the end of the answer."""
    tokenizer = _demo_tokenizer()
    return [
        Prompt(
            token_ids=tuple(
                tokenizer.encode(tokenizer.chat_template.render(prompt["messages"]), add_special_tokens=False)
            ),
            max_tokens=max_tokens,
            stop_token_ids=frozenset([_demo_eos()]),
        )
        for prompt in demo.held_out()[domain][:count]
    ]


@cache
def _demo_eos() -> int:
    settings = json.loads((demo_folder("target") / "tokenizer_config.json").read_text())
    return int(_demo_tokenizer().backend.token_to_id(settings["eos_token"]))


def demo_folder(what: Literal["target", "draft"]) -> Path:
    """A folder of the demo pair. Without it nothing is proved, so its absence is an error and no reason to skip."""
    folder = DEMO / what
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder / 'model.safetensors'} is missing")
    return folder


@cache
def _demo_tokenizer() -> Tokenizer:
    return Tokenizer(demo_folder("target"))


# Filters and penalties

FILTERS: tuple[dict[str, Any], ...] = (
    {"top_k": 3},
    {"top_p": 0.8},
    {},
    {"min_p": 0.15},
    {"top_k": 200, "top_p": 0.95},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
)
"""Short lists that suffice and ones that may not, and a request without filters among those that have them."""
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"frequency_penalty": -0.3, "logit_bias": ((1, 1.5), (3, -100.0))},
    {"min_tokens": 12},
    {"repetition_penalty": 0.9, "presence_penalty": -0.4, "min_tokens": 3},
    {},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": ((2, -1.0),)},
)


def sampling_of(kind: str, index: int, stop_token_ids: frozenset[int]) -> Sampling:
    """Return the sampling of the request with this index, of one of SAMPLINGS.

    Temperatures change with every index, filters with every third, and penalties with every seventh, so all meet.
    """
    asked: dict[str, Any] = {}
    if kind in ("filters", "all"):
        asked |= FILTERS[index // 3 % len(FILTERS)]
    if kind in ("penalties", "all"):
        asked |= PENALTIES[index % len(PENALTIES)] | {"stop_token_ids": stop_token_ids}
    return Sampling(**asked)


# Cases


@dataclass(frozen=True)
class Case:
    """`chunked` leaves prefill so few rows that prompts are cut; `preempted` leaves pages for one long sequence.

    `temperature` None gives the requests 0, 0.7 and 1.0 in turn, `sampling` the filters and penalties of its kind.
    `speculation` "half" lets every other request draft, "capped" lets them have 1, 2 or 3 drafts a step, and "off"
    loads no draft. `path` is one of PATHS. With `cached` there is a prefix cache, and every request comes twice in a
    row. The second then shares the pages of the first, which may still run.
    """

    concurrency: int = 1
    page_size: int = 16
    chunked: bool = False
    preempted: bool = False
    block_size: int = 16
    temperature: float | None = 0.0
    sampling: str = "plain"
    speculation: str = "on"
    path: str = "eager"
    cached: bool = False

    def __str__(self) -> str:
        words = [f"c{self.concurrency}", f"page{self.page_size}", f"block{self.block_size}"]
        words += ["Tmixed" if self.temperature is None else f"T{self.temperature:g}"]
        words += [self.sampling, self.speculation, *([self.path] if self.path != "eager" else [])]
        return "-".join(words + [how for how in ("chunked", "preempted", "cached") if getattr(self, how)])

    @property
    def possible(self) -> bool:
        """Return True if the values can be combined.

        A sequence alone is not preempted. On pages of 128 hardly a sequence ever needs another page, and no prompt
        fills one, so the cache finds nothing. Layers one by one are a way to compute, which pages and the cache do not
        see.
        """
        if self.page_size == 128 or self.path == "layers":
            return not (self.preempted or self.cached)
        return not (self.preempted and self.concurrency == 1)

    @property
    def from_graphs(self) -> bool:
        return self.path in ("graphs", "overlap")

    def temperature_of(self, index: int) -> float:
        return TEMPERATURES[index % 3] if self.temperature is None else self.temperature


PATHS = {
    "eager": "each forward by one operator",
    "graphs": "decode steps padded to a few sizes and replayed, like on a device",
    "overlap": "the same where the next step is launched before a step is read, on a double of such a device",
    "layers": "operators one by one, like steps of many rows",
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "concurrency": (1, 4, 16),
    "page_size": (1, 4, 16, 128),
    "chunked": (False, True),
    "preempted": (False, True),
    "block_size": (2, 4, 8, 16),
    "temperature": (*TEMPERATURES, None),
    "sampling": SAMPLINGS,
    "speculation": ("on", "half", "capped", "off"),
    "path": tuple(PATHS),
    "cached": (False, True),
}
assert list(SETTINGS) == [field.name for field in fields(Case)]


def covering_cases(strength: int, seed: int = 0, **only: tuple[Any, ...]) -> list[Case]:
    """Cases in which every possible combination of values of any `strength` settings occurs; 2 is pairwise. Settings
    named in `only` have these values alone.

    Greedy: of some random cases that all hold a combination not seen yet, the one with the most of them.
    """
    rng = random.Random(seed)
    settings = SETTINGS | only
    usual = {"concurrency": 4} | {name: values[0] for name, values in only.items()}
    missing = {
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(settings, strength)
        for values in itertools.product(*(settings[name] for name in names))
    }
    missing = {combination for combination in missing if Case(**usual | dict(combination)).possible}
    cases = []
    while missing:
        wanted = min(missing, key=repr)
        draws = ({name: rng.choice(values) for name, values in settings.items()} | dict(wanted) for _ in range(50))
        candidates = [case for draw in draws if (case := Case(**draw)).possible]
        candidates.append(Case(**usual | dict(wanted)))
        best = max(candidates, key=lambda case: len(missing & combinations_in(case, strength)))
        missing -= combinations_in(best, strength)
        cases.append(best)
    return cases


def combinations_in(case: Case, strength: int) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in SETTINGS], strength))


# Runs


@dataclass
class Run:
    """The new tokens of every prompt, and what drafting did for them."""

    texts: list[list[int]]
    verify_steps: int = 0
    verify_tokens: int = 0
    """Emitted by the steps that verified drafts, the bonus included."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Tokens of all prompts that were found in the prefix cache."""

    @property
    def acceptance_length(self) -> float:
        return self.verify_tokens / self.verify_steps if self.verify_steps else math.nan


def run_engine(engine: Engine, requests: list[Request], on_step: Callable[[StepOutput], None] = lambda _: None) -> Run:
    scheduler = engine.core.scheduler
    run = Run([], preemptions=-scheduler.num_preemptions, cached_tokens=-scheduler.prefix_cache_hits)

    def count(step: StepOutput) -> None:
        on_step(step)
        for delta in step.deltas:
            if delta.steps[0].n_verified:
                run.verify_steps += 1
                run.verify_tokens += len(delta.token_ids)

    emitted = engine.core.run(requests, count)
    run.texts = [emitted[request.request_id] for request in requests]
    run.preemptions += scheduler.num_preemptions
    run.cached_tokens += scheduler.prefix_cache_hits
    return run


@dataclass(frozen=True)
class Difference:
    """The first token of one text that is another than the expected one, and how clearly the target decides there."""

    prompt: int
    index: int
    temperature: float
    margin: float
    sampling: Sampling = PLAIN

    def __str__(self) -> str:
        asked = "" if self.sampling == PLAIN else f" {self.sampling}"
        return f"prompt {self.prompt} token {self.index} T {self.temperature:g}{asked} margin {self.margin:.3g}"


@dataclass(frozen=True)
class Comparison:
    tokens: int
    differences: tuple[Difference, ...] = ()

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(self.tokens + other.tokens, self.differences + other.differences)

    @property
    def wrong(self) -> list[Difference]:
        """The differences that no rounding excuses."""
        return [difference for difference in self.differences if not difference.margin <= MARGIN]


@dataclass
class Subject:
    """A pair and its prompts."""

    name: str
    target: Path
    draft: Path
    prompts: list[Prompt]
    load: Callable[[Path], Target] = load_target
    """Loader of the reference."""
    wishes: dict[str, Any] = field(default_factory=dict)
    """Settings of every engine beside those of a case."""
    plain_texts: dict[tuple[float, str], list[list[int]]] = field(default_factory=dict)

    @cached_property
    def reference(self) -> Target:
        return self.load(self.target)

    @cached_property
    def max_model_len(self) -> int:
        return max(len(prompt.token_ids) + prompt.max_tokens for prompt in self.prompts)

    def seed(self, index: int) -> int:
        """An unsigned 64-bit seed for the prompt with this index."""
        return random.Random(index).getrandbits(64)

    def requests(self, case: Case) -> list[Request]:
        return [
            flat_request(
                request_id=f"{index}{again}",
                token_ids=prompt.token_ids,
                max_tokens=prompt.max_tokens,
                temperature=case.temperature_of(index),
                seed=self.seed(index),
                speculate=index % 3 + 1 if case.speculation == "capped" else case.speculation == "on" or index % 2 == 0,
                **vars(self.sampling(case.sampling, index)) | {"stop_token_ids": prompt.stop_token_ids},
            )
            for index, prompt in enumerate(self.prompts)
            for again in ("", " again")[: 1 + case.cached]
        ]

    def engine(self, case: Case) -> Engine:
        block = 1 if case.speculation == "off" else case.block_size
        pages = -(-(self.max_model_len + 2 * block) // case.page_size)
        rows = case.concurrency * block + (case.path != "overlap")  # of the largest graph, where rows are not shared
        scratch = -(-rows // case.page_size) if case.from_graphs else SCRATCH_PAGES
        with device_lengths() if case.path == "overlap" else nullcontext():
            return self.build(case, block, pages + scratch if case.preempted else None)

    def build(self, case: Case, block: int, kv_pages: int | None) -> Engine:
        engine = make_engine(
            self.target,
            None if case.speculation == "off" else self.draft,
            block_size=None if case.speculation == "off" else block,
            page_size=case.page_size,
            max_model_len=self.max_model_len,
            max_num_seqs=case.concurrency,
            max_num_batched_tokens=max(13, case.concurrency * block) if case.chunked else None,
            kv_pages=kv_pages,
            enforce_eager=not case.from_graphs,
            prefix_caching=case.cached,
            **self.wishes,
        )
        if case.path == "layers":
            cast(CpuBackend, engine.core.runner.backend).use_operators(0)
        return engine

    def run(self, case: Case, on_step: Callable[[StepOutput], None] = lambda _: None) -> Run:
        return run_engine(self.engine(case), self.requests(case), on_step)

    def sampling(self, kind: str, index: int) -> Sampling:
        return sampling_of(kind, index, self.prompts[index].stop_token_ids)

    def off(self, temperature: float, sampling: str = "plain") -> list[list[int]]:
        """Texts of plain decoding by the engine with no draft loaded, 16 together, nothing cut."""
        if temperature == 0 and sampling == "filters":
            sampling = "plain"  # nothing is drawn, so there is nothing to filter
        if (temperature, sampling) not in self.plain_texts:
            case = Case(concurrency=16, speculation="off", temperature=temperature, sampling=sampling)
            self.plain_texts[temperature, sampling] = self.run(case).texts
        return self.plain_texts[temperature, sampling]

    def plain(self, case: Case) -> Iterator[list[int]]:
        """Texts of plain decoding by the reference, one token a step, with temperatures and sampling as in `case`."""
        for index, prompt in enumerate(self.prompts):
            yield sampled(
                self.reference,
                prompt.token_ids,
                prompt.max_tokens,
                case.temperature_of(index),
                self.seed(index),
                eos=prompt.stop_token_ids,
                sampling=self.sampling(case.sampling, index),
            )

    def compare(self, texts: Sequence[list[int]], case: Case) -> Comparison:
        """Texts of the first requests of `case` against the plain run's of the same prompts."""
        differences = []
        prompts = [index // (1 + case.cached) for index in range(len(texts))]
        expected = [self.off(case.temperature_of(index), case.sampling)[index] for index in prompts]
        for index, text, wanted in zip(prompts, texts, expected, strict=True):
            at = first_difference(wanted, text)
            if at is not None:
                differences.append(self._difference(index, wanted, text, at, case))
        return Comparison(sum(map(len, expected)), tuple(differences))

    def _difference(self, index: int, wanted: list[int], text: list[int], at: int, case: Case) -> Difference:
        temperature, sampling = case.temperature_of(index), self.sampling(case.sampling, index)
        clearly = math.inf  # one goes on where the other has ended: that is no near tie
        if at < min(len(wanted), len(text)):
            prompt = self.prompts[index].token_ids
            whole = [*prompt, *wanted]
            at_whole, num_prompt = len(prompt) + at, len(prompt)
            clearly = margin(
                self.reference, whole, at_whole, temperature, self.seed(index), text[at], sampling, num_prompt
            )
        return Difference(index, at, temperature, clearly, sampling)


LUCKY: dict[str, Any] = {
    "seed": 11,
    "block_size": 16,
    "vocab_size": 5,
    "num_kv_heads": 4,
    "tied": True,
    "own_head": True,
}
"""A random pair of five tokens whose drafts, found by trying seeds, are accepted to every depth from 0 to the block."""


PLAIN_CASES = [Case(temperature=temperature) for temperature in TEMPERATURES]
PLAIN_CASES += [Case(temperature=None, sampling=sampling) for sampling in SAMPLINGS[1:]]
"""Plain decoding with every temperature, with filters, and with penalties by counts made for every token."""


def assert_lossless(comparison: Comparison) -> None:
    for difference in comparison.differences:
        print(difference)
    assert not comparison.wrong, f"first of {len(comparison.wrong)}: {comparison.wrong[0]}"


def near_ties_capped() -> Iterator[list[Comparison]]:
    """A fixture's list for comparisons, whose near ties are capped once the last test has run."""
    comparisons: list[Comparison] = []
    yield comparisons
    total = sum(comparisons, Comparison(0))
    assert len(total.differences) <= cap(total.tokens), f"{len(total.differences)} near ties in {total.tokens} tokens"


def random_subjects(folder: Path, count: int, load: Callable[[Path], Target] = load_target) -> list[Subject]:
    """Grouped queries and an lm_head of its own, where drafts hardly ever hit; and the lucky pair."""
    shapes: dict[str, dict[str, Any]] = {"random": {"seed": 1, "block_size": 16}, "random-lucky": LUCKY}
    pairs = {name: make_pair(folder / name, **shape) for name, shape in shapes.items()}
    return [
        Subject(name, pair.target, pair.draft, random_prompts(pair.vocab_size, count), load)
        for name, pair in pairs.items()
    ]


LUCKY_PROMPTS = 6


def lucky_subject(folder: Path, load: Callable[[Path], Target] = load_target) -> Subject:
    """The lucky pair on six prompts: the subject of the fast tests."""
    pair = make_pair(folder, **LUCKY)
    prompts = random_prompts(pair.vocab_size, LUCKY_PROMPTS)
    prompts = [replace(prompt, max_tokens=min(prompt.max_tokens, 28)) for prompt in prompts]
    return Subject("random-lucky", pair.target, pair.draft, prompts, load)


def demo_subject(count: int, max_tokens: int, load: Callable[[Path], Target] = load_target) -> Subject:
    """The demo pair on held-out prompts: two long ones that grow past 128 tokens together, then all domains in turn.

    None is longer than these, so a memory for one of them does not hold two.
    """
    long = [prompt for prompt in demo_prompts("math", 200, max_tokens) if 104 < len(prompt.token_ids) <= 112]
    share = -(-count // len(demo.held_out()))
    per_domain = [
        [prompt for prompt in demo_prompts(domain, 2 * share, max_tokens) if len(prompt.token_ids) <= 112][:share]
        for domain in demo.held_out()
    ]
    prompts = long[:2] + [prompt for turn in zip(*per_domain, strict=True) for prompt in turn]
    return Subject("demo", demo_folder("target"), demo_folder("draft"), prompts[:count], load)
