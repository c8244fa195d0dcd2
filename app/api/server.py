"""The server from start to end: bind, start the engine, serve while it loads, drain on a signal, stop."""

import asyncio
import contextlib
import functools
import json
import logging
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp

from app import log
from app.api import connection, errors, openapi, ops, page, routes
from app.api.display import complain, show_start
from app.api.middleware import ApiKeys, Cors, HeadLimits, Keys, LastAnswers, RequestIds, RootPath
from app.api.services import Services
from app.client.client import AsyncEngine
from app.config.settings import Config
from app.metrics import Metrics
from app.text.chat_template import ChatTemplateError
from app.text.parsers.qwen3 import CALL, THINK
from app.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "app.engine.process")
_REPORT_SECONDS = 10.0
_LAST_BYTES_SECONDS = 5


def create_app(
    services: Services,
    *,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    root_path: str = "",
) -> ASGIApp:
    """The HTTP application; `services.engine` need not be ready.

    With `api_keys` every request but those of OPEN_PATHS must bear one of all keys. With `admin_keys` what changes the
    server must bear one of these. `allowed_origins` are for CORS.
    """
    app = FastAPI(
        title="dflash-server",
        version=version("dflash-server"),
        description="OpenAI-compatible serving with DFlash block-diffusion speculative decoding.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = root_path
    app.state.services = services
    app.state.admin_keys = Keys(admin_keys)
    errors.install(app)
    for router in (routes.router, ops.router, page.router):
        app.include_router(router)
    app.openapi = functools.cache(functools.partial(openapi.describe, app, bool(api_keys), bool(admin_keys)))  # type: ignore[method-assign]
    guarded: ASGIApp = ApiKeys(app, Keys([*api_keys, *admin_keys]), root_path) if api_keys else app
    if root_path:
        guarded = RootPath(guarded, root_path)
    if allowed_origins:
        guarded = Cors(
            guarded,
            allow_origins=allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIds(LastAnswers(HeadLimits(guarded), services.engine))


def services_for(config: Config, engine: AsyncEngine, tokenizer: Tokenizer, metrics: Metrics) -> Services:
    """What the settings make of the parts. A parser that is on `auto` is on if the chat template has its marks."""
    source = tokenizer.chat_template.source or ""
    parses = {"qwen3": True, "none": False}
    return Services(
        engine,
        tokenizer,
        config.served_model_name or [config.model],
        metrics,
        reasoning=parses.get(config.reasoning_parser, THINK in source),
        tool_calls=parses.get(config.tool_call_parser, CALL in source),
        template_kwargs=config.default_chat_template_kwargs,
        log_prompts=config.log_prompts,
        request_timeout=config.request_timeout,
        has_keys=bool(config.api_keys()),
    )


def run(config: Config, target: Path, draft: Path | None, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until a signal comes; returns the exit code.

    0 after a drain; 2 if the tokenizer's files cannot be used; 1 if the port is taken, the engine cannot be used, or a
    second signal forced it.
    """
    log.set_up(config.log_level, config.log_format, [*config.api_keys(), *config.admin_key])
    try:
        tokenizer = Tokenizer(target)
    except (TokenizerError, ChatTemplateError) as error:
        complain(str(error))
        return 2
    _warn(tokenizer, config)
    try:
        listener = _bind(config.host, config.port)
    except OSError as error:
        complain(f"cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another with --host, --port.")
        return 1
    sampling = ", ".join(f"{name} {value:g}" for name, value in asdict(tokenizer.defaults).items())
    logger.info("sampling where a request says nothing: %s", sampling)
    with contextlib.closing(listener):
        paths = {"target": str(target), "draft": None if draft is None else str(draft)}
        # The engine needs no keys, so it gets none.
        keyless = json.loads(config.model_dump_json(exclude={"api_key", "admin_key"}))
        settings = json.dumps({"config": keyless} | paths)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Life(config, tokenizer, engine_command, settings, listener).run())


def _warn(tokenizer: Tokenizer, config: Config) -> None:
    """Of what the settings and the tokenizer's files say and this server cannot honour."""
    for name in config.default_chat_template_kwargs:
        if name not in tokenizer.chat_template.switches:
            logger.warning("--default-chat-template-kwargs: this model's chat template does not know %s", name)
    if tokenizer.model_vocab_size is not None and tokenizer.largest_id >= tokenizer.model_vocab_size:
        logger.warning(
            "tokenizer.json makes token ids up to %d, but by config.json the vocabulary of the model ends at %d: "
            "a text that has such a token will be refused",
            tokenizer.largest_id,
            tokenizer.model_vocab_size - 1,
        )


class _Life:
    """One run of the server, from the first signal handler to the exit code."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        engine_command: Sequence[str],
        settings: str,
        listener: socket.socket,
    ) -> None:
        self._config = config
        self._listener = listener
        self._metrics = Metrics(config.metrics_prefix)
        self._engine = AsyncEngine(
            engine_command,
            settings,
            self._metrics,
            step_timeout=config.step_timeout,
            max_queue=config.max_queue,
            max_of_one=config.max_concurrency_per_key,
        )
        services = services_for(config, self._engine, tokenizer, self._metrics)
        self._model_name = services.model_names[0]
        app = create_app(
            services,
            api_keys=config.api_keys(),
            admin_keys=config.admin_key,
            allowed_origins=config.allowed_origins,
            root_path=config.root_path,
        )
        self._http = _Http(
            uvicorn.Config(
                app,
                **connection.SETTINGS,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
            )
        )
        self._asked_to_stop = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        logger.info("listening on %s", self._url())
        self._engine.start()
        serving = asyncio.create_task(self._http.serve([self._listener]))
        beside = [
            asyncio.create_task(show_start(self._engine, self._url(), self._model_name)),
            asyncio.create_task(self._report()),
        ]
        await _first_of(self._asked_to_stop.wait(), self._engine_death(), _finished(serving))
        if self._asked_to_stop.is_set():
            logger.info("stopping: running requests get %g s", self._config.shutdown_timeout)
            await _first_of(self._engine.drain(self._config.shutdown_timeout), self._forced.wait())
        self._http.should_exit = True
        if self._forced.is_set():
            self._http.force_exit = True
            await self._engine.shutdown(grace=0)
        await serving
        await self._engine.shutdown()
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        if self._engine.state.phase == "dead":
            complain(self._engine.state.reason or "the engine died")
            return 1
        return 1 if self._forced.is_set() else 0

    def _on_signal(self) -> None:
        if self._asked_to_stop.is_set():
            self._forced.set()
            self._http.force_exit = True
        self._asked_to_stop.set()

    async def _engine_death(self) -> None:
        while self._engine.state.phase != "dead":
            await self._engine.next_state()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            self._metrics.log_line()

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: on a signal it would close its doors, and we still answer 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError if the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connection.end_stalled_ones(listener)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


async def _first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of them to end and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _finished(task: "asyncio.Task[None]") -> None:
    await asyncio.wait({task})
