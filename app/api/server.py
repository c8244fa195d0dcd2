"""One server without HTTP's sockets: tokenizer, engine, application. A process or Ray Serve hosts it."""

import asyncio
import functools
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from app.api import chat, completions, errors, openapi, ops, responses
from app.api.middleware import OPEN_PATHS, BrowserGuard, Cors, Gate, Hold, RequestIds, is_loopback
from app.api.services import Services
from app.config.settings import Config
from app.engine_client.admission import Admission
from app.engine_client.client import EngineClient
from app.engine_client.kv_events import KvEventPublisher
from app.engine_client.supervisor import EngineUnavailable, Supervisor
from app.metrics import Metrics
from app.text.tokenizer import Tokenizer
from app.wire import encode_config

if TYPE_CHECKING:
    from app.api.tracing import Tracer

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "app.engine.process")
_LOG_METRICS_SECONDS = 10.0
ROUTERS = (chat.router, completions.router, responses.router, ops.router)


class Server:
    """Engine and application of one model. `target_config` is the target's config.json, if it was read before.

    While the engine loads, requests wait for `hold_seconds` at most. The constructor opens no socket. It raises
    ConfigError for files that cannot be used.
    """

    def __init__(
        self,
        config: Config,
        target_config: Mapping[str, Any] | None = None,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        hold_seconds: float = 0.0,
    ) -> None:
        assert config.has_models, "Config.with_models comes before the server"
        tracer: Tracer | None = None
        if config.otlp_traces_endpoint is not None:
            from app.api.tracing import tracer_to

            tracer = tracer_to(config.otlp_traces_endpoint)
        tokenizer = Tokenizer(
            config.engine.target,
            target_config,
            tokenizer_folder=Path(config.tokenizer) if config.tokenizer else None,
            has_defaults=config.generation_config == "auto",
            overrides=config.sampling_overrides,
            chat_template=config.chat_template,
        )
        _warn(tokenizer, config)
        metrics = Metrics(config.metrics_prefix, config.model_names[0])
        supervisor = Supervisor(engine_command, encode_config(config.engine), metrics, step_timeout=config.step_timeout)
        admission = Admission(config.max_queue, config.max_concurrency_per_key)
        events = config.kv_events_config
        self._publisher = KvEventPublisher(events) if events is not None and events.is_on else None
        self.config = config
        self.engine = EngineClient(supervisor, admission, metrics, self._publisher)
        self.services = Services(config, self.engine, tokenizer, metrics, tracer)
        self.app = create_app(self.services, hold_seconds)
        self._logging: asyncio.Task[None] | None = None

    def bind(self) -> None:
        """Bind the addresses of KV events. Raises zmq.ZMQError for one that cannot be bound."""
        if self._publisher is not None:
            self._publisher.bind()

    def start(self) -> None:
        """Start the engine process and return. `bind` comes before."""
        settings = ", ".join(f"{flag} {value}" for flag, value in self.services.settings.items())
        logger.info("dflash-server %s, not default: %s", version("dflash-server"), settings or "nothing")
        sampling = ", ".join(f"{name} {x:g}" for name, x in asdict(self.services.tokenizer.defaults).items())
        logger.debug("default sampling: %s", sampling)
        self.engine.start()
        self._logging = asyncio.create_task(self._log_metrics())

    async def ready(self) -> None:
        """Wait until the engine takes requests. Raises EngineUnavailable, with the reason, if it is dead or drains."""
        await self.engine.loaded()
        if self.engine.state.phase != "ready":
            raise EngineUnavailable(self.engine.state.reason or "the engine ended", self.engine.state.phase)

    async def death(self) -> None:
        """Wait until the engine is dead."""
        while self.engine.state.phase != "dead":
            await self.engine.supervisor.next_state()

    async def drain(self) -> None:
        """Refuse new requests, and give the running ones `shutdown_timeout` seconds."""
        if num := self.engine.num_running:
            logger.info("stopping: %d running requests get %g s", num, self.config.shutdown_timeout)
        await self.engine.drain(self.config.shutdown_timeout)

    async def stop(self, grace: float = 5.0) -> None:
        """End the engine process, and the senders of KV events and spans; each gets `grace` seconds. Idempotent."""
        await self.engine.shutdown(grace)
        if self._logging is not None:
            self._logging.cancel()
            await asyncio.wait([self._logging])
        if self.services.tracer is not None:
            await self.services.tracer.close(grace)
            self.services.tracer = None

    async def _log_metrics(self) -> None:
        while True:
            await asyncio.sleep(_LOG_METRICS_SECONDS)
            self.services.metrics.log_line()


def _warn(tokenizer: Tokenizer, config: Config) -> None:
    """Log settings and tokenizer files that this server cannot honour."""
    for name in config.default_chat_template_kwargs:
        if all(name not in tokenizer.template_for(has_tools).switches for has_tools in (False, True)):
            logger.warning("--default-chat-template-kwargs: this model's chat template does not know %s", name)
    if not tokenizer.eos_ids:
        logger.warning(
            "no token ends a text, so answers go on to their limits of tokens: generation_config.json and config.json "
            "have no eos_token_id, and the tokenizer has no eos_token"
        )
    if tokenizer.model_vocab_size is not None and tokenizer.max_id >= tokenizer.model_vocab_size:
        logger.warning(
            "tokenizer.json makes token ids up to %d, but by config.json the vocabulary of the model ends at %d: "
            "a text that has such a token will be refused",
            tokenizer.max_id,
            tokenizer.model_vocab_size - 1,
        )


def create_app(services: Services, hold_seconds: float = 0.0) -> ASGIApp:
    """Return the HTTP application. While the engine loads, a request waits for it for `hold_seconds` at most."""
    config = services.config
    app = FastAPI(
        title="dflash-server",
        version=version("dflash-server"),
        description="OpenAI-compatible serving with DFlash block-diffusion speculative decoding.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = config.root_path
    app.state.services = services
    errors.install(app, services.metrics)
    for router in ROUTERS:
        app.include_router(router)
    needed = bool(services.api_keys), bool(config.admin_key)
    open_paths = OPEN_PATHS | ({"/metrics"} if config.metrics_without_key else set())
    app.openapi = functools.cache(  # type: ignore[method-assign]
        functools.partial(openapi.describe, app, *needed, open_paths)
    )
    keys = [*services.api_keys, *config.admin_key] if services.api_keys else []
    held = Hold(app, services.engine, hold_seconds) if hold_seconds else app
    # A key protects from DNS rebinding too, because a page does not know it.
    guard = BrowserGuard(config.allowed_origins, is_local=is_loopback(config.host) and not keys)
    layers: ASGIApp = Gate(held, keys, config.root_path, open_paths, guard)
    if config.allowed_origins:
        layers = Cors(
            layers,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIds(
        layers, services.metrics, lambda: services.is_leaving or services.engine.state.phase == "draining"
    )
