"""Raw connections to a server."""

import json
import socket

from tests.fast.api.served import PATIENCE


def connection_address(server) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rsplit(":", 1)[1])


def request(**fields) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def connect(server, **fields) -> socket.socket:
    """A raw connection with a request on it."""
    connection = socket.create_connection(connection_address(server), timeout=PATIENCE)
    connection.sendall(request(**fields))
    return connection
