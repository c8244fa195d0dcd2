"""Prompts of a bench: the demo's held-out ones, entries of a file, or synthetic text of given lengths."""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app import demo
from app.config.error import ConfigError
from tools.bench.formats import KNOWN, Prompt, prompts_of

MAX_OVER_MEAN = 8
"""Bound on a synthetic length, in means, because a log-normal tail has none."""
SLACK = 16
"""Tokens by which a short synthetic prompt may exceed its estimate. A long one may exceed it by a quarter."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts. `first(n)` returns n of them, and repeats a short list, which is `listed`."""

    name: str
    first: Callable[[int], list[Prompt]]
    listed: Sequence[Prompt] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens: their means, and the sigmas of their logarithms. Sigma 0 makes all alike."""

    input_len: int
    output_len: int
    input_spread: float = 0.0
    output_spread: float = 0.0


PRESETS = {"sharegpt": Lengths(230, 205, 1.2, 1.0)}
"""Means of about 220 and 200 after the cut: vLLM's serving benchmark counts 200 to 230 for ShareGPT, by tokenizer. It
names no spreads; these give as many short prompts and as long a tail."""


def named(wish: str, seed: int) -> list[Dataset]:
    """Return the datasets of `demo`, of `demo:math,copy`, of a file, or of a file's kinds: `FILE:chat,code`.

    Seed 0 keeps the demo's order; another seed shuffles it. Raises ConfigError.
    """
    source, _, domains = wish.partition(":")
    if source != "demo":
        return from_file(Path(source), domains.split(",") if domains else ())
    held_out = demo.held_out()
    datasets = []
    for domain in domains.split(",") if domains else held_out:
        if domain not in held_out:
            raise ConfigError(f"{wish}: the demo has no domain {domain!r}", f"its domains are {', '.join(held_out)}")
        prompts = [Prompt({"messages": prompt["messages"]}) for prompt in held_out[domain]]
        datasets.append(_cycled(domain, random.Random(seed).sample(prompts, len(prompts)) if seed else prompts))
    return datasets


def from_file(path: Path, kinds: Sequence[str] = ()) -> list[Dataset]:
    """Read a list of JSON, or an entry from each line: all in one dataset, or one of each wished `kind` of entry.

    Raises ConfigError, with the number of a wrong entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = f"give a .jsonl or .json file, or demo:{','.join(demo.held_out())}"
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8", KNOWN) from None
    what, lines = _entries(path, text)
    prompts: dict[str, list[Prompt]] = {}
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                asked = prompts_of(fields := json.loads(line))
                prompts.setdefault(str(fields.get("kind", "")) if kinds else path.stem, []).extend(asked)
        except ValueError as error:
            reason = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{path}, {what} {number}: {reason}", KNOWN) from None
    if not prompts:
        raise ConfigError(f"{path}: no prompts in it", KNOWN)
    for kind in kinds:
        if kind not in prompts:
            known = ", ".join(filter(None, prompts)) or "none: give its entries a field `kind`"
            raise ConfigError(f"{path}: no entry is of the kind {kind!r}", f"its kinds are {known}")
    return [_cycled(name, prompts[name]) for name in kinds or prompts]


def _entries(path: Path, text: str) -> tuple[str, list[str]]:
    if not text.lstrip().startswith("["):
        return "line", text.split("\n")
    try:
        return "entry", [json.dumps(entry) for entry in json.loads(text)]
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", KNOWN) from None


def _cycled(name: str, prompts: Sequence[Prompt]) -> Dataset:
    return Dataset(name, lambda count: list(itertools.islice(itertools.cycle(prompts), count)), prompts)


def synthetic(lengths: Lengths, tokens_per_word: float, seed: int, positions: int | None = None) -> Dataset:
    """Return texts of words without meaning.

    A drawn prompt takes at most half of the model's `positions`, and prompt and answer take at most all of them.
    Lengths without a spread are left to the server.
    """

    def prompt(index: int) -> Prompt:
        rng = random.Random(f"{seed}/{index}")
        asked = _length(lengths.input_len, lengths.input_spread, positions and positions // 2, rng)
        left = positions and positions - asked * 5 // 4 - SLACK
        answered = _length(lengths.output_len, lengths.output_spread, left, rng)
        text = words(max(1, round(asked / tokens_per_word)), rng)
        return Prompt({"prompt": text}, max_tokens=answered, exact=True)

    name = f"{lengths.input_len} in, {lengths.output_len} out"
    return Dataset(name, lambda count: [prompt(index) for index in range(count)])


def _length(mean: int, spread: float, bound: int | None, rng: random.Random) -> int:
    if spread == 0:
        return mean
    drawn = min(round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)), MAX_OVER_MEAN * mean)
    return max(1, drawn if bound is None else min(drawn, bound))


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(demo.words(), k=count))
