"""What every handler works with: the engine, the tokenizer, the names of the model, and the metrics."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from app.api.errors import ApiError, bad_request, busy, clip, model_not_found, unavailable
from app.api.middleware import shown_key
from app.client.admission import Busy, OwnerBusy, Places
from app.client.client import Engine, EngineUnavailable
from app.messages import EngineInfo
from app.metrics import Metrics
from app.text.tokenizer import Tokenizer

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass
class BodiesBeingRead:
    """How many bytes of bodies wait for the rest of them."""

    size: int = 0


@dataclass(frozen=True)
class Services:
    """One server's parts. `model_names` are what `model` may say; the first one is answered with.

    `reasoning` and `tool_calls` say what is parsed out of chat answers; `template_kwargs` are chat_template_kwargs for
    requests that say nothing of them; `log_prompts` lets prompts into the log. A request gets `request_timeout`
    seconds, 0 is no end. Clients are told apart by their keys where `has_keys`, and by their addresses otherwise.
    """

    engine: Engine
    tokenizer: Tokenizer
    model_names: list[str]
    metrics: Metrics
    reasoning: bool = False
    tool_calls: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_prompts: bool = False
    request_timeout: float = 0.0
    has_keys: bool = False
    bodies: BodiesBeingRead = field(default_factory=BodiesBeingRead)
    created: int = field(default_factory=lambda: int(time.time()))

    def ready_engine(self) -> EngineInfo:
        """What is loaded. Raises ApiError 503 unless the engine takes requests now."""
        try:
            return self.engine.ready_info()
        except EngineUnavailable as error:
            raise self.unavailable(str(error)) from None

    def check_door(self, request: Request) -> None:
        """Raises ApiError 429 or 503 if no request of this client would be let in now: before its body is read."""
        with self._turning_away():
            self.engine.check_room(self._owner(request))

    def admit(self, request: Request, count: int) -> Places:
        """Places for so many requests of this client, which the caller closes. Raises ApiError 429 or 503."""
        with self._turning_away():
            return self.engine.admit(self._owner(request), count)

    def flush_cache(self) -> None:
        """Forget all cached prefixes. Raises ApiError 429 or 503."""
        with self._turning_away():
            self.engine.flush_cache()

    @contextmanager
    def _turning_away(self) -> Iterator[None]:
        try:
            yield
        except (Busy, EngineUnavailable) as error:
            if isinstance(error, Busy):
                refusal = busy(str(error), "client_busy" if isinstance(error, OwnerBusy) else "server_busy")
            else:
                refusal = self.unavailable(str(error))
            self.metrics.turned_away(str(refusal.code))
            raise refusal from None

    def _owner(self, request: Request) -> str:
        """Whose request it is, for --max-concurrency-per-key."""
        if self.has_keys:
            return shown_key(request.headers).hex()
        return request.client.host if request.client else ""

    def deadline(self, request: Request, arrived: float) -> float | None:
        """When the answer must be whole, as `arrived` by time.monotonic(). Raises ApiError 400 for a header that is no
        number of seconds."""
        seconds = self.request_timeout or math.inf
        if (said := request.headers.get(TIMEOUT_HEADER)) is not None:
            try:
                asked = float(said)
            except ValueError:
                asked = math.nan
            if not 0 < asked < math.inf:
                message = f"The header `{TIMEOUT_HEADER}` must be a number of seconds above 0, not {clip(said)}."
                raise bad_request(message, TIMEOUT_HEADER)
            seconds = min(seconds, asked)
        return None if math.isinf(seconds) else arrived + seconds

    def unavailable(self, reason: str) -> ApiError:
        """The 503 for the engine's state, with `reason` as the message."""
        phase = self.engine.state.phase
        return unavailable(reason, f"engine_{'restarting' if phase == 'ready' else phase}")

    def served_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not here."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            raise model_not_found(asked, self.model_names)
        return asked


def services_of(request: Request) -> Services:
    """The Services that the application was made with."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
