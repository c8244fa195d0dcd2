"""What servers are asked in a bench: the demo's held-out prompts, lines of a file, or made-up text of given lengths."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from app import demo
from app.config.settings import ConfigError

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
"""What GSM8K's questions are followed by, as in DFlash's own evaluation."""
LONGEST = 8
"""No made-up length is more than so many times the mean."""
SLACK = 16
"""Tokens by which a short made-up prompt may be longer than was estimated; a long one by a quarter."""

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
LINE_HINT = 'a line is {"messages": [...]}, {"prompt": "..."}, {"conversations": [...]} or {"question", "answer"}'

_NUMBER = re.compile(r"((?<![\w).])[-\u2212])?\\?[$€£]?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
# Each finds what stands behind its mark: to the end of the line, in the braces, to the end of the sentence.
_MARKED = re.compile(r"####(?=(.*))")
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SAID = re.compile(r"answer\s*(?:is|:|=|would be|will be)(?=(.*?)(?:[.!?](?:\s|$)|\n|$))", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`body` has the fields `messages` or `prompt` of a request. `max_tokens` None leaves the length to the bench;
    `exact` wants all of them, whatever the model says. `judge` tells whether an answer is right."""

    body: Mapping[str, Any]
    max_tokens: int | None = None
    exact: bool = False
    judge: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """`first(n)` are its first n prompts; `size` None: there are as many as wanted, else they come round again."""

    name: str
    first: Callable[[int], list[Prompt]]
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens: their means, and the sigmas of their logarithms, of which 0 makes all alike."""

    input_len: int
    output_len: int
    input_spread: float = 0.0
    output_spread: float = 0.0


PRESETS = {"sharegpt": Lengths(230, 205, 1.2, 1.0)}
"""About 220 and 200 when the longest are cut: vLLM's serving benchmark counts 200 to 230 for ShareGPT, by tokenizer. It
names no spreads; these have as many short ones and as long a tail."""


def named(wish: str, seed: int, instruction: str = BOXED) -> list[Dataset]:
    """Return the datasets of `demo`, of `demo:math,copy`, or of a file, whose questions `instruction` follows.

    Raises ConfigError.
    """
    kind, _, domains = wish.partition(":")
    if kind != "demo":
        return [from_file(Path(wish), instruction)]
    held_out = demo.held_out()
    chosen = domains.split(",") if domains else list(held_out)
    for domain in chosen:
        if domain not in held_out:
            raise ConfigError(f"{wish}: the demo has no domain {domain!r}", f"its domains are {', '.join(held_out)}")
    return [_cycled(domain, _of_demo(domain, seed)) for domain in chosen]


def judged_domains() -> list[str]:
    """Return the domains of the demo in which an answer is right or wrong."""
    return [domain for domain, prompts in demo.held_out().items() if "answer" in prompts[0]]


def from_file(path: Path, instruction: str = BOXED) -> Dataset:
    """One prompt a line of JSON. Raises ConfigError with the number of the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        hint = f"give a .jsonl file, or demo:{','.join(demo.held_out())}"
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8", LINE_HINT) from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_from_line(line, instruction))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}", LINE_HINT) from None
    if not prompts:
        raise ConfigError(f"{path}: no prompts in it", LINE_HINT)
    return _cycled(path.stem, prompts)


def synthetic(lengths: Lengths, tokens_per_word: float, seed: int, positions: int | None = None) -> Dataset:
    """Texts of words that say nothing. Of what is drawn, and not all alike, a prompt takes no more than half of the
    model's `positions`, and prompt and answer no more than there are."""
    make = partial(_made_up, lengths, tokens_per_word, seed, positions)
    name = f"{lengths.input_len} in, {lengths.output_len} out"
    return Dataset(name, lambda count: [make(index) for index in range(count)])


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(demo.words(), k=count))


def final_number(text: str) -> Decimal | None:
    """What an answer comes to, as GSM8K's harnesses read it: after `####`, in `\\boxed{}`, after "the answer is", or
    the last number. The last of each kind counts; thinking does not. 1,234, $5, -5 and 18.00 are numbers."""
    said = text.rpartition("</think>")[2].replace("{,}", ",").replace("\\!", "")
    for form in (_MARKED, _BOX, _SAID):
        for rest in reversed(form.findall(said)):
            # "the answer is 10 - 5 = 5" means what stands behind the last sign of equality
            numbers = _NUMBER.findall(rest.rpartition("=")[2]) or _NUMBER.findall(rest)
            if numbers:
                return _decimal(numbers[0])
    numbers = _NUMBER.findall(said)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(found: tuple[str, str]) -> Decimal:
    minus, digits = found
    return Decimal(("-" if minus else "") + digits.replace(",", ""))


def _cycled(name: str, prompts: Sequence[Prompt]) -> Dataset:
    return Dataset(name, lambda count: list(itertools.islice(itertools.cycle(prompts), count)), len(prompts))


def _of_demo(domain: str, seed: int) -> list[Prompt]:
    """Return the file's own order for seed 0, and one order of all prompts for each other seed."""
    right = _same_number if domain == "math" else _same_text
    prompts = [
        Prompt({"messages": prompt["messages"]}, judge=partial(right, prompt["answer"]) if "answer" in prompt else None)
        for prompt in demo.held_out()[domain]
    ]
    return random.Random(seed).sample(prompts, len(prompts)) if seed else prompts


def _same_number(answer: str, text: str) -> bool:
    return final_number(text) == Decimal(answer)


def _same_text(answer: str, text: str) -> bool:
    return text.strip() == answer.strip()


def _made_up(lengths: Lengths, tokens_per_word: float, seed: int, positions: int | None, index: int) -> Prompt:
    rng = random.Random(f"{seed}/{index}")
    most = positions // 2 if positions else None
    asked = _length(lengths.input_len, lengths.input_spread, most, rng)
    most = positions - asked * 5 // 4 - SLACK if positions else None
    answered = _length(lengths.output_len, lengths.output_spread, most, rng)
    return Prompt({"prompt": words(max(1, round(asked / tokens_per_word)), rng)}, max_tokens=answered, exact=True)


def _length(mean: int, spread: float, most: int | None, rng: random.Random) -> int:
    if spread == 0:
        return mean
    drawn = min(round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)), LONGEST * mean)
    return max(1, drawn if most is None else min(drawn, most))


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
        return _gsm8k(fields["question"], fields["answer"], instruction, max_tokens)
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in fields:
            return Prompt({"messages": list(_up_to_an_answer(fields[key], key, role, content))}, max_tokens)
    raise ValueError(f"none of messages, prompt, conversations, question is in it: {line.strip()[:40]}")


def _gsm8k(question: str, answer: str, instruction: str, max_tokens: int | None) -> Prompt:
    number = final_number(answer)
    if number is None:
        raise ValueError("its answer has no number")
    content = f"{question}\n{instruction}" if instruction else question
    messages = [{"role": "user", "content": content}]
    return Prompt({"messages": messages}, max_tokens, judge=lambda text: final_number(text) == number)


def _up_to_an_answer(turns: object, key: str, role: str, content: str) -> Iterator[dict[str, str]]:
    """`messages` but for an answer at their end; of ShareGPT's `conversations` what stands before the first answer."""
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
