"""Messages on channels, as gpt-oss writes them, over HTTP: reasoning, content and calls, streamed or not."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from app.text.parsers.harmony import FAMILY, HarmonyReasoning
from tests.fast.api.served import Server
from tests.fast.api.templates import HELLO, WEATHER, serving_template

TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for message in messages %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>Hm, 漢字 < 5.<|end|><|start|>assistant"
ANSWER = THOUGHT + "<|channel|>final<|message|>It is 4."
CALL = THOUGHT + '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    services = {"reasoning": True, "reasoning_parser": HarmonyReasoning, "tool_family": FAMILY}
    with serving_template(model_folder, tmp_path_factory.mktemp("harmony") / "own", TEMPLATE, **services) as server:
        yield server


def plan(server: Server, text: str, seed: int) -> None:
    ids = [*server.bytes(text), 2]
    cuts = sorted(Random(seed).sample(range(1, len(ids)), k=12))
    server.script.plan(*[ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True])
def test_analysis_is_reasoning_and_final_is_the_answer(server: Server, stream: bool, seed: int) -> None:
    plan(server, ANSWER, seed)
    asked = server.openai.chat.completions.create(model="tiny", messages=[HELLO], stream=stream)
    parts = [chunk.choices[0].delta for chunk in asked] if stream else [asked.choices[0].message]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "Hm, 漢字 < 5."
    assert "".join(part.content or "" for part in parts) == "It is 4."


@pytest.mark.parametrize("seed", range(3))
def test_commentary_to_a_function_is_a_call(server: Server, seed: int) -> None:
    plan(server, CALL, seed)
    (choice,) = server.openai.chat.completions.create(model="tiny", messages=[HELLO], tools=[WEATHER]).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bern"}')
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert choice.message.reasoning_content == "Hm, 漢字 < 5."


def test_a_forced_call_begins_with_its_header(server: Server) -> None:
    plan(server, '{"city": "Bern"}', 0)
    (choice,) = server.openai.chat.completions.create(
        model="tiny",
        messages=[HELLO],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": WEATHER["function"]["name"]}},
    ).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == (WEATHER["function"]["name"], '{"city": "Bern"}')
