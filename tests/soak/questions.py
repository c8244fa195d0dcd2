"""Questions under load, whose right answers are known, and bodies that the server must refuse."""

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from app import demo
from tools.bench.prompts import named

SILENCE_SECONDS = 600.0
"""A server that says nothing for so long hangs: no fault lasts nearly as long, and no machine is so slow."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Question:
    """A request. Its answer is the same however often it is asked; where `status` is not 200 it is that error."""

    name: str
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    method: str = "POST"
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """Choice by choice: the text, and why it ended; and the tokens of all together."""

    texts: Mapping[int, str]
    reasons: Mapping[int, str]
    tokens: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Questions by kind. An answer to `slow` is larger than a socket's buffers."""

    short: list[Question]
    long: list[Question]
    slow: Question
    bad: list[Question]
    looks: list[Question]
    expected: Mapping[str, Expected]


def catalogue(url: str, seed: int, slow_tokens: int) -> Catalogue:
    """Ask every question alone and without drafts, so that the answers are what the server says to one client."""
    short = [*_greedy(seed), *_sampled(seed), *_cut(seed)]
    long = [
        Question(f"long {i}", COMPLETIONS, {"prompt": ids, "max_tokens": 24, "temperature": 0})
        for i, ids in enumerate(_long_prompts(seed))
    ]
    slow = Question(
        "slow",
        COMPLETIONS,
        {"prompt": "Once", "n": 4, "max_tokens": slow_tokens, "temperature": 1, "seed": seed, "ignore_eos": True},
    )
    with httpx.Client(base_url=url, timeout=SILENCE_SECONDS, trust_env=False) as http:
        expected = {question.name: _alone(http, question) for question in (*short, *long, slow)}
    return Catalogue(short, long, slow, _bad(), _looks(), expected)


def _alone(http: httpx.Client, question: Question) -> Expected:
    response = http.post(question.path, json={**question.body, "speculate": False})
    answer = response.raise_for_status().json()
    choices = {choice["index"]: choice for choice in answer["choices"]}
    texts = {i: choice.get("message", {}).get("content") or choice.get("text", "") for i, choice in choices.items()}
    reasons = {i: choice["finish_reason"] for i, choice in choices.items()}
    return Expected(texts, reasons, answer["usage"]["completion_tokens"])


def _messages(seed: int, each: int) -> list[tuple[str, Mapping[str, Any]]]:
    """(domain and number, the field `messages`) for some of all domains."""
    return [(f"{d.name} {i}", prompt.body) for d in named("demo", seed) for i, prompt in enumerate(d.first(each))]


def _greedy(seed: int) -> list[Question]:
    return [
        Question(name, CHAT, {**body, "temperature": 0, "max_tokens": 120}) for name, body in _messages(seed, each=2)
    ]


def _sampled(seed: int) -> list[Question]:
    fields: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.7, "n": 3},
    ]
    return [
        Question(f"sampled {name}", CHAT, {**body, **some, "seed": seed + i, "max_tokens": 60})
        for i, ((name, body), some) in enumerate(zip(_messages(seed + 1, each=1), itertools.cycle(fields)))
    ]


def _cut(seed: int) -> list[Question]:
    """Ended by a limit or by a stop string."""
    cuts: list[dict[str, Any]] = [{"max_tokens": 1}, {"max_tokens": 7}, {"max_tokens": 80, "stop": ["e"]}]
    return [
        Question(f"cut {name}", CHAT, {**body, "temperature": 0, **cut})
        for (name, body), cut in zip(_messages(seed + 2, each=1), itertools.cycle(cuts))
    ]


def _long_prompts(seed: int, length: int = 800) -> list[list[int]]:
    """Token ids of many prompts, one behind another."""
    prompts = random.Random(seed).sample(demo.token_ids(), 120)
    endless = itertools.chain.from_iterable(prompts)
    return [list(itertools.islice(endless, length)) for _ in range(3)]


def _bad() -> list[Question]:
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    return [
        Question("no JSON", CHAT, status=400, raw=b'{"messages": ['),
        Question("no UTF-8", CHAT, status=400, raw=b'{"messages": "\xff\xfe"}'),
        Question("nested", CHAT, status=400, raw=b'{"a": ' + b"[" * 50_000),
        Question("a list", COMPLETIONS, status=400, raw=b"[1, 2]"),
        Question("nothing", COMPLETIONS, status=400, raw=b""),
        Question("no messages", CHAT, {"messages": []}, 400),
        Question("wrong role", CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400),
        Question("temperature -1", CHAT, {**hello, "temperature": -1}, 400),
        Question("n 1000", CHAT, {**hello, "n": 1000}, 400),
        Question("logprobs", CHAT, {**hello, "logprobs": True}, 400),
        Question("max_tokens 0", CHAT, {**hello, "max_tokens": 0}, 400),
        Question("too long", COMPLETIONS, {"prompt": [5] * 5000}, 400),
        Question("no such token", COMPLETIONS, {"prompt": [10**9]}, 400),
        Question("no such model", CHAT, {**hello, "model": "nobody"}, 404),
        Question("no such path", "/v1/nothing", {}, 404),
        Question("no such method", CHAT, {}, 405, method="PUT"),
    ]


def _looks() -> list[Question]:
    """Requests that are answered with and without an engine."""
    paths = ("/metrics", "/v1/models", "/version", "/live", "/openapi.json", "/")
    return [Question(path, path, method="GET") for path in paths]
