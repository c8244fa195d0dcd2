"""What the handlers of one server share: settings, engine, tokenizer, metrics."""

import math
import time
from typing import TYPE_CHECKING

from fastapi import Request

from app.api.errors import bad_request, clip, model_not_found
from app.api.middleware import sent_key
from app.config.settings import Config
from app.engine_client.client import EngineClient
from app.metrics import Metrics
from app.text.parsers import family_for, reasoning_for
from app.text.parsers.reasoning import ReasoningParser
from app.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.api.tracing import Tracer

TIMEOUT_HEADER = "X-Request-Timeout"


class Services:
    """What the handlers of one server share. `api_keys` are those of the settings and of their file.

    `reasoning` (by `reasoning_parser`) and the calls of `tool_family` are parsed out of chat answers. A parser set to
    `auto` follows the chat template, which follows a named family. While the server `is_leaving`, /ready
    answers 503, and requests are still served. `num_unread_bytes` counts the bytes of bodies that have not arrived
    whole. `tracer` makes a span of each request.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        tracer: "Tracer | None" = None,
    ) -> None:
        source = tokenizer.chat_template.source or ""
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.tracer = tracer
        self.api_keys = config.api_keys()
        reasoning = reasoning_for(config.reasoning_parser, source)
        self.reasoning = reasoning is not None
        self.reasoning_parser = reasoning or ReasoningParser
        self.tool_family = family_for(config.tool_call_parser, source)
        if self.tool_family is not None:
            tokenizer.chat_template.family = self.tool_family
        self.num_unread_bytes = 0
        self.is_leaving = False
        self.created = int(time.time())

    def client_id(self, request: Request) -> str:
        """Return the client that --max-concurrency-per-key counts the request for."""
        if self.api_keys:
            return sent_key(request.headers).hex()
        return request.client.host if request.client else ""

    def deadline(self, request: Request, arrived: float) -> float | None:
        """Return the time.monotonic() when the answer must be whole, for a request of `arrived`.

        Raise ApiError 400 for a header that is no number of seconds.
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
        names = self.config.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise model_not_found(name, names)
        return name


def services_of(request: Request) -> Services:
    """Return the Services that the application was made with."""
    services: Services = request.app.state.services
    return services
