"""The whole server as people start it: `dflash-server serve`, the demo pair, the OpenAI SDK."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.fast.api.served import PATIENCE
from tests.server.demo import ready

QUESTIONS = [
    f"Mia has {10 + i} apples. Mia buys {2 + i % 8} more apples. How many apples are there now?" for i in range(32)
]
KEYS = "Tom has 6 boxes with 4 keys in each. Tom loses 5 keys. How many keys are left?"


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("get_weather", "Get the weather of a city.", city="string"),
    _tool("add", "Add two numbers.", a="integer", b="integer"),
    _tool("look_up", "Look up a topic.", query="string"),
]
SUNNY = "It is sunny and 21 degrees in Vaduz."
LOOPS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "What is 4213 + 386?": ("add", {"a": 4213, "b": 386}, "4599", "The result is 4599."),
    "What is the weather in Vaduz?": ("get_weather", {"city": "Vaduz"}, SUNNY, f"The weather in Vaduz: {SUNNY}"),
    "Look up garden spoon.": (
        "look_up", {"query": "garden spoon"}, "garden spoon has 4711", "Here is what I found: garden spoon has 4711"
    ),
}  # fmt: skip
"""The question, the call that answers it, its result, and what is told of it."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ready("demo") as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **options).choices[0].message


def answer(client: openai.OpenAI, question: str, **options: Any) -> str:
    return str(ask(client, [{"role": "user", "content": question}], **options).content)


async def streamed(url: str, questions: list[str], temperature: float) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client:

        async def one(question: str) -> str:
            chunks = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": question}],
                stream=True,
                temperature=temperature,
                seed=3,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        return list(await asyncio.gather(*map(one, questions)))


def test_a_sum_is_answered_rightly_in_blocks() -> None:
    """All that is drafted is verified, whatever steps cost on this machine now."""
    with ready("demo", "--verify", "full") as url:
        with client_of(url) as client:
            assert "#### 19" in answer(client, KEYS)
        assert metric(url, "spec_decode_num_accepted_tokens_total") > 10


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_32_streams_together_each_equal_their_own_plain_run(
    url: str, client: openai.OpenAI, temperature: float
) -> None:
    together = asyncio.run(streamed(url, QUESTIONS, temperature))
    verified = metric(url, "spec_decode_num_draft_tokens_total")
    alone = [
        answer(client, question, temperature=temperature, seed=3, extra_body={"speculate": False})
        for question in QUESTIONS
    ]
    assert together == alone
    assert metric(url, "spec_decode_num_draft_tokens_total") == verified, "plain runs verify no draft"


def metric(url: str, name: str) -> float:
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    (value,) = re.findall(rf"^dflash:{name} (\S+)$", metrics, re.MULTILINE)
    return float(value)


# An agent's loop: it calls a function, gets the result and tells it


def test_an_agent_calls_a_function_and_tells_its_result_turn_after_turn(client: openai.OpenAI) -> None:
    messages: list[Any] = []
    for question, (name, arguments, result, told) in LOOPS.items():
        messages.append({"role": "user", "content": question})
        message = ask(client, messages, tools=TOOLS)
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        message = ask(client, messages, tools=TOOLS)
        assert message.content == told and not message.tool_calls
        messages.append(message)


@pytest.mark.parametrize("name", ["add", "required"])
def test_a_forced_call_has_the_questions_arguments(client: openai.OpenAI, name: str) -> None:
    choice = name if name == "required" else {"type": "function", "function": {"name": name}}
    message = ask(client, [{"role": "user", "content": "Add 12 and 30."}], tools=TOOLS, tool_choice=choice)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": 30})


def test_a_question_that_no_function_fits_is_answered_as_without_tools(client: openai.OpenAI) -> None:
    question = "Tom has 6 boxes with 4 keys in each. How many keys are there?"
    plain = answer(client, question)
    assert answer(client, question, tools=TOOLS) == plain and "#### 24" in plain


def test_no_page_is_used_when_everybody_has_been_served(url: str) -> None:
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert metric(url, gauge) == 0, gauge
