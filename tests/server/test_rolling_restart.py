"""Rolling restarts behind the real HAProxy with docker/haproxy.cfg lose no request. Debian's package is `haproxy`."""

import contextlib
import re
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.haproxy import HAPROXY, proxy, states
from tests.fast.api.served import PATIENCE, Script, until
from tests.server.own_process import ASK, MAIN, Process, ids
from tools.bench.own_server import free_port

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="no haproxy here: apt-get install haproxy")

WORK_MS = 20
DRAIN_DELAY = 10 * PATIENCE
UNTIL_TOLD = f"""
import asyncio
from pathlib import Path

sleep = asyncio.sleep

async def until_told(seconds, *result):
    if seconds != {DRAIN_DELAY}:
        return await sleep(seconds, *result)
    while not Path(FILE).exists():
        await sleep(0.01)
    for _ in range(10):  # turns of the loop, in which the server reads what has come
        await sleep(0.01)

asyncio.sleep = until_told
"""
"""A drain delay that ends once there is a file."""


class Replica:
    """A server that can be restarted on its port, and answers "fine" to all that it is asked."""

    def __init__(self, model_folder: Path) -> None:
        self._model_folder = model_folder
        self.port = free_port()
        self.refused: list[str] = []
        self.start()

    def start(self) -> None:
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dft-")))
        script = self._stack.enter_context(contextlib.closing(Script(folder)))
        self._over = folder / "over"
        main = UNTIL_TOLD.replace("FILE", repr(str(self._over))) + MAIN
        delay = f"drain_delay={DRAIN_DELAY}"
        self.process = Process(script, self._model_folder, port=self.port, main=main, settings=delay)
        self._stack.callback(self.process.close)
        self.process.ready(max_num_seqs=64)
        script.plan([*ids(self._model_folder, "fine"), 2])

    def leave(self) -> None:
        """Send SIGTERM, after which /ready says 503."""
        self.process.popen.send_signal(signal.SIGTERM)
        self.process.read_until("draining")

    def stop(self) -> int:
        """End the drain delay and return the exit code. Requests that the server refused go to `refused`."""
        self._over.touch()
        code = self.process.wait()
        self.refused += [line for line in self.process.lines() if re.search(r"POST \S+ 503 ", line)]
        self.close()
        return code

    def close(self) -> None:
        self._stack.close()


@pytest.mark.parametrize("retries", [True, False], ids=["as shipped", "without retries"])
def test_four_rolling_restarts_lose_no_request_of_four_clients(model_folder, tmp_path, retries) -> None:
    """Without retries the drain delay alone keeps requests away from a server that drains."""

    def changed(text: str) -> str:
        """Ask /ready ten times as often. Without `retries` ask one replica only."""
        assert text.count("check inter 2s fall 2 rise 1") == text.count("retry-on") == 1
        text = text.replace("check inter 2s", "check inter 200ms")
        return text if retries else re.sub(r"(?m)^ *(retry-on|retries|option redispatch).*\n", "", text)

    with contextlib.ExitStack() as stack:
        replicas = [Replica(model_folder) for _ in range(2)]
        for replica in replicas:
            stack.callback(replica.close)
        url = stack.enter_context(proxy(tmp_path, [replica.port for replica in replicas], changed))
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
        for number in (0, 1, 0, 1):
            replicas[number].leave()
            until(lambda number=number: states(url)[number] == "DOWN")
            assert replicas[number].stop() == 0
            replicas[number].start()
            until(lambda: states(url) == ["UP", "UP"])
            asked = len(answers)
            until(lambda asked=asked: len(answers) > asked + 20 or any(client.done() for client in clients))
        stopped.set()
        for client in clients:
            client.result()
        assert set(answers) == {"fine"}
        assert [replica.refused for replica in replicas] == [[], []]
