"""Ports of programs that are told theirs, or that get the same one again."""

import contextlib
import random
import socket

NUMBERS = range(20_000, 32_768)
"""Ports below those that Linux gives to connections and to servers on port 0, so that nothing takes one meanwhile."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free."""
    while True:
        port = random.SystemRandom().choice(NUMBERS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
