"""The real HAProxy with docker/haproxy.cfg before two replicas, of which one drains. Debian's package is `haproxy`."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_connection, create_server

import httpx
import pytest

from tests.deploy.haproxy import HAPROXY, configuration

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
def proxied(tmp_path: Path) -> Iterator[tuple[int, ThreadingHTTPServer, ThreadingHTTPServer]]:
    """The proxy's port, a draining replica whose /ready still says 200, and one that serves."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(serving(handler)) for handler in (Draining, Replica)]
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (tmp_path / "haproxy.cfg").write_text(configuration(port, [replica.server_port for replica in replicas]))
        proxy = subprocess.Popen([str(HAPROXY), "-f", tmp_path / "haproxy.cfg"], stdout=subprocess.DEVNULL)
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        until = time.monotonic() + 20
        while time.monotonic() < until and proxy.poll() is None:
            with suppress(OSError), create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port, *replicas


@pytest.mark.parametrize("size", [2, 100_000], ids=["small", "a long conversation"])
def test_a_request_that_a_draining_replica_refuses_is_asked_of_another(
    proxied: tuple[int, ThreadingHTTPServer, ThreadingHTTPServer], size: int
) -> None:
    port, draining, serving_one = proxied

    def body() -> Iterator[bytes]:
        time.sleep(0.05)  # The head is a packet of its own then.
        yield b"x" * size

    with httpx.Client(trust_env=False, headers={"Content-Length": str(size)}) as client:
        answers = [client.post(f"http://127.0.0.1:{port}/v1/x", content=body()).status_code for _ in range(6)]
    assert answers == [200] * 6
    assert serving_one.asked == 6  # type: ignore[attr-defined]
    assert 1 <= draining.asked <= 6, "no request asks it twice"  # type: ignore[attr-defined]
