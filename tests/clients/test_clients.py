"""Real clients, unmodified, chat with the demo pair and run a tool loop: docs/clients.md."""

from collections.abc import Iterator

import httpx
import pytest

from app.engine.checkpoint.files import DEMO
from app.text.tokenizer import Tokenizer
from tests.clients.environments import run
from tests.clients.page import CHAT, DEMO_LOOP, LOOP
from tests.clients.programs import CLIENTS
from tests.fast.api.served import PATIENCE
from tests.server.demo import ready

KEYS = "Tom has 6 boxes with 4 keys in each. Tom loses 5 keys. How many keys are left?"
WEATHER = "What is the weather in Bern?"
PROGRAMS = {name: client for name, client in CLIENTS.items() if not client.is_agent}
demo_has_tools = "tools" in Tokenizer(DEMO / "target").chat_template.variables


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with ready("demo") as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def answer(demo: str) -> str:
    """The demo pair's own words, without any client."""
    ask = {"model": "demo", "messages": [{"role": "user", "content": KEYS}]}
    whole = httpx.post(f"{demo}/chat/completions", json=ask, timeout=PATIENCE).json()
    return str(whole["choices"][0]["message"]["content"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_gets_the_demo_pairs_words_whole_and_streamed(environments, demo, answer, name, record_property):
    record_property("cell", (name, CHAT))
    texts = run(name, "chat", demo, "demo", KEYS)["texts"]
    assert texts == [answer] * max(1, len(texts)) and answer


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_runs_a_tool_loop(environments, url, name, record_property):
    record_property("cell", (name, LOOP))
    told = run(name, "loop", url, "tiny", WEATHER)
    assert told["calls"] == ["Bern"] and "sunny" in told["answer"]


@pytest.mark.parametrize("name", [name for name, client in PROGRAMS.items() if client.environment == "node"])
def test_a_client_of_node_goes_on_after_a_tool_loop(environments, url, name, record_property):
    record_property("cell", (name, LOOP))
    told = run(name, "turns", url, "tiny", WEATHER)
    assert told["calls"] == ["Bern"] and told["answers"] == ["It is sunny."] * 3


@pytest.mark.skipif(not demo_has_tools, reason="the demo pair's chat template has no place for tools")
@pytest.mark.parametrize("name", [name for name, client in PROGRAMS.items() if client.prompt_fits])
def test_a_client_runs_a_tool_loop_with_the_demo_pair(environments, demo, name, record_property):
    record_property("cell", (name, DEMO_LOOP))
    told = run(name, "loop", demo, "demo", WEATHER)
    assert told["calls"] == ["Bern"] and "sunny" in told["answer"]
