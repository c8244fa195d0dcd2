"""The server process: bind, start the engine, serve while it loads, drain on a signal, stop."""

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import uvicorn
import uvloop
import zmq

from app import log
from app.api import connection
from app.api.display import print_error, show_start
from app.api.server import ENGINE_COMMAND, Server
from app.config.error import ConfigError
from app.config.settings import Config

logger = logging.getLogger(__name__)

_MIN_OPEN_FILES = 128
"""Open files that no start exceeds: an engine of 8 ranks has 116, because it has 18 and 14 for each further rank."""
_GRACEFUL_SECONDS = 5
"""Time in which uvicorn may write the last bytes of its answers."""
_SWITCH_SECONDS = 0.0005
"""Time that a thread of Python keeps the interpreter while the event loop waits for it, which Python sets to 5 ms."""
_MAX_STOP_SECONDS = 60.0
"""Time after a drain in which HTTP, the engine and the senders of events and spans end, each by its own time limit."""


def run(
    config: Config, target_config: Mapping[str, Any] | None = None, engine_command: Sequence[str] = ENGINE_COMMAND
) -> int:
    """Serve until a signal comes, and end this process. Returns the exit code only if it cannot begin to serve.

    The code is 0 after a drain, 2 if the engine or the tokenizer cannot be used with these settings and files, and 1 if
    the port is taken, too few files may be open, the engine died, or a second signal came. `target_config` is as for
    `Server`.
    """
    log.set_up(config.engine.log_level, config.engine.log_format, [*config.api_keys(), *config.admin_key])
    for note in config.notes:
        logger.info("%s", note)
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _MIN_OPEN_FILES:
        print_error(
            f"only {limit} files may be open: the server needs {_MIN_OPEN_FILES}, and one for each connection. "
            "Raise the limit: ulimit -n 65536"
        )
        return 1
    try:
        server = Server(config, target_config, engine_command)
    except ConfigError as error:
        print_error(str(error))
        return 2
    try:
        listener = _bind(config.host, config.port)
    except OSError as error:
        print_error(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Choose another with --host, --port."
        )
        return 1
    with contextlib.closing(listener):
        try:
            server.bind()
        except zmq.ZMQError as error:
            print_error(f"--kv-events-config: an endpoint cannot be bound: {error}")
            return 1
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.freeze()  # A full collection then looks at requests only, and not for 60 ms at all that was imported.
        _exit(asyncio.Runner(loop_factory=uvloop.new_event_loop).run(Process(server, listener).serve()))


class Process:
    """One run of a server, from the first signal handler to the exit code."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self._server = server
        self._engine = server.engine
        self._listener = listener
        self._http = _Http(
            uvicorn.Config(server.app, **connection.SETTINGS, timeout_graceful_shutdown=_GRACEFUL_SECONDS)
        )
        self._display: asyncio.Task[None]
        self._drain_delay = 0.0
        self._should_exit = asyncio.Event()
        self._num_signals = 0

    async def serve(self) -> int:
        """Run the server to its end, and return the exit code."""
        serving = self.startup()
        await self.main_loop(serving)
        await self.shutdown(serving)
        if self._engine.state.phase == "dead":
            print_error(self._engine.state.reason or "the engine died")
            return 2 if self._engine.state.user_error else 1
        logger.info("stopped")
        return 0

    def startup(self) -> "asyncio.Task[None]":
        """Start the engine and HTTP. Return the task of HTTP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle_exit, number.name)
            # Python calls this handler even while the event loop is busy. The loop's one is still called, and it alone
            # is called twice for two signals that come while a C call holds the interpreter.
            signal.signal(number, self._count_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self._handle_hangup)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, logger.info, "%s: it does nothing here", number.name)
        bound, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("starting on %s%s", url, " and on every other address" if host != bound else "")
        self._server.start()
        serving = asyncio.create_task(self._http.serve([self._listener]))
        self._display = asyncio.create_task(show_start(self._engine, url, self._server.services.model_names[0]))
        return serving

    async def main_loop(self, serving: "asyncio.Task[None]") -> None:
        """Serve until a signal comes, the engine is dead, or HTTP ends. After a signal, leave and drain."""
        await _wait_for_first(self._should_exit.wait(), self._server.death(), asyncio.wait({serving}))
        if not self._should_exit.is_set():
            return
        if self._drain_delay:  # /ready says 503, and requests are still taken, so that proxies go elsewhere
            self._server.services.is_leaving = True
            await _wait_for_first(asyncio.sleep(self._drain_delay), self._server.death())
        await self._server.drain()

    async def shutdown(self, serving: "asyncio.Task[None]") -> None:
        """End HTTP, the engine and the display."""
        self._http.should_exit = True
        await serving
        await self._server.stop()
        self._display.cancel()
        await asyncio.wait([self._display])

    def _handle_exit(self, name: str) -> None:
        """Begin to drain at the first signal. End at once at the second."""
        if self._should_exit.is_set():
            self._exit_at_once()
        config = self._server.config
        if self._engine.state.phase == "ready":  # one that never was has no proxies
            self._drain_delay = config.drain_delay
        logger.info("stopping: %s%s", name, f", draining {self._drain_delay:g} s" if self._drain_delay else "")
        self._should_exit.set()
        # A thread of C, for a C call that never gives the interpreter back.
        seconds = self._drain_delay + config.shutdown_timeout + _MAX_STOP_SECONDS
        faulthandler.dump_traceback_later(min(seconds, threading.TIMEOUT_MAX), exit=True)

    def _handle_hangup(self) -> None:
        """Begin to drain. A terminal that closes sends this signal more than once, so it never counts as the second."""
        if not self._should_exit.is_set():
            self._handle_exit(signal.SIGHUP.name)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._exit_at_once()

    def _exit_at_once(self) -> NoReturn:
        """Kill the engine and end this process, whatever the event loop and the threads do."""
        try:
            self._engine.supervisor.kill()
            logger.info("stopped by a second signal")
        finally:
            _exit(1)


def _exit(code: int) -> NoReturn:
    """End this process. An ordinary end would wait for threads, and one of them may work for ever."""
    try:
        atexit._run_exitfuncs()  # logging's, and those that remove temporary folders
        sys.stdout.flush()
    finally:
        os._exit(code)


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, because they close the port at once, and a drain still answers 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
