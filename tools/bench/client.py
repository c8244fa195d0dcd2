"""One streamed request to an OpenAI-compatible server, timed; and the server's models and draft counters."""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from tools.bench.formats import Prompt

Clock = Callable[[], float]
LIMITED = ("ttft", "tpot", "e2el")
"""The properties of an Answer that `--goodput` can limit."""

_SAMPLE = re.compile(r"^(?:\w+:)?spec_decode_num_([a-z_]+?)(?:_total)?(?:\{(.*)\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE)
_SGLANG = re.compile(
    r"^sglang:(spec_verify_calls|generation_tokens|num_requests)_total(?:\{.*\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d+)"')
_LOCAL = ("127.0.0.1", "localhost", "::1")
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class ServerError(Exception):
    """A server that cannot be measured. The message is one line, and `hint` is the remedy."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Server:
    """Address and model. `url` is without /v1, and `fields` go into the body of every request.

    Without `keep_alive` each request opens a new connection.
    """

    name: str
    url: str
    model: str = ""
    api_key: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    keep_alive: bool = True

    def connect(self, seconds: float) -> httpx.AsyncClient:
        """Return a client with new connections. `seconds` of silence are a failure."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=httpx.Timeout(seconds, connect=30.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None if self.keep_alive else 0),
            verify=self.url.startswith("https:"),
            trust_env=httpx.URL(self.url).host not in _LOCAL,
        )


@dataclass(slots=True)
class Answer:
    """One request. All times are seconds of one clock."""

    sent: float
    chunks: list[float] = field(default_factory=list)  # times of events with text
    last: float = 0.0  # of the last chunk or a later finish reason (a last token may have no text), or of the failure
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first chunk: time to first token."""
        return (self.chunks[0] if self.chunks else self.last) - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first: (last - first) / (tokens - 1)."""
        if self.tokens < 2 or not self.chunks:
            return None
        return (self.last - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds from each chunk to the next, however many tokens it has."""
        return [after - before for before, after in pairwise(self.chunks)]

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last token: end-to-end latency."""
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
            self.text += choice.get("text") or delta.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if choice.get("text") or any(delta.get(name) for name in _TEXT_FIELDS):
                self.chunks.append(now)
                self.last = now
            elif choice.get("finish_reason"):
                self.last = now

    def check_end(self) -> None:
        """Set the error of a stream that ended before its answer was complete."""
        if self.error is None and self.finish_reason is None:
            self.error = "the stream ended without a finish_reason"
        if self.error is None and self.tokens == 0:
            self.error = "no usage came: the server does not know stream_options.include_usage"


class Events:
    """Server-Sent Events from the bytes of a stream, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """Return the data of every event that is complete now. Comments and other fields are ignored."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in (line.rstrip(b"\r") for line in lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode())
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


async def ask(
    http: httpx.AsyncClient, server: Server, prompt: Prompt, wishes: Mapping[str, Any], clock: Clock = time.perf_counter
) -> Answer:
    """Send one request and read its stream. A failure is the answer's `error`; nothing is raised.

    The prompt's length overrides the one in `wishes`.
    """
    body: dict[str, Any] = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= {**prompt.body, **wishes}
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    if prompt.exact:  # special tokens have no text, and a token without text has no chunk and no time
        body |= {"ignore_eos": True, "skip_special_tokens": False}
    body |= server.fields
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
        answer.check_end()
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}".rstrip(": ")
    except (ValueError, AttributeError) as error:
        answer.error = f"an event is no chunk of an answer: {error}"
    finally:
        if answer.error is not None:
            answer.last = clock()
    return answer


def _refusal(status: int, body: bytes) -> str:
    """Return an error's status with its message, in OpenAI's shape or as plain text."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(body.decode(errors="replace").split())[:200]
    return f"HTTP {status}: {message}"


async def first_model(server: Server) -> str:
    """Return the first model of /v1/models. Raises ServerError if the server or a model is missing."""
    return next(iter(await _models(server)))


async def positions(server: Server) -> int | None:
    """Return the tokens that prompt and answer may have together, if the server tells, like ours and vLLM."""
    with suppress(ServerError, KeyError):
        return (await _models(server))[server.model].get("max_model_len")
    return None


async def _models(server: Server) -> dict[str, dict[str, Any]]:
    """Return the models of /v1/models by id, at least one. Raises ServerError."""
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
    refusal = _refusal(response.status_code, response.content)
    raise ServerError(f"{server.url}/v1/models names no model: {refusal}", "name it with --model")


class Drafting(Counter[tuple[str, int | None]]):
    """Counters of speculative decoding, or their growth, by name and position in the block. Sums have position None."""

    @classmethod
    def read(cls, exposition: str) -> "Drafting | None":
        """Read Prometheus' text under any prefix, summed over other labels. None means no counters."""
        counts = cls()
        for name, labels, value in _SAMPLE.findall(exposition):
            position = _POSITION.search(labels)
            counts[name, int(position.group(1)) if position else None] += float(value)  # type: ignore[assignment]
        if ("drafts", None) not in counts and "\nsglang:" in f"\n{exposition}":
            return cls._of_sglang(exposition)
        return counts if ("drafts", None) in counts else None

    @classmethod
    def _of_sglang(cls, exposition: str) -> "Drafting":
        """Read SGLang's counters, which it adds to when a request ends and does not show before.

        A request's first token is of its prefill, and all others are of steps that verified drafts. The gauge
        `spec_accept_length` is not read: it is of the last few steps, which may be another round's.
        """
        sums: Counter[str] = Counter()
        for name, value in _SGLANG.findall(exposition):
            sums[name] += float(value)  # type: ignore[assignment]
        steps, drafted = sums["spec_verify_calls"], sums["generation_tokens"] - sums["num_requests"]
        return cls({("drafts", None): steps, ("accepted_tokens", None): drafted - steps})

    def since(self, before: "Drafting") -> "Drafting":
        grown = Drafting(self)
        grown.subtract(before)
        return grown

    def and_also(self, other: "Drafting") -> "Drafting":
        both = Drafting(self)
        both.update(other)
        return both

    @property
    def steps(self) -> float:
        """Steps of requests that verified drafts."""
        return self["drafts", None]

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a step that verified drafts, the bonus included. None means that there was no such step."""
        return 1 + self["accepted_tokens", None] / self.steps if self.steps else None

    @property
    def acceptance_at(self) -> list[float]:
        """Share of accepted drafts by position, of those verified; without that counter, of all steps."""
        positions = sorted(k for name, k in self if name == "accepted_tokens_per_pos" and k is not None)
        times = [self.get(("verified_tokens_per_pos", k), self.steps) for k in positions]
        accepted = [self["accepted_tokens_per_pos", k] for k in positions]
        return [a / t for a, t in zip(accepted, times, strict=True) if t]


async def drafting(http: httpx.AsyncClient) -> Drafting | None:
    """Return the server's counters, or None if it has none."""
    try:
        response = await http.get("/metrics")
    except httpx.HTTPError:
        return None
    return Drafting.read(response.text) if response.status_code == 200 else None
