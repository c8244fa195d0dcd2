"""Strict functions: a wish, which is checked after the call was written."""

import asyncio
import json
import math
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from app.api import strict
from app.api.app import services_for
from app.api.strict import StrictFunctions
from app.config.settings import Config
from app.metrics import Metrics
from app.text.parsers import ToolCall, qwen3
from tests.fast.api.served import PATIENCE, Clock, Server
from tests.fast.api.templates import HELLO, prompt_of, refusal, serving_template

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(strict, "MAX_SECONDS", PATIENCE)


def tool(schema: Any = SCHEMA, *, is_strict: bool = True, name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": is_strict}}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [HELLO], "tools": [tool()]} | fields


def text(arguments: Any, name: str = "weather") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def shared_server(model_folder, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("strict") / "qwen"
    with serving_template(model_folder, folder, tool_family=qwen3.FAMILY) as server:
        yield server


def plan(server: Server, *outputs: str) -> None:
    server.script.plan([*server.bytes("\n".join(outputs)), 2])


def outcomes(server: Server) -> dict[str, float]:
    return {name: server.metric("strict_tool_calls_total", outcome=name) for name in ("fits", "misfits", "unchecked")}


def test_a_call_that_fits_is_counted_and_nothing_is_said(server):
    before = outcomes(server)
    plan(server, text({"city": "Bern", "days": 7}))
    answer = server.openai.chat.completions.create(**ask())
    assert answer.choices[0].finish_reason == "tool_calls"
    assert "warnings" not in answer.model_extra
    assert outcomes(server) == before | {"fits": before["fits"] + 1}


def test_a_call_that_does_not_fit_is_returned_counted_and_told_beside_the_usage(server):
    before = outcomes(server)
    plan(server, text({"city": "Bern"}), text({"city": "Bern", "days": "many"}))
    answer = server.openai.chat.completions.create(**ask())
    calls = answer.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Bern"]
    assert answer.warnings == [
        {
            "code": "arguments_misfit",
            "choice": 0,
            "tool_call": 1,
            "function": "weather",
            "message": "At $.days: 'many' is not of type 'integer'.",
        }
    ]
    assert outcomes(server) == before | {"fits": before["fits"] + 1, "misfits": before["misfits"] + 1}


def test_a_stream_has_the_warnings_on_the_last_chunk_of_each_choice(server):
    plan(server, "a", text({"days": 1}))
    body = ask(n=2, stream=True, stream_options={"include_usage": True})
    with server.openai.chat.completions.create(**body) as chunks:
        told = [(chunk.choices, chunk.model_extra.get("warnings")) for chunk in chunks]
    warned = {choices[0].index: warnings for choices, warnings in told if warnings}
    assert all(choices[0].finish_reason == "tool_calls" for choices, warnings in told if warnings)
    assert {index: [w["choice"] for w in warnings] for index, warnings in warned.items()} == {0: [0], 1: [1]}
    assert {w["message"] for warnings in warned.values() for w in warnings} == {"At $: 'city' is a required property."}


@pytest.mark.parametrize(
    "offered", [tool(is_strict=False), tool(name="other"), tool(None)], ids=["not strict", "another", "no schema"]
)
def test_only_calls_of_strict_functions_with_a_schema_can_misfit(server, offered):
    plan(server, text({"days": "many"}))
    answer = server.openai.chat.completions.create(**ask(tools=[offered]))
    assert len(answer.choices[0].message.tool_calls) == 1
    assert "warnings" not in answer.model_extra


def test_strict_is_not_in_the_prompt(server):
    assert prompt_of(server, tools=[tool()]) == prompt_of(server, tools=[tool(is_strict=False)])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_strict_tools_may_be_refused(start, path):
    server = start(tool_family=qwen3.FAMILY, refuse_strict=True)
    response = server.http.post(path, json=ask(tools=[tool(is_strict=False), tool()]))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        "tools.1.function.strict",
        "unsupported_parameter",
    )
    assert "Leave `it` out" not in error["message"]
    assert prompt_of(server, tools=[tool(is_strict=False)])
    assert refusal(server, tools=[tool()], tool_choice="none")["param"] == "tools.0.function.strict"


@pytest.mark.parametrize(("said", "refused"), [("accept", False), ("refuse", True)])
def test_a_setting_says_which(server, said, refused):
    config = Config(strict_tools=said)
    assert services_for(config, server.engine, server.tokenizer, server.metrics).refuse_strict is refused


async def verdict(schema: Any, arguments: Any) -> str | None:
    """Return the code of the warning about a call, or None."""
    call = ToolCall("f", json.dumps(arguments))
    warnings = await StrictFunctions({"f": schema}, Metrics()).warnings(0, [call])
    return warnings[0]["code"].removeprefix("arguments_") + ": " + warnings[0]["message"] if warnings else None


def checked(schema: Any, arguments: Any) -> str | None:
    return asyncio.run(verdict(schema, arguments))


@pytest.mark.parametrize(
    ("schema", "fits", "misfits"),
    [
        ({"properties": {"x": {"enum": [1, None]}}}, {"x": None}, {"x": 2}),
        ({"properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "number"}}}, {"x": 1.5}, {"x": "a"}),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": [{"a": 1}, {"a": 2}]}, {"x": [{"a": 1}, {"a": 1}]}),
        ({"properties": {"x": {"anyOf": [{"type": "null"}, {"minimum": 3}]}}}, {"x": None}, {"x": 1}),
        ({"properties": {"x": {}}, "additionalProperties": False}, {"x": 1}, {"y": 1}),
        ({"additionalProperties": {"type": "string"}}, {"y": "1"}, {"y": 1}),
        ({"$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}, "v": {"type": "null"}}}}, "$ref": "#/$defs/t"},
         {"t": {"t": {"v": None}}}, {"t": {"t": {"v": 1}}}),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_schemas_are_json_schema(schema, fits, misfits):
    assert checked(schema, fits) is None
    assert checked(schema, misfits).startswith("misfit: At $")


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"x": {"pattern": "^(a+)+$"}}}, {"x": "a" * 40 + "b"}),
        ({"patternProperties": {"^(a+)+$": False}, "additionalProperties": False}, {"a" * 40 + "b": 1}),
        ({"properties": {"x": {"format": "email"}}}, {"x": "no"}),
        ({"unevaluatedProperties": False}, {"x": 1}),
    ],
    ids=["pattern", "patternProperties", "format", "unevaluatedProperties"],
)
def test_a_clients_regular_expressions_are_not_run(schema, arguments):
    assert checked(schema, arguments) is None


DIALECTS = [
    *(f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4, 6, 7)),
    *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
]
EVIL = {"pattern": "^(a+)+$"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_that_a_schema_names_takes_no_bound_away(dialect, monkeypatch):
    monkeypatch.setattr(re, "search", lambda *args: pytest.fail("a regular expression was run"))
    marked = {"$schema": dialect} | EVIL
    for schema in (
        {"properties": {"x": marked}},
        {"$schema": dialect, "properties": {"x": EVIL}},
        {"$schema": dialect, "properties": {"y": {"$ref": "#"}, "x": EVIL}},
        {"$defs": {"x": marked}, "properties": {"x": {"$ref": "#/$defs/x"}}},
        {"properties": {"x": {"anyOf": [{"not": {"not": marked}}]}}},
        {"properties": {"y": {"$ref": dialect}, "x": marked}},
    ):
        assert checked(schema, {"x": "aab", "y": {"x": "aab"}}) is None


class Looked(Clock):
    """Clock that a millisecond passes on at each look."""

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{}] * 16_000},
        {"anyOf": [{"$ref": f"#/x{i}"} for i in range(2_000)]},
        {"properties": {"x": {"items": {"allOf": [{}] * 4_000}}}},
        {"properties": {"x": {"items": {"allOf": [True] * 4_000}}}},
        {"$schema": DIALECTS[-1], "properties": {"x": {"items": {"$schema": DIALECTS[3], "allOf": [{}] * 4_000}}}},
    ],
    ids=["a long schema", "references", "a product", "a product of booleans", "a product of dialects"],
)
def test_all_calls_of_a_request_share_one_time(schema, monkeypatch):
    monkeypatch.setattr(strict, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(strict, "time", clock := Looked())
    call = ToolCall("f", json.dumps({"x": [1] * 10_000}))

    async def check() -> list[dict[str, Any]]:
        functions = StrictFunctions({"f": schema}, Metrics())
        return [warning for choice in range(8) for warning in await functions.warnings(choice, [call] * 4)]

    started = clock.now
    warnings = asyncio.run(check())
    assert clock.now - started < 0.3, "each of 32 calls looks once more"
    assert [warning["code"] for warning in warnings] == ["arguments_unchecked"] * 32


DOUBLING = {
    "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "object"}},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("schema", "arguments", "why"),
    [
        ({"type": "strnig"}, {}, "no JSON Schema"),
        ({"required": "city"}, {}, "no JSON Schema"),
        ({"properties": 5}, {"x": 1}, "no JSON Schema"),
        ({"$ref": "#/$defs/absent"}, {}, "cannot be used"),
        ({"$ref": "#"}, {}, "cannot be used"),
        ({"properties": {"x": {"$ref": "https://127.0.0.1:9/schema.json"}}}, {"x": 1}, "cannot be used"),
        ({"$ref": "file:///etc/passwd"}, {}, "cannot be used"),
        (DOUBLING, {}, "more than 0.05 s"),
        ({"description": "x" * 2**16}, {}, "characters"),
        ({}, {"x": "x" * 2**16}, "characters"),
    ],
    ids=lambda value: "",
)
def test_a_schema_that_cannot_be_used_is_told_and_is_no_error(schema, arguments, why, monkeypatch):
    if schema is DOUBLING:
        monkeypatch.setattr(strict, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: pytest.fail("fetched"))
    found = checked(schema, arguments)
    assert found.startswith("unchecked: ") and why in found
    assert len(found) < 400


def num_function_calls(count: int) -> int:
    """Return the number of Python's function calls in the check of a list of so many items that must differ."""
    schema, arguments = {"properties": {"x": {"uniqueItems": True}}}, {"x": [{"a": i} for i in range(count)]}
    checked(schema, arguments)  # fills caches
    calls = 0

    def count_on(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_on)
    try:
        (verdict,) = strict._check_all([(schema, json.dumps(arguments))], math.inf)
    finally:
        sys.setprofile(None)
    assert verdict.outcome == "fits"
    return calls


def test_the_work_for_items_that_must_differ_grows_like_their_number():
    assert num_function_calls(2_000) < 10 * num_function_calls(250)


def test_the_check_runs_off_the_event_loop(monkeypatch):
    names: list[str] = []
    check = strict._check_all
    monkeypatch.setattr(
        strict, "_check_all", lambda *given: names.append(threading.current_thread().name) or check(*given)
    )
    checked({"type": "object"}, {})
    assert names and names[0].startswith("strict")


def test_no_schema_of_a_client_is_a_500(server):
    for schema in ({"type": 5}, {"$ref": "#"}, {"allOf": {}}, {"properties": {"city": {"multipleOf": 0}}}):
        plan(server, text({"city": 3}))
        answer = server.openai.chat.completions.create(**ask(tools=[tool(schema)]))
        assert answer.warnings[0]["code"] == "arguments_unchecked"
