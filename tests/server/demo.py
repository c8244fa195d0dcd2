"""The real server with the demo pair, or with another model."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def ready(*flags: str) -> Iterator[str]:
    """Yield the address of a server that is ready. SIGTERM stops it, which must end it with 0."""
    with process(*flags) as (url, server):
        yield url
    assert server.returncode == 0


@contextlib.contextmanager
def process(*flags: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the address of a server that is ready, and its process, which SIGTERM stops."""
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--device", "cpu", *flags]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        # A full pipe would stop the server behind some hundred requests.
        reader = threading.Thread(target=deque, args=(server.stderr, 0))
        try:
            for line in server.stderr:
                if found := re.search(r"ready: .* at (http://\S+)", line):
                    break
            else:
                pytest.fail("the server ended before it was ready")
            reader.start()
            yield found.group(1), server
        finally:
            server.send_signal(signal.SIGTERM)
            if reader.ident:
                reader.join()
