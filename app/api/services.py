"""What every handler works with: the engine, the tokenizer, the names of the model, and the metrics."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from app.api.errors import ApiError, model_not_found, unavailable
from app.async_engine import Engine, EngineUnavailable
from app.metrics import Metrics
from app.text.tokenizer import Tokenizer
from app.types import EngineInfo


@dataclass(frozen=True)
class Services:
    """One server's parts. `model_names` are what `model` may say; the first one is answered with.

    `reasoning` and `tool_calls` say what is parsed out of chat answers; `template_kwargs` are chat_template_kwargs for
    requests that say nothing of them; `log_prompts` lets prompts into the log.
    """

    engine: Engine
    tokenizer: Tokenizer
    model_names: list[str]
    metrics: Metrics
    reasoning: bool = False
    tool_calls: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_prompts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def ready_engine(self) -> EngineInfo:
        """What is loaded. Raises ApiError 503 unless the engine takes requests now."""
        try:
            return self.engine.ready_info()
        except EngineUnavailable as error:
            raise self.unavailable(str(error)) from None

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
