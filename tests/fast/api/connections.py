"""Raw connections to a server."""

import contextlib
import json
import socket

from tests.fast.api.served import PATIENCE


def connection_address(server) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rsplit(":", 1)[1])


def request(path: str = "/v1/completions", **fields) -> bytes:
    asked = {"prompt": "hi"} if path == "/v1/completions" else {}
    body = json.dumps({"model": "tiny"} | asked | fields).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


def connect(server, path: str = "/v1/completions", **fields) -> socket.socket:
    """A raw connection with a request on it."""
    connection = socket.create_connection(connection_address(server), timeout=PATIENCE)
    connection.sendall(request(path, **fields))
    return connection


def exchange(server, sent: bytes) -> bytes:
    """All that the server answers before it closes the connection."""
    answer = b""
    with socket.create_connection(connection_address(server), timeout=PATIENCE) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while part := client.recv(65536):
                answer += part
    return answer
