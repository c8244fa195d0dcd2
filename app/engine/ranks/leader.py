"""The other ranks, seen from rank 0: their processes, and the sockets that carry each step to them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from app.engine.comm.comm import Meeting
from app.engine.device.base import Backend
from app.engine.load.engine import Rank
from app.engine.ranks.runner import teller
from app.messages import how_ended

FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "app.engine.ranks.follower")
_PR_SET_PDEATHSIG = 1
STORE = "ranks"
"""File in the private folder through which ranks find each other."""


def leave_with_parent() -> None:
    """End this process when the one that started it ends, whose end closes stdin.

    On Linux the kernel kills this process too, because one that is stopped reads nothing. It does so when the thread
    ends that started this process, so that has to be one that lives as long as its process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class Followers:
    """Processes of the ranks 1 to `size` - 1, each with a socket in the private `folder`.

    `settings` is the JSON line of the EngineConfig for their stdin, whose end ends them. `on_end` gets a sentence about
    the first that ends before `close`, in a thread. Rank 0 waits `timeout_seconds` for them.
    """

    def __init__(
        self,
        settings: str,
        size: int,
        folder: Path,
        on_end: Callable[[str], None],
        command: tuple[str, ...] = FOLLOWER_COMMAND,
        timeout_seconds: int = 600,
    ) -> None:
        self._settings = settings
        self._size = size
        self._folder = folder
        self._on_end = on_end
        self._command = command
        self._timeout_seconds = timeout_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._watchers: list[threading.Thread] = []
        self._ending = threading.Lock()

    def join(self, backend: Backend) -> Rank:
        """Start the processes and return rank 0 once all have joined. Raises UnsupportedError with too few devices."""
        if self._size == 1:
            return Rank()
        backend.check_ranks(self._size)
        self.start()
        comm = backend.join(Meeting(0, self._size, self._folder / STORE, self._timeout_seconds))
        return Rank(comm, teller(self.send))

    def start(self) -> None:
        for rank in range(1, self._size):
            address = f"ipc://{self._folder / f'rank-{rank}'}"
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(address)
            self._sockets.append(socket)
            command = [*self._command, str(rank), address]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(self._settings)
                process.stdin.flush()
            self._watchers.append(threading.Thread(target=self._watch, args=(rank, process), daemon=True))
            self._watchers[-1].start()

    def send(self, message: bytes) -> None:
        for socket in self._sockets:
            socket.send(message)

    def wait_for_end(self, seconds: float) -> None:
        """Report the process that died first: it caused rank 0's error."""
        for watcher in self._watchers:
            watcher.join(seconds / len(self._watchers))

    def close(self) -> None:
        """End the processes, also those that are stopped."""
        self._ending.acquire(blocking=False)
        for process in self._processes:
            process.kill()
        for watcher, process in zip(self._watchers, self._processes, strict=True):
            watcher.join()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        self._context.destroy()

    def _watch(self, rank: int, process: "subprocess.Popen[str]") -> None:
        """Wait for the end of a process, and report it unless another has ended before."""
        assert process.stdout is not None
        said = process.stdout.read().splitlines()
        code = process.wait()
        time.sleep(0.2 if code >= 0 else 0)  # it may have failed because another one was killed, which tells more
        if self._ending.acquire(blocking=False):
            self._on_end(f"rank {rank} {how_ended(code)}" + (f": {said[-1]}" if said and code >= 0 else ""))
