"""One engine process of one epoch, and the two sockets that lead to it."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from app.client.child_process import engine_environment
from app.messages import Command, Reply

_LAST_WORDS_SECONDS = 0.2
_TERMINATE_SECONDS = 2.0
_MOST_IN_A_TURN = 32
_LONGEST_IPC_FOLDER = 80


class EngineLink:
    """A running engine process. Make one with `open`, and always `close` it.

    The engine is its own session, so Ctrl-C in a terminal reaches only the API process, which then drains. Its stdin
    stays open as long as this process lives: the end of it tells the engine that its parent is gone.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._folder = _private_folder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._replies = self._context.socket(zmq.PULL)
        for socket in (self._commands, self._replies):
            socket.set_hwm(0)  # AsyncEngine bounds what is sent; a socket that drops messages would lose requests.
            socket.linger = 0
        self._addresses = [f"ipc://{self._folder / name}" for name in ("commands", "replies")]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    async def open(cls, command: Sequence[str], settings: str, epoch: int) -> "EngineLink":
        """Bind the sockets and start `command` with their addresses, the epoch, and `settings` as stdin's first line.

        Raises OSError if the process cannot be started.
        """
        link = cls(epoch)
        try:
            link._commands.bind(link._addresses[0])
            link._replies.bind(link._addresses[1])
            link._process = await asyncio.create_subprocess_exec(
                *command,
                *link._addresses,
                str(epoch),
                stdin=asyncio.subprocess.PIPE,
                env=engine_environment(),
                start_new_session=True,
            )
            assert link._process.stdin is not None
            link._process.stdin.write(settings.encode() + b"\n")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await link._process.stdin.drain()
        except BaseException:
            await link.close()
            raise
        return link

    def send(self, command: Command) -> None:
        """Send without waiting. To a dead engine nothing is sent: its death is reported by `replies` ending."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def replies(self) -> AsyncGenerator[Reply, None]:
        """Every reply in order, to the end of the process, including what it sent just before dying.

        What waits already comes within one turn of the loop, up to a bound, so that requests whose readers are behind
        get it as one delta. Raises msgspec.DecodeError for a reply that is none of `Reply`.
        """
        assert self._process is not None
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        # The descriptor is readable until a receive has found nothing, and again from the next message on.
        descriptor = self._replies.fileno()
        loop.add_reader(descriptor, news.set)
        exited = asyncio.ensure_future(self._process.wait())
        exited.add_done_callback(lambda _: news.set())
        try:
            while True:
                for count, reply in enumerate(self._waiting(), 1):
                    yield reply
                    if count % _MOST_IN_A_TURN == 0:
                        await asyncio.sleep(0)
                news.clear()
                if not exited.done():
                    await news.wait()
                elif not await _happens(news, _LAST_WORDS_SECONDS):
                    return
        finally:
            loop.remove_reader(descriptor)
            exited.cancel()

    def _waiting(self) -> Iterator[Reply]:
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._decoder.decode(self._replies.recv(zmq.NOBLOCK))

    def exit_reason(self) -> str:
        """How the process ended, in words."""
        code = self._process.returncode if self._process else None
        if code is None:
            return "the engine process stopped answering"
        if code < 0:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        return f"the engine process ended with exit code {code}"

    def kill(self) -> None:
        """End the process without asking it: one that hangs in a device call hears no SIGTERM. `close` is still due."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self, grace: float = 0.0) -> None:
        """Wait `grace` seconds for the process to end by itself, terminate it, kill it if need be; free the sockets."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            ends = ((grace, None), (_TERMINATE_SECONDS, process.terminate), (_TERMINATE_SECONDS, process.kill))
            for seconds, end in ends:
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    if end is not None and process.returncode is None:
                        end()
                    async with asyncio.timeout(seconds):
                        await process.wait()
            process.stdin.close()
        self._commands.close()
        self._replies.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether it happens within this time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


def _private_folder() -> Path:
    """A fresh folder that only this user may enter (0700), with a path short enough for a Unix socket (107 bytes).

    Where nothing of the usual is writable, in the memory that Linux shares. Never an abstract socket: those have no
    permissions. Raises OSError, which says what to do, if there is no place at all.
    """
    for place in _places():
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="dflash-", dir=place))
    raise OSError(f"no folder for its sockets: {', '.join(_places())} cannot be written to. Set TMPDIR to one that can")


def _places() -> list[str]:
    """Where the sockets may lie, the first choice first."""
    places = [os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"]
    return [place for place in places if place and len(os.fsencode(place)) <= _LONGEST_IPC_FOLDER]
