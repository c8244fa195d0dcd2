"""The real HAProxy with docker/haproxy.cfg before two replicas, of which one drains. Debian's package is `haproxy`."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.deploy.haproxy import HAPROXY, proxy
from tests.fast.api.served import PATIENCE

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="no haproxy here")


class Replica(BaseHTTPRequestHandler):
    """A replica that is ready, and answers every request with `status` once its body is there."""

    protocol_version = "HTTP/1.1"
    status = 200

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1  # type: ignore[attr-defined]
        self._answer(self.status)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Draining(Replica):
    status = 503


@contextmanager
def serving(handler: type[Replica]) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[str, ThreadingHTTPServer, ThreadingHTTPServer]]:
    """The proxy's address, a draining replica whose /ready still says 200, and one that serves."""
    with (
        serving(Draining) as draining,
        serving(Replica) as serving_one,
        proxy(tmp_path, [draining.server_port, serving_one.server_port]) as url,
    ):
        yield url, draining, serving_one


@pytest.mark.parametrize("size", [2, 100_000], ids=["small", "a long conversation"])
def test_a_request_that_a_draining_replica_refuses_is_asked_of_another(
    proxied: tuple[str, ThreadingHTTPServer, ThreadingHTTPServer], size: int
) -> None:
    url, draining, serving_one = proxied

    def body() -> Iterator[bytes]:
        time.sleep(0.05)  # The head is a packet of its own then.
        yield b"x" * size

    with httpx.Client(trust_env=False, headers={"Content-Length": str(size)}, timeout=PATIENCE) as client:
        answers = [client.post(f"{url}/v1/x", content=body()).status_code for _ in range(6)]
    assert answers == [200] * 6
    assert serving_one.asked == 6  # type: ignore[attr-defined]
    assert 1 <= draining.asked <= 6, "no request asks it twice"  # type: ignore[attr-defined]
