"""One streamed request to an OpenAI-compatible server, timed; and what else a bench asks of a server."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from app.bench.prompts import Prompt

Clock = Callable[[], float]
"""Seconds from some moment on."""

_SAMPLE = re.compile(r"^(?:\w+:)?spec_decode_num_([a-z_]+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_LOCAL = ("127.0.0.1", "localhost", "::1")
_SAYS_TEXT = ("content", "reasoning_content", "reasoning", "tool_calls")


LIMITED = ("ttft", "tpot", "e2el")
"""What `--goodput` can limit, as properties of an Answer."""


class ServerError(Exception):
    """A server that cannot be measured. The message is one line; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask: `url` without /v1. `fields` go into the body of every request."""

    name: str
    url: str
    model: str = ""
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def connect(self, seconds: float) -> httpx.AsyncClient:
        """New connections, as many as wanted. `seconds` is how long a server may say nothing."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=httpx.Timeout(seconds, connect=30.0),
            limits=httpx.Limits(max_connections=None),
            verify=self.url.startswith("https:"),
            trust_env=httpx.URL(self.url).host not in _LOCAL,
        )


@dataclass(slots=True)
class Answer:
    """One request. Moments are seconds of one clock; `error` says why it failed.

    A chunk is an event that brought text; `last` is the moment of the last one, of the finish reason if that came later
    (a last token may have no text), or of the failure. `tokens` is what the server's usage says.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    last: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first chunk, in seconds."""
        return (self.chunks[0] if self.chunks else self.last) - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds: (last - first) / (tokens - 1)."""
        if self.tokens < 2 or not self.chunks:
            return None
        return (self.last - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies, in seconds: from each chunk to the next, however many tokens it has."""
        return [after - before for before, after in pairwise(self.chunks)]

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last token, in seconds."""
        return self.last - self.sent

    def take(self, event: str, now: float) -> None:
        """Book the data of one event."""
        if event == "[DONE]":
            return
        chunk = msgspec.json.decode(event)
        if error := chunk.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.tokens = usage.get("completion_tokens") or 0
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in _SAYS_TEXT):
                self.chunks.append(now)
                self.last = now
            self.text += choice.get("text") or delta.get("content") or ""
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason
                self.last = now

    def judge_end(self) -> None:
        """A stream that ended without all that belongs to an answer has failed."""
        if self.error is None and self.finish_reason is None:
            self.error = "the stream ended without a finish_reason"
        if self.error is None and self.tokens == 0:
            self.error = "no usage came: the server does not know stream_options.include_usage"


class Events:
    """Server-Sent Events out of the bytes of a stream, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of every event that is complete now. Comments and other fields are passed over."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in (line.rstrip(b"\r") for line in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode())
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


def body_of(server: Server, prompt: Prompt, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The request: `asked` is what the bench wants of all prompts, the prompt's own length goes before it."""
    body: dict[str, Any] = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= {**prompt.body, **asked}
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    if prompt.exact:
        # special tokens have no text, and without a text no chunk would tell when they came
        body |= {"ignore_eos": True, "skip_special_tokens": False}
    return {**body, **server.fields}


async def ask(
    http: httpx.AsyncClient,
    server: Server,
    prompt: Prompt,
    asked: Mapping[str, Any],
    clock: Clock = time.perf_counter,
) -> Answer:
    """Send one request and read its stream. What goes wrong is told in the answer's `error`; nothing is raised."""
    body = body_of(server, prompt, asked)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    events = Events()
    answer = Answer(sent=clock())
    try:
        async with http.stream("POST", path, json=body, headers={"Accept-Encoding": "identity"}) as response:
            if response.status_code != 200:
                answer.error = _refusal(response.status_code, await response.aread())
                return answer
            async for received in response.aiter_raw():
                now = clock()
                for event in events.feed(received):
                    answer.take(event, now)
        answer.judge_end()
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}".rstrip(": ")
    except (ValueError, AttributeError) as error:
        answer.error = f"an event is no chunk of an answer: {error}"
    finally:
        if answer.error is not None:
            answer.last = clock()
    return answer


def _refusal(status: int, body: bytes) -> str:
    """An error's status, and its message in OpenAI's shape or as it stands."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(body.decode(errors="replace").split())[:200]
    return f"HTTP {status}: {message}"


async def first_model(server: Server) -> str:
    """The first of /v1/models. Raises ServerError if there is no such server, or if it tells no model."""
    return next(iter(await _models(server)))


async def positions(server: Server) -> int | None:
    """How many tokens prompt and answer may have together, where the server tells, as ours and vLLM do."""
    try:
        told = (await _models(server))[server.model].get("max_model_len")
    except (ServerError, KeyError):
        return None
    return told if isinstance(told, int) else None


async def _models(server: Server) -> dict[str, dict[str, Any]]:
    """Of /v1/models, by id; one at least. Raises ServerError."""
    async with server.connect(30.0) as http:
        try:
            response = await http.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{server.url} cannot be reached: {reason}", "is the server running?") from None
    if response.status_code == 401:
        raise ServerError(f"{server.url} wants a key", "give it with --api-key")
    with suppress(ValueError, KeyError, TypeError):
        if models := {str(model["id"]): model for model in msgspec.json.decode(response.content)["data"]}:
            return models
    told = _refusal(response.status_code, response.content)
    raise ServerError(f"{server.url}/v1/models names no model: {told}", "name it with --model")


@dataclass(frozen=True, slots=True)
class Drafting:
    """A server's counters of speculative decoding, or what they grew by: (name, position in the block from 0) -> count,
    with position None for sums."""

    counts: Mapping[tuple[str, int | None], float]

    @classmethod
    def read(cls, exposition: str) -> "Drafting | None":
        """From Prometheus' text, under any prefix and summed over all other labels; None where nothing is counted."""
        counts: dict[tuple[str, int | None], float] = {}
        for name, labels, value in _SAMPLE.findall(exposition):
            found = _POSITION.search(labels)
            key = name, int(found.group(1)) if found else None
            counts[key] = counts.get(key, 0.0) + float(value)
        return cls(counts) if ("drafts", None) in counts else None

    def since(self, before: "Drafting") -> "Drafting":
        return Drafting({key: count - before.counts.get(key, 0.0) for key, count in self.counts.items()})

    def and_also(self, other: "Drafting") -> "Drafting":
        keys = self.counts.keys() | other.counts.keys()
        return Drafting({key: self.counts.get(key, 0.0) + other.counts.get(key, 0.0) for key in keys})

    @property
    def steps(self) -> float:
        """Of requests: those that verified drafts."""
        return self.counts["drafts", None]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step that verified drafts, the bonus included; None if there was no such step."""
        return 1 + self.counts.get(("accepted_tokens", None), 0.0) / self.steps if self.steps else None

    @property
    def acceptance_at(self) -> list[float]:
        """By position: of the times that this draft was verified (where that is not counted: of all steps), the share
        in which it was accepted."""
        positions = sorted(k for name, k in self.counts if name == "accepted_tokens_per_pos" and k is not None)
        times = [self.counts.get(("verified_tokens_per_pos", k), self.steps) for k in positions]
        accepted = [self.counts["accepted_tokens_per_pos", k] for k in positions]
        return [a / t for a, t in zip(accepted, times, strict=True) if t]


async def drafting(http: httpx.AsyncClient) -> Drafting | None:
    """The counters as they stand; None where the server has none."""
    try:
        response = await http.get("/metrics")
    except httpx.HTTPError:
        return None
    return Drafting.read(response.text) if response.status_code == 200 else None
