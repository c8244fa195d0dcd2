"""What the handlers of one server share, and what they read from the head of a request."""

import math
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import Request

from app.api.errors import ApiError, bad_request, clip
from app.api.middleware import key_digests, sent_key
from app.api.response_store import ResponseStore
from app.api.shares import Held, HeldBytes, Threads
from app.api.stream import unless_gone
from app.config.settings import ENGINE_SETTINGS, SERVER_SETTINGS, Config, flag_name
from app.engine_client.client import EngineClient
from app.metrics import Metrics
from app.text.parsers import format_for, reasoning_for
from app.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.api.tracing import Tracer

T = TypeVar("T")

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass(eq=False)
class Services:
    """What the handlers of one server share."""

    config: Config
    engine: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    tracer: "Tracer | None" = None

    def __post_init__(self) -> None:
        template, with_tools = (self.tokenizer.template_for(has_tools) for has_tools in (False, True))
        self.api_keys = self.config.api_keys()
        self.admin_digests = key_digests(self.config.admin_key)
        self.model_names = self.config.model_names
        # Set to `auto`, both parsers of chat answers follow the chat template, which in turn follows a named format.
        self.reasoning_parser = reasoning_for(self.config.reasoning_parser, template.source + with_tools.source)
        self.call_format = format_for(self.config.tool_call_parser, with_tools.source)
        if self.call_format is not None:
            template.call_format = with_tools.call_format = self.call_format
        self.settings = changed(self.config)
        seeds = secrets.SystemRandom() if self.config.seed is None else random.Random(self.config.seed)
        self.next_seed = partial(seeds.getrandbits, 64)  # of a request that sends none
        self.held_bytes = HeldBytes()
        self.responses = ResponseStore(self.config.response_store_bytes)
        self._threads = Threads()
        self.is_leaving = False  # then /ready answers 503, and requests are still served
        self.created = int(time.time())

    def client_id(self, request: Request) -> str:
        """Return the client that --max-concurrency-per-key counts the request for, and that owns its responses."""
        if self.api_keys:
            return sent_key(request.headers).hex()
        return request.client.host if request.client else ""

    @contextmanager
    def hold(self, request: Request) -> Iterator[Held]:
        """Hold a permit of the client's share, and the bytes of the body as they come. Raises ClientBusy."""
        client_id = self.client_id(request)
        held = Held(client_id, self.engine.admission.acquire_of_client(client_id), self.held_bytes)
        try:
            yield held
        finally:
            held.close()

    async def in_thread(self, request: Request, work: Callable[..., T], *args: Any) -> T:
        """Return what `work` returns in one of the client's threads. Raises ClientDisconnect."""
        return await unless_gone(request.receive, self._threads.run(self.client_id(request), work, *args))

    def deadline(self, request: Request, arrived: float) -> float | None:
        """Return the time.monotonic() by which the answer must be complete, or None without a limit.

        Raise ApiError 400 for a header that is not a number of seconds.
        """
        seconds = self.config.request_timeout or math.inf
        if (text := request.headers.get(TIMEOUT_HEADER)) is not None:
            try:
                limit = float(text)
            except ValueError:
                limit = math.nan
            if not 0 < limit < math.inf:
                message = f"The header `{TIMEOUT_HEADER}` must be a number of seconds above 0, not {clip(text)}."
                raise bad_request(message, TIMEOUT_HEADER)
            seconds = min(seconds, limit)
        return None if math.isinf(seconds) else arrived + seconds

    def served_name(self, name: str | None) -> str:
        """Return the name to answer with. Raise ApiError 404 for a model that is not here."""
        if name is not None and name not in self.model_names:
            message = f"The model `{clip(name)}` does not exist here. Served: `{'`, `'.join(self.model_names)}`."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.model_names[0]


def changed(config: Config) -> dict[str, str]:
    """Return the settings that are not default, by flag. Keys are redacted."""
    known = ENGINE_SETTINGS | SERVER_SETTINGS
    given = {name: getattr(config.engine if name in ENGINE_SETTINGS else config, name) for name in known}
    others = {
        name: value for name, value in given.items() if value != known[name].get_default(call_default_factory=True)
    }
    return {flag_name(name): str(value) if known[name].repr else "[redacted]" for name, value in others.items()}


def services_of(request: Request) -> Services:
    """Return the Services that the application was made with."""
    return cast("Services", request.app.state.services)
