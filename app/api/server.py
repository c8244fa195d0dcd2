"""The life of the server process: bind, start the engine, serve while it loads, drain on a signal, stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from app import log
from app.api import connection
from app.api.app import create_app, services_for
from app.api.display import print_error, show_start
from app.api.services import Services
from app.client.admission import Admission
from app.client.client import EngineClient
from app.client.supervisor import Supervisor
from app.config.settings import Config
from app.metrics import metrics_for
from app.text.chat_template import ChatTemplateError
from app.text.tokenizer import Tokenizer, TokenizerError
from app.wire import encode_config

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "app.engine.process")
_LOG_METRICS_SECONDS = 10.0
_GRACEFUL_SECONDS = 5
"""Time in which uvicorn may write the last bytes of its answers."""


def run(config: Config, target: Path, draft: Path | None, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until a signal comes, and return the exit code.

    It is 0 after a drain, and 2 if the tokenizer's files cannot be used. It is 1 if the port is taken, if the engine
    cannot be used, or after a second signal.
    """
    log.set_up(config.log_level, config.log_format, [*config.api_keys(), *config.admin_key])
    try:
        tokenizer = Tokenizer(target)
    except (TokenizerError, ChatTemplateError) as error:
        print_error(str(error))
        return 2
    _warn(tokenizer, config)
    try:
        listener = _bind(config.host, config.port)
    except OSError as error:
        print_error(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another with --host, --port."
        )
        return 1
    sampling = ", ".join(f"{name} {value:g}" for name, value in asdict(tokenizer.defaults).items())
    logger.info("sampling where a request says nothing: %s", sampling)
    with contextlib.closing(listener):
        settings = encode_config(config.for_engine(target, draft))
        metrics = metrics_for(config.metrics_prefix, config.model_names[0])
        supervisor = Supervisor(engine_command, settings, metrics, step_timeout=config.step_timeout)
        engine = EngineClient(supervisor, Admission(config.max_queue, config.max_concurrency_per_key), metrics)
        services = services_for(config, engine, tokenizer, metrics)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(Server(config, services, listener).serve())


class Server:
    """One run of the server, from the first signal handler to the exit code."""

    def __init__(self, config: Config, services: Services, listener: socket.socket) -> None:
        self._config = config
        self._services = services
        self._engine = services.engine
        self._listener = listener
        app = create_app(services)
        self._http = _Http(uvicorn.Config(app, **connection.SETTINGS, timeout_graceful_shutdown=_GRACEFUL_SECONDS))
        self._tasks: list[asyncio.Task[None]] = []
        self._should_exit = asyncio.Event()
        self._force_exit = asyncio.Event()

    async def serve(self) -> int:
        """Run the server to its end, and return the exit code."""
        serving = self.startup()
        await self.main_loop(serving)
        await self.shutdown(serving)
        if self._engine.state.phase == "dead":
            print_error(self._engine.state.reason or "the engine died")
            return 1
        return 1 if self._force_exit.is_set() else 0

    def startup(self) -> "asyncio.Task[None]":
        """Start the engine and HTTP beside it. Return the task of HTTP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle_exit)
        logger.info("listening on %s%s", self._url(), " and on every other address" if self._on_all_addresses() else "")
        self._engine.start()
        serving = asyncio.create_task(self._http.serve([self._listener]))
        self._tasks = [
            asyncio.create_task(show_start(self._engine, self._url(), self._services.model_names[0])),
            asyncio.create_task(self._log_metrics()),
        ]
        return serving

    async def main_loop(self, serving: "asyncio.Task[None]") -> None:
        """Serve until a signal comes, the engine is dead, or HTTP ends. After a signal, leave and drain."""
        await _wait_for_first(self._should_exit.wait(), self._engine_death(), asyncio.wait({serving}))
        if not self._should_exit.is_set():
            return
        await self._leave()
        if not self._force_exit.is_set():
            logger.info("stopping: running requests get %g s", self._config.shutdown_timeout)
            await _wait_for_first(self._engine.drain(self._config.shutdown_timeout), self._force_exit.wait())

    async def _leave(self) -> None:
        """Say 503 on /ready for the drain delay while requests are taken, so that proxies go elsewhere first.

        A second signal and the engine's death end it. A server that was never ready has no proxy to tell.
        """
        delay = self._config.drain_delay
        if delay and self._engine.state.phase == "ready":
            self._services.is_leaving = True
            logger.info("leaving: /ready says 503, and requests are taken for %g s more", delay)
            await _wait_for_first(asyncio.sleep(delay), self._force_exit.wait(), self._engine_death())

    async def shutdown(self, serving: "asyncio.Task[None]") -> None:
        """End HTTP, the engine and the tasks beside them."""
        self._http.should_exit = True
        if self._force_exit.is_set():
            self._http.force_exit = True
            await self._engine.shutdown(grace=0)
        await serving
        await self._engine.shutdown()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _handle_exit(self) -> None:
        """Begin to drain at the first signal. Force the end at the second."""
        if self._should_exit.is_set():
            self._force_exit.set()
            self._http.force_exit = True
        self._should_exit.set()

    async def _engine_death(self) -> None:
        while self._engine.state.phase != "dead":
            await self._engine.supervisor.next_state()

    async def _log_metrics(self) -> None:
        while True:
            await asyncio.sleep(_LOG_METRICS_SECONDS)
            self._services.metrics.log_line()

    def _on_all_addresses(self) -> bool:
        return self._listener.getsockname()[0] in ("0.0.0.0", "::")

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        if self._on_all_addresses():
            host = "127.0.0.1" if host == "0.0.0.0" else "::1"
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, because they close the port at once, and a drain still answers 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _warn(tokenizer: Tokenizer, config: Config) -> None:
    """Log settings and tokenizer files that this server cannot honour."""
    for name in config.default_chat_template_kwargs:
        if name not in tokenizer.chat_template.switches:
            logger.warning("--default-chat-template-kwargs: this model's chat template does not know %s", name)
    if tokenizer.model_vocab_size is not None and tokenizer.max_id >= tokenizer.model_vocab_size:
        logger.warning(
            "tokenizer.json makes token ids up to %d, but by config.json the vocabulary of the model ends at %d: "
            "a text that has such a token will be refused",
            tokenizer.max_id,
            tokenizer.model_vocab_size - 1,
        )


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError if the address is taken or does not belong to this machine."""
    is_v6 = ":" in host
    listener = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=2048,
        dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
    )
    connection.set_stall_timeout(listener)
    listener.setblocking(False)
    return listener


async def _wait_for_first(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of the coroutines to end, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
