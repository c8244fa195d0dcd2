"""Parts of one server, which its handlers share."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import Request

from app.api.errors import bad_request, clip, model_not_found
from app.api.middleware import sent_key
from app.engine_client.client import EngineClient
from app.metrics import Metrics
from app.text.parsers import Family, Reasoning
from app.text.parsers.reasoning import ReasoningParser
from app.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.api.tracing import Tracer

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass
class Services:
    """Parts of one server. `model_names` are the values that `model` may have; answers bear the first.

    `reasoning` (by `reasoning_parser`) and the tool calls of `tool_family` are parsed out of chat answers.
    `template_kwargs` are chat_template_kwargs of requests without their own. `log_prompts` lets prompts into the log. A
    request gets `request_timeout` seconds; 0 is no end. With
    `api_keys`, a request outside OPEN_PATHS must have one of all keys, and clients are known by their keys, not by
    their addresses. With `admin_keys`, a request that changes the server must have one of these. `allowed_origins` are
    for CORS.
    `num_unread_bytes` counts the bytes of the bodies that have not arrived whole. While the server `is_leaving`, /ready
    says 503, and requests are still taken. `tracer` makes a span of each request. A request of an
    engine that is loading waits for it, for `hold_seconds` at most.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    model_names: list[str]
    metrics: Metrics
    reasoning: bool = False
    reasoning_parser: Callable[[bool], Reasoning] = ReasoningParser
    tool_family: Family | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_prompts: bool = False
    request_timeout: float = 0.0
    api_keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    root_path: str = ""
    num_unread_bytes: int = 0
    is_leaving: bool = False
    hold_seconds: float = 0.0
    tracer: "Tracer | None" = None
    created: int = field(default_factory=lambda: int(time.time()))

    def client_id(self, request: Request) -> str:
        """Return the client that --max-concurrency-per-key counts the request for."""
        if self.api_keys:
            return sent_key(request.headers).hex()
        return request.client.host if request.client else ""

    def deadline(self, request: Request, arrived: float) -> float | None:
        """Return the time.monotonic() when the answer must be whole, for a request of `arrived`.

        Raise ApiError 400 for a header that is no number of seconds.
        """
        seconds = self.request_timeout or math.inf
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
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise model_not_found(name, self.model_names)
        return name


def services_of(request: Request) -> Services:
    """Return the Services that the application was made with."""
    services: Services = request.app.state.services
    return services
