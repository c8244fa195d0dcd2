"""An agent's loop with the demo pair: it calls a function, gets the result and tells it. The SDK is OpenAI's."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.fast.api.served import PATIENCE
from tests.server.demo import ready


def add(a: int, b: int) -> int:
    return a + b


def get_weather(city: str) -> str:
    return f"It is sunny and 21 degrees in {city}."


def look_up(query: str) -> str:
    return f"{query} has 4711"


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types), "additionalProperties": False}
    function = {"name": name, "description": description, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


FUNCTIONS: dict[str, Callable[..., object]] = {"add": add, "get_weather": get_weather, "look_up": look_up}
TOOLS = [
    _tool("get_weather", "Get the weather of a city.", city="string"),
    _tool("add", "Add two numbers.", a="integer", b="integer"),
    _tool("look_up", "Look up a topic.", query="string"),
]
LOOPS = {
    "What is 4213 + 386?": [("add", {"a": 4213, "b": 386}, "The result is 4599.")],
    "What is the weather in Vaduz?": [
        ("get_weather", {"city": "Vaduz"}, "The weather in Vaduz: It is sunny and 21 degrees in Vaduz.")
    ],
    "Look up garden spoon.": [("look_up", {"query": "garden spoon"}, "Here is what I found: garden spoon has 4711")],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ready() as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    answer = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, **options)  # type: ignore[arg-type]
    return answer.choices[0].message


def test_an_agent_calls_a_function_and_tells_its_result_turn_after_turn(client: openai.OpenAI) -> None:
    messages: list[Any] = []
    for question, ((name, arguments, told),) in LOOPS.items():
        messages.append({"role": "user", "content": question})
        message = ask(client, messages)
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
        result = str(FUNCTIONS[name](**arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        message = ask(client, messages)
        assert message.content == told and not message.tool_calls
        messages.append(message)


@pytest.mark.parametrize("name", ["add", "required"])
def test_a_forced_call_has_the_questions_arguments(client: openai.OpenAI, name: str) -> None:
    choice = name if name == "required" else {"type": "function", "function": {"name": name}}
    message = ask(client, [{"role": "user", "content": "Add 12 and 30."}], tool_choice=choice)
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": 30})


def test_a_question_that_no_function_fits_is_answered_as_without_tools(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Tom has 6 boxes with 4 keys in each. How many keys are there?"}]
    plain = client.chat.completions.create(model="demo", messages=question)  # type: ignore[arg-type]
    assert ask(client, question).content == plain.choices[0].message.content
    assert "#### 24" in str(plain.choices[0].message.content)
