"""SGLang's gateway, the real wheel, before two servers of the demo pair."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from openai import OpenAI

from tests.ray.cluster import PATIENCE, PYTHON, until
from tests.server.demo import process, ready


class Routed(NamedTuple):
    """A router, the addresses of the two servers behind it, and the process of the second."""

    url: str
    servers: tuple[str, str]
    second: "subprocess.Popen[str]"


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    if not PYTHON.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("the router is not installed: `make test-ray`")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with ready() as one, process() as (two, second):
        command = [PYTHON, "-m", "sglang_router.launch_router", "--worker-urls", one, two, "--policy", "round_robin"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--health-check-endpoint", "/ready"]
        command += ["--health-check-interval-secs", "2", "--prometheus-port", "0"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
            try:
                url = f"http://127.0.0.1:{port}"
                until(lambda: router.poll() is None and answers(url), "the router")
                yield Routed(url, (one, two), second)
            finally:
                router.terminate()


def answers(url: str) -> bool:
    try:
        return ask(url, "x").status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str, prompt: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 8}, timeout=PATIENCE
    )


def num_served(url: str) -> float:
    """Return how many requests this server has ended."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("dflash:request_success_total{"))


def test_answers_and_streams_come_through_from_both_servers_as_they_are(routed: Routed):
    before = [num_served(url) for url in routed.servers]
    messages = [{"role": "user", "content": "Count from one to nine."}]
    texts = []
    for url in (routed.servers[0], routed.url, routed.url):
        create = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE).chat.completions.create
        whole = create(model="demo", messages=messages, temperature=0, max_tokens=24).choices[0].message.content
        chunks = create(model="demo", messages=messages, temperature=0, max_tokens=24, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        texts += [whole, streamed]
    assert texts[0] and len(set(texts)) == 1
    after = [num_served(url) for url in routed.servers]
    assert all(new > old for new, old in zip(after, before, strict=True)), "one server had all requests"


def test_the_gateway_drops_the_salt_as_the_docs_say(routed: Routed):
    prompt = "tenants that share a prefix " * 12
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}

    def cached(url: str, salt: str) -> int:
        usage = httpx.post(f"{url}/v1/completions", json=body | {"cache_salt": salt}, timeout=PATIENCE).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(routed.servers[0], salt) for salt in ("a", "b")] == [0, 0]
    assert max(cached(routed.url, salt) for salt in "cdef") > 0, "the salt arrives now: say so in docs/operations.md"


def test_a_dead_worker_costs_no_request(routed: Routed):
    routed.second.kill()
    assert [ask(routed.url, f"request {number}").status_code for number in range(8)] == [200] * 8
    time.sleep(6)  # The router finds the death by its probes, too.
    assert [ask(routed.url, f"request {number}").status_code for number in range(4)] == [200] * 4
