"""Link to one engine process: the process, and the two sockets that lead to it."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import zmq

from app.engine_client.child_process import engine_environment
from app.messages import how_ended
from app.wire import HEARTBEAT, Command, Reply

# A reply that was sent just before the process ended may arrive after its end.
_LAST_WORDS_SECONDS = 0.2
_TERMINATE_SECONDS = 2.0
# The event loop serves clients after this many replies, however many have arrived.
_MAX_REPLIES_A_TURN = 32
# A Unix socket's path has at most 107 bytes; 27 of them are for names in the folder.
_MAX_FOLDER_BYTES = 80
_PREFIX = "dflash-"
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class EngineLink:
    """Running engine process. Made with `open`; its owner must `close` it.

    The engine has a separate session, so Ctrl-C reaches only the API process, which then drains. Its stdin stays open
    as long as this process lives, and its end tells the engine that the parent is gone.
    """

    def __init__(self) -> None:
        self.folder, self._heartbeat = _private_folder()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._commands = context.socket(zmq.PUSH)
        self._replies = context.socket(zmq.PULL)
        for socket in (self._commands, self._replies):
            socket.set_hwm(0)  # Admission bounds the messages. A socket that drops one would lose a request.
            socket.linger = 0
        self.addresses = [f"ipc://{self.folder / name}" for name in ("commands", "replies")]
        self._process: asyncio.subprocess.Process | None = None
        self._session: int | None = None  # of the process, until it was killed

    @property
    def num_beats(self) -> int:
        """The count that the process raises with each layer that it computes."""
        # Not by its name: some hosts remove files in /tmp that are old.
        return int.from_bytes(os.pread(self._heartbeat.fileno(), 8, 0), sys.byteorder)

    @classmethod
    async def open(cls, command: Sequence[str], settings: str) -> "EngineLink":
        """Bind the sockets and start `command` with their addresses, and with `settings` as stdin's first line.

        Raise OSError if the process cannot be started.
        """
        link = cls()
        try:
            link._commands.bind(link.addresses[0])
            link._replies.bind(link.addresses[1])
            link._process = await asyncio.create_subprocess_exec(
                *command,
                *link.addresses,
                stdin=asyncio.subprocess.PIPE,
                env=engine_environment(),
                start_new_session=True,
            )
            link._session = link._process.pid
            assert link._process.stdin is not None
            link._process.stdin.write(settings.encode() + b"\n")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await link._process.stdin.drain()
        except BaseException:
            await link.close()
            raise
        return link

    def send(self, command: Command) -> None:
        """Send without waiting. To a dead engine nothing is sent, because the end of `replies` reports its death."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    async def replies(self) -> AsyncGenerator[Reply, None]:
        """Yield every reply in order, including those that the process sent just before its end.

        Replies that have arrived come within one turn of the event loop, up to a bound, so that a slow reader gets them
        as one delta. Raise msgspec.DecodeError for a message that is not a `Reply`.
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
                for count, reply in enumerate(self._arrived(), 1):
                    yield reply
                    if count % _MAX_REPLIES_A_TURN == 0:
                        await asyncio.sleep(0)
                news.clear()
                async with asyncio.timeout(_LAST_WORDS_SECONDS if exited.done() else None):
                    await news.wait()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(descriptor)
            exited.cancel()

    def _arrived(self) -> Iterator[Reply]:
        with contextlib.suppress(zmq.Again):
            while True:
                yield _REPLIES.decode(self._replies.recv(zmq.NOBLOCK))

    def exit_reason(self) -> str:
        """Return in words how the process ended."""
        code = self._process.returncode if self._process else None
        if code is None:
            return "the engine process stopped answering"
        return f"the engine process {how_ended(code)}"

    def kill(self) -> None:
        """Kill the process, because one that hangs in a device call does not handle SIGTERM. `close` is still due."""
        if self._session is not None:
            _kill_session(self._session)

    def abandon(self) -> None:
        """Kill the process and remove the folder, also while `close` waits. This process is about to end."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def close(self, grace: float = 0.0) -> None:
        """End the process and free the sockets. After `grace` seconds it is terminated, and then killed."""
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
            self.kill()
            self._session = None
        self._commands.close()
        self._replies.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._heartbeat.close()


def _kill_session(pid: int) -> None:
    """Kill the engine process and its children, any of which may be stopped or hang."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _private_folder() -> tuple[Path, IO[bytes]]:
    """Make a folder that only this user may enter (0700). Return it and the heartbeat's file in it.

    The file is locked until it is closed, also by the end of this process. Folders of processes that were killed are
    removed. Raise OSError if no parent is writable. Abstract sockets would need no folder, but have no permissions.
    """
    for parent in (parents := _parents()):
        _remove_abandoned(Path(parent))
    for parent in parents:
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            unlocked = folder / "unlocked"
            try:
                unlocked.write_bytes(bytes(8))
                heartbeat = unlocked.open("rb")
            except OSError:  # the disk is full
                shutil.rmtree(folder)
                raise
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(heartbeat, fcntl.LOCK_EX)
            unlocked.rename(folder / HEARTBEAT)  # with this name and no lock it is abandoned
            return folder, heartbeat
    tried = ", ".join(parents)
    raise OSError(f"no folder for its sockets: {tried} cannot be written to or are full. Set TMPDIR to one that can")


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders in `parent` whose locks are free: the kernel frees those of a killed process."""
    for folder in parent.glob(f"{_PREFIX}????????"):  # the letters of mkdtemp
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with (folder / HEARTBEAT).open("rb") as heartbeat:
                    fcntl.flock(heartbeat, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def _parents() -> list[str]:
    """Return the folders where the sockets may lie, best first. /dev/shm works on a read-only file system."""
    parents = [os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"]
    return [parent for parent in parents if parent and len(os.fsencode(parent)) <= _MAX_FOLDER_BYTES]
