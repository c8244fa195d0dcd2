"""SGLang's gateway, the real wheel, before two servers of the demo pair."""

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest
from openai import OpenAI

from tests.clients.environments import python_of
from tests.fast.api.served import PATIENCE, until
from tests.server.demo import children, num_ended, num_running, process, ready
from tools.bench.own_server import free_port

PROMPT = "Count from one to nine."
FLAGS = ("demo", "--verify", "full", "--max-num-seqs", "4", "--shutdown-timeout", "1200", "--step-timeout", "1200")


class Routed(NamedTuple):
    """A router, the addresses of the two servers behind it, and the process of the second."""

    url: str
    servers: tuple[str, str]
    second: "subprocess.Popen[str]"


@pytest.fixture(scope="module")
def routed(environments: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    ports = [str(free_port()) for _ in range(2)]
    log = tmp_path_factory.mktemp("router") / "log"
    with ready(*FLAGS) as one, process(*FLAGS) as (two, second):
        command = [python_of("router"), "-m", "sglang_router.launch_router", "--worker-urls", one, two]
        command += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", ports[0], "--prometheus-port", ports[1]]
        command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
        command += ["--health-check-timeout-secs", f"{PATIENCE:.0f}"]
        with log.open("w") as lines, subprocess.Popen(command, stdout=lines, stderr=lines) as router:
            try:
                url = f"http://127.0.0.1:{ports[0]}"
                until(lambda: router.poll() is not None or all_answer(url))
                assert router.poll() is None, log.read_text()[-2000:]
                yield Routed(url, (one, two), second)
            finally:
                router.terminate()


def all_answer(url: str) -> bool:
    try:
        return all(ask(url, "x").status_code == 200 for _ in range(2))
    except httpx.HTTPError:
        return False


def ask(url: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def test_answers_and_streams_come_through_from_both_servers_as_they_are(routed: Routed):
    before = [num_ended(url) for url in routed.servers]
    messages = [{"role": "user", "content": PROMPT}]
    texts = []
    for url in (routed.servers[0], routed.url, routed.url):
        create = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE).chat.completions.create
        whole = create(model="demo", messages=messages, temperature=0, max_tokens=24)
        chunks = create(model="demo", messages=messages, temperature=0, max_tokens=24, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        texts += [whole.choices[0].message.content, streamed]
    assert texts[0] and len(set(texts)) == 1
    for url, ended in zip(routed.servers, before, strict=True):
        until(lambda url=url, ended=ended: num_ended(url) >= ended + 2)


def test_a_refusal_comes_through_with_its_status_and_its_message(routed: Routed):
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "temperature": -1}
    refused = httpx.post(f"{routed.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert refused.status_code == 400 and "temperature" in refused.text


def test_the_gateway_drops_the_salt_of_a_chat_and_keeps_that_of_a_completion_as_the_docs_say(routed: Routed):
    text = "tenants that share a prefix " * 12

    def cached(url: str, path: str, salt: str) -> int:
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        body = {"model": "demo", "max_tokens": 1, "cache_salt": salt} | prompt
        usage = httpx.post(f"{url}{path}", json=body, timeout=PATIENCE).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    for path in ("/v1/completions", "/v1/chat/completions"):
        assert [cached(routed.servers[0], path, salt) for salt in "ab"] == [0, 0]
    assert [cached(routed.url, "/v1/completions", salt) for salt in "cdef"] == [0] * 4
    assert max(cached(routed.url, "/v1/chat/completions", salt) for salt in "cdef") > 0


def test_what_a_draining_server_refuses_and_what_a_dead_one_cannot_take_goes_to_the_other(routed: Routed):
    """Last, because it ends a server. Its engine is stopped, so that it drains until the test lets it end."""
    (engine,) = children(routed.second.pid)
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(ask, routed.servers[1], PROMPT, ignore_eos=True)
            until(lambda: num_running(routed.servers[1]))
            routed.second.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{routed.servers[1]}/ready", timeout=PATIENCE).status_code != 200)
            assert [ask(routed.url, f"request {number}").status_code for number in range(6)] == [200] * 6
        finally:
            os.kill(engine, signal.SIGCONT)
        answer = running.result()
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert routed.second.wait(PATIENCE) == 0
    assert [ask(routed.url, f"request {number}").status_code for number in range(6)] == [200] * 6
