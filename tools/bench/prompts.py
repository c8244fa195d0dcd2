"""Prompts of a bench: the demo's held-out ones, lines of a file, or synthetic text of given lengths."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from app import demo
from app.config.error import ConfigError

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
"""Instruction behind GSM8K's questions in DFlash's own evaluation."""
MAX_OVER_MEAN = 8
"""Bound on a synthetic length, in means, because a log-normal tail has none."""
SLACK = 16
"""Tokens by which a short synthetic prompt may exceed its estimate. A long one may exceed it by a quarter."""

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
LINE_HINT = 'a line is {"messages": [...]}, {"prompt": "..."}, {"conversations": [...]} or {"question", "answer"}'

_NUMBER = re.compile(r"((?<![\w).])[-\u2212])?\\?[$€£]?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
# The text behind each mark: to the end of the line, within the braces, to the end of the sentence.
_MARKED = re.compile(r"####(?=(.*))")
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SENTENCE = re.compile(r"answer\s*(?:is|:|=|would be|will be)(?=(.*?)(?:[.!?](?:\s|$)|\n|$))", re.IGNORECASE)

Judge = Callable[[str], bool]
"""Returns True if the text of an answer is right."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Fields `messages` or `prompt` of a request.

    `max_tokens` None leaves the length to the bench. `exact` asks for all tokens, beyond the end of the text.
    """

    body: Mapping[str, Any]
    max_tokens: int | None = None
    exact: bool = False
    judge: Judge | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts, of which `first(n)` returns n. They repeat after `size` prompts; None means that they never do."""

    name: str
    first: Callable[[int], list[Prompt]]
    size: int | None = None


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


def named(wish: str, seed: int, instruction: str = BOXED) -> list[Dataset]:
    """Return the datasets of `demo`, of `demo:math,copy`, or of a file, whose questions `instruction` follows.

    Seed 0 keeps the demo's order; another seed shuffles it. Raises ConfigError.
    """
    kind, _, domains = wish.partition(":")
    if kind != "demo":
        return [from_file(Path(wish), instruction)]
    held_out = demo.held_out()
    datasets = []
    for domain in domains.split(",") if domains else held_out:
        if domain not in held_out:
            raise ConfigError(f"{wish}: the demo has no domain {domain!r}", f"its domains are {', '.join(held_out)}")
        prompts = [
            Prompt({"messages": prompt["messages"]}, judge=_judge(domain, prompt.get("answer")))
            for prompt in held_out[domain]
        ]
        datasets.append(_cycled(domain, random.Random(seed).sample(prompts, len(prompts)) if seed else prompts))
    return datasets


def judged_domains() -> list[str]:
    """Return the domains of the demo whose answers are right or wrong."""
    return [domain for domain, prompts in demo.held_out().items() if "answer" in prompts[0]]


def _judge(domain: str, answer: str | None) -> Judge | None:
    if answer is None:
        return None
    return _number_is(Decimal(answer)) if domain == "math" else lambda text: text.strip() == answer


def _number_is(number: Decimal) -> Judge:
    return lambda text: final_number(text) == number


def from_file(path: Path, instruction: str = BOXED) -> Dataset:
    """Read a prompt from each line of JSON. Raises ConfigError with the number of a wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        hint = f"give a .jsonl file, or demo:{','.join(demo.held_out())}"
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8", LINE_HINT) from None
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                prompts.append(_from_line(line, instruction))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}", LINE_HINT) from None
    if not prompts:
        raise ConfigError(f"{path}: no prompts in it", LINE_HINT)
    return _cycled(path.stem, prompts)


def _cycled(name: str, prompts: Sequence[Prompt]) -> Dataset:
    return Dataset(name, lambda count: list(itertools.islice(itertools.cycle(prompts), count)), len(prompts))


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


def final_number(text: str) -> Decimal | None:
    """Return the number of an answer, like GSM8K's harnesses, or None.

    It stands after `####`, in `\\boxed{}`, after "the answer is", or last. The last of each kind counts, and thinking
    does not. 1,234, $5, -5 and 18.00 are numbers.
    """
    said = text.rpartition("</think>")[2].replace("{,}", ",").replace("\\!", "")
    for form in (_MARKED, _BOX, _SENTENCE):
        for rest in reversed(form.findall(said)):
            # "the answer is 10 - 5 = 5" means the number behind the last sign of equality
            numbers = _NUMBER.findall(rest.rpartition("=")[2]) or _NUMBER.findall(rest)
            if numbers:
                return _decimal(numbers[0])
    numbers = _NUMBER.findall(said)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(found: tuple[str, str]) -> Decimal:
    minus, digits = found
    return Decimal(("-" if minus else "") + digits.replace(",", ""))


def _from_line(line: str, instruction: str) -> Prompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"an object is wanted, not {line.strip()[:40]}")
    max_tokens = fields.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f"max_tokens is {max_tokens!r}, not a number of tokens")
    if isinstance(fields.get("prompt"), str):
        return Prompt({"prompt": fields["prompt"]}, max_tokens)
    if isinstance(fields.get("question"), str) and isinstance(fields.get("answer"), str):
        number = final_number(fields["answer"])
        if number is None:
            raise ValueError("its answer has no number")
        content = "\n".join(filter(None, (fields["question"], instruction)))
        return Prompt({"messages": [{"role": "user", "content": content}]}, max_tokens, judge=_number_is(number))
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in fields:
            return Prompt({"messages": list(_up_to_an_answer(fields[key], key, role, content))}, max_tokens)
    raise ValueError(f"none of messages, prompt, conversations, question is in it: {line.strip()[:40]}")


def _up_to_an_answer(turns: object, key: str, role: str, content: str) -> Iterator[dict[str, str]]:
    """Yield `messages` without an answer at their end, or ShareGPT's `conversations` up to the first answer."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{key} is no list of objects")
    if key == "messages":
        while turns and turns[-1].get(role) == "assistant":
            turns = turns[:-1]
    found = False
    for turn in turns:
        who = ROLES.get(str(turn.get(role)))
        if who is None or not isinstance(turn.get(content), str):
            raise ValueError(f"in {key} a turn has {role} {turn.get(role)!r} and {content} {turn.get(content)!r:.40}")
        if key == "conversations" and who == "assistant" and found:
            return
        if key == "messages" or who != "assistant":
            found = found or who == "user"
            yield {"role": who, "content": turn[content]}
    if not found:
        raise ValueError(f"{key} has no user's turn")
