"""Rolling restarts behind the real HAProxy with docker/haproxy.cfg lose no request. Debian's package is `haproxy`."""

import contextlib
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.haproxy import HAPROXY, configuration
from tests.fast.api.served import PATIENCE, Script, until
from tests.server.own_process import ASK, MAIN, Process, ids

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="no haproxy here: apt-get install haproxy")

CHECK_SECONDS = 0.4
"""HAProxy asks /ready five times as often as in docker/haproxy.cfg, so that the test is short."""
DRAIN_DELAY = 2.4
"""Six checks: two of them mark a server down, and the others are for a slow machine."""
WORK_MS = 20


class Replica:
    """A server that can be restarted on its port, and answers "fine" to all that it is asked."""

    def __init__(self, model_folder: Path, drain_delay: float) -> None:
        self._model_folder = model_folder
        self._main = MAIN.replace("Config(", f"Config(drain_delay={drain_delay}, ")
        self.port = 0
        self.refused: list[str] = []
        self.start()

    def start(self) -> None:
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dft-")))
        script = self._stack.enter_context(contextlib.closing(Script(folder)))
        self.process = Process(script, self._model_folder, port=self.port, main=self._main)
        self._stack.callback(self.process.close)
        self.port = int(self.process.read_url().rpartition(":")[2])
        script.ready(max_num_seqs=64)
        self.process.read_until("ready: ")
        script.plan([*ids(self._model_folder, "fine"), 2])

    def stop(self) -> int:
        """Send SIGTERM and return the exit code. Requests that the server refused go to `refused`."""
        self.process.popen.send_signal(signal.SIGTERM)
        code = self.process.wait()
        self.refused += [line for line in self.process.lines() if re.search(r"POST \S+ 503 ", line)]
        self.close()
        return code

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def proxied(folder: Path, replicas: list[Replica], retries: bool) -> Iterator[str]:
    """Run HAProxy before the replicas, and yield its address. Without `retries` it asks one replica only."""
    with httpx.Client(trust_env=False) as client, contextlib.ExitStack() as stack:
        port = free_port()
        text = configuration(port, [replica.port for replica in replicas])
        text = text.replace("check inter 2s", f"check inter {int(1000 * CHECK_SECONDS)}ms")
        if not retries:
            text = re.sub(r"^ *(retry-on|retries|option redispatch).*\n", "", text, flags=re.MULTILINE)
        text = text.replace("timeout connect 5s", f"timeout connect 5s\n    timeout check {PATIENCE:.0f}s")
        assert text.count("check inter 400ms fall 2 rise 1") == 1 and text.count("retry-on") == retries
        (folder / "haproxy.cfg").write_text(text)
        proxy = subprocess.Popen([str(HAPROXY), "-f", folder / "haproxy.cfg"], stdout=subprocess.DEVNULL)
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.get(f"{url}/live").status_code == 200
            return False

        until(is_up)
        yield url


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.parametrize("retries", [True, False], ids=["as shipped", "without retries"])
def test_four_rolling_restarts_lose_no_request_of_four_clients(model_folder, tmp_path, retries) -> None:
    """Without retries the drain delay alone keeps requests away from a server that drains."""
    with contextlib.ExitStack() as stack:
        replicas = [Replica(model_folder, DRAIN_DELAY) for _ in range(2)]
        for replica in replicas:
            stack.callback(replica.close)
        url = stack.enter_context(proxied(tmp_path, replicas, retries))
        stopped = threading.Event()
        answers: list[str] = []

        def keep_asking() -> None:
            with httpx.Client(timeout=PATIENCE, trust_env=False) as client:
                while not stopped.is_set():
                    answer = client.post(f"{url}/v1/completions", json=ASK)
                    answers.append(answer.json()["choices"][0]["text"] if answer.is_success else answer.text)
                    time.sleep(WORK_MS / 1000)

        pool = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(stopped.set)
        clients = [pool.submit(keep_asking) for _ in range(4)]
        for replica in 2 * replicas:
            assert replica.stop() == 0
            replica.start()
            time.sleep(5 * CHECK_SECONDS)  # HAProxy sees it come back.
            asked = len(answers)
            until(lambda asked=asked: len(answers) > asked + 20 or any(client.done() for client in clients))
        stopped.set()
        for client in clients:
            client.result()
        assert set(answers) == {"fine"} and len(answers) > 100
        assert [replica.refused for replica in replicas] == [[], []]
