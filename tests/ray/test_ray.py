"""Two replicas of the demo pair on a Ray cluster, over HTTP with OpenAI's client."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest
from openai import APIConnectionError, APIError, APIStatusError, OpenAI

from tests.ray.cluster import PATIENCE, SETTINGS, Cluster, cluster, engines, skip_without_ray, until
from tests.server.demo import num_ended, ready

PROMPTS = ["Count from one to nine.", "The fox said:", "def add(a, b):", "1, 2, 3, 4,", "Once upon a time", "Hello"]


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def text_of(client: OpenAI, prompt: str, session: str = "", max_tokens: int = 32) -> str:
    """Return the text of a stream that has come whole."""
    headers = {"x-session-id": session} if session else {}
    chunks = client.completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_headers=headers
    )
    parts = [chunk.choices[0] for chunk in chunks]
    assert parts[-1].finish_reason
    return "".join(part.text for part in parts)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with two replicas."""
    skip_without_ray()
    with cluster(tmp_path_factory.mktemp("ray") / "log") as running:
        assert running.deploy() == {"states": {"RUNNING": 2}}
        yield running


@pytest.fixture
def whole(two: Cluster) -> Iterator[Cluster]:
    """The cluster with two replicas that answer, before and after a test that breaks one."""
    yield two
    until(lambda: two.num_running() == 2 and len(set(engines().values())) == 2, "two replicas")


def outcomes(two: Cluster, number: int, max_tokens: int, hurt) -> list[str]:
    """Return how each of `number` streams ends that run while `hurt` is called: "length" is whole."""
    client, begun = client_of(two.url), threading.Semaphore(0)

    def stream(index: int) -> str:
        try:
            chunks = client.completions.create(
                model="demo",
                prompt=PROMPTS[index % len(PROMPTS)],
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True, "speculate": False},
            )
            begun.release()
            last = None
            for chunk in chunks:
                last = chunk.choices[0].finish_reason
        except APIStatusError as error:
            return str(error.status_code)
        except (APIConnectionError, httpx.HTTPError):
            return "cut"
        except APIError:
            return "error event"
        return last or "cut"

    with ThreadPoolExecutor(number) as pool:
        running = [pool.submit(stream, index) for index in range(number)]
        for _ in range(number):
            assert begun.acquire(timeout=PATIENCE)
        hurt()
        return [one.result(PATIENCE) for one in running]


def test_both_replicas_serve_and_their_texts_are_a_lone_servers(two: Cluster):
    with ready("demo", "--verify", "full", "--max-num-seqs", "4") as url:
        alone = [text_of(client_of(url), prompt) for prompt in PROMPTS]
    client = client_of(two.url)
    assert [text_of(client, prompt) for prompt in PROMPTS] == alone
    assert [text_of(client, prompt) for prompt in PROMPTS] == alone
    ended = [num_ended(two.url) for _ in range(8)]  # the proxy asks one replica after another
    assert 0 < max(ended) < 2 * len(PROMPTS), "one replica had all requests"


def test_a_wrong_argument_is_refused_once_with_its_sentence(two: Cluster, tmp_path: Path):
    (tmp_path / "settings.yaml").write_text("drain_delay: 5")
    assert two.deploy(config=str(tmp_path / "settings.yaml"))["refused"].startswith("drain_delay is not read here")
    assert "unknown key devise" in two.deploy(devise="cpu")["refused"]
    assert two.deploy(max_num_seqs="many")["refused"].startswith("max_num_seqs many: ")
    assert two.deploy(port=9000)["refused"].startswith("port is not read here")
    assert two.deploy(device="cuda:1")["refused"].startswith("device=cuda:1: say cpu, cuda or npu")
    assert "--tensor-parallel-size 3" in two.deploy(tensor_parallel_size=3)["refused"]
    assert two.deploy(max_replicas=3)["refused"].startswith("num_replicas is not read with max_replicas")
    assert two.deploy(min_replicas=2)["refused"].startswith("min_replicas is read only with max_replicas")
    assert two.deploy(draft_model=str(tmp_path))["refused"].startswith(f"{tmp_path}/config.json")
    events = {"enable_kv_cache_events": True}
    assert "--no-prefix-caching" in two.deploy(kv_events_config=events, prefix_caching=False)["refused"]
    assert "--api-key-file /nowhere" in two.deploy(api_key_file="/nowhere")["refused"]
    assert two.num_running() == 2


def test_what_a_replica_alone_finds_fails_once_with_its_sentence(two: Cluster):
    settings = SETTINGS | {"num_replicas": 1, "kv_cache_memory": 10}
    failed = two.obey({"fail": settings})["failed"]
    assert "failed to start 1 times" in failed and "--kv-cache-memory" in failed
    assert two.num_running() == 2


def test_conversations_with_a_session_header_stay_where_their_prefixes_are(two: Cluster):
    def cached(client: OpenAI, session: str) -> int:
        text, total = f"{session}: {PROMPTS[0]} ", 0
        for _ in range(5):
            answer = client.completions.create(
                model="demo", prompt=text, max_tokens=24, temperature=0, extra_headers={"x-session-id": session}
            )
            assert answer.usage and answer.usage.prompt_tokens_details
            total += answer.usage.prompt_tokens_details.cached_tokens or 0
            text += answer.choices[0].text + " And then? "
        return total

    spread = sum(cached(client_of(two.url), f"conversation {number}") for number in range(8))
    with ready("demo", "--verify", "full", "--max-num-seqs", "4") as url:
        alone = sum(cached(client_of(url), f"conversation {number}") for number in range(8))
    assert alone > 0 and spread >= 0.9 * alone, f"{spread} of {alone} cached tokens"


def test_a_full_replica_says_429_and_when_to_come_again(two: Cluster):
    headers = {"x-session-id": "one"}
    body = {"model": "demo", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "speculate": False}

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{two.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)

    with ThreadPoolExecutor(14) as pool:
        answers = list(pool.map(ask, range(14)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429} and len(refused) <= 8
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert all(answer.json()["error"]["code"] == "server_busy" for answer in refused)


def test_the_death_of_an_engine_fails_its_own_streams_alone_and_new_requests_are_held(whole: Cluster):
    victim = min(engines())
    ended = outcomes(whole, 6, 1900, lambda: os.kill(victim, signal.SIGKILL))
    assert set(ended) == {"length", "error event"}
    client = client_of(whole.url)
    for prompt in PROMPTS:
        assert text_of(client, prompt), "no request is refused while the engine is started again"
    until(lambda: len(engines()) == 2, "the engine was not started again")


def test_the_death_of_a_replica_fails_its_own_streams_alone_and_it_is_replaced(whole: Cluster):
    engine, victim = min(engines().items())
    ended = outcomes(whole, 6, 1900, lambda: os.kill(victim, signal.SIGKILL))
    assert "length" in ended and set(ended) <= {"length", "cut"}
    until(lambda: whole.num_running() == 2 and engine not in engines(), "the replica was not replaced")
    until(lambda: len(set(engines().values())) == 2, "two engines")
    client = client_of(whole.url)
    assert all(text_of(client, prompt) for prompt in PROMPTS)


def test_a_replica_whose_engine_is_beyond_restart_is_replaced(whole: Cluster):
    victim = min(engines().values())

    def is_gone() -> bool:
        for engine, replica in engines().items():
            if replica == victim:
                os.kill(engine, signal.SIGKILL)
        return victim not in engines().values() and len(set(engines().values())) == 2

    until(is_gone, "the replica was not replaced")
    client = client_of(whole.url)
    assert all(text_of(client, prompt) for prompt in PROMPTS)


def test_a_change_of_a_flag_under_load_fails_no_request(whole: Cluster):
    before, client, over = set(engines()), client_of(whole.url), threading.Event()

    def load(index: int) -> int:
        for number in count(index):
            if over.is_set():
                return number - index
            assert text_of(client, PROMPTS[number % len(PROMPTS)], max_tokens=8)
        return 0

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load, index) for index in range(3)]
        try:
            assert whole.deploy(max_num_seqs=5) == {"states": {"RUNNING": 2}}
        finally:
            over.set()
        assert min(one.result(PATIENCE) for one in loads) > 0
    assert not before & set(engines())


def test_a_smaller_number_of_replicas_lets_a_long_stream_end(two: Cluster):
    """Last but one, because it leaves one replica."""
    ended = outcomes(two, 6, 900, lambda: two.deploy(num_replicas=1, max_num_seqs=5))
    assert ended == ["length"] * 6
    until(lambda: len(engines()) == 1, "one replica")
    assert text_of(client_of(two.url), PROMPTS[0])


def test_the_number_of_replicas_follows_the_load(two: Cluster):
    two.deploy(num_replicas=1)
    settings = {name: value for name, value in SETTINGS.items() if name != "num_replicas"}
    two.obey({"deploy": settings | {"max_replicas": 2, "target_ongoing_requests": 1}})
    until(lambda: len(engines()) == 1, "one replica without load")
    client, over = client_of(two.url), threading.Event()

    def load(index: int) -> None:
        while not over.is_set():
            assert text_of(client, PROMPTS[index], max_tokens=400)

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load, index) for index in range(4)]
        try:
            until(lambda: two.num_running() == 2 and len(set(engines().values())) == 2, "a second replica")
        finally:
            over.set()
        for one in loads:
            one.result(PATIENCE)
