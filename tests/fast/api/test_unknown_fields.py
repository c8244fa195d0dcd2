"""Unknown fields at the top level: the answer has a warning about each, because none is ignored in silence."""

import json
from itertools import product
from typing import Any

import pytest

from tests.fast.api.errors import CHAT, TEXT
from tests.fast.api.served import Server

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT, "/v1/responses": {"input": "hi"}}


def warnings(server: Server, path: str, *, stream: bool = False, **fields: Any) -> list[dict[str, str]]:
    server.script.plan([2])
    response = server.http.post(path, json=PATHS[path] | fields | ({"stream": True} if stream else {}))
    assert response.status_code == 200, response.text
    if not stream:
        return response.json().get("warnings", [])
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [warning for event in events for warning in event.get("response", event).get("warnings", [])]


@pytest.mark.parametrize(("path", "stream"), list(product(PATHS, (False, True))))
def test_an_unknown_field_is_warned_and_counted(server, path, stream):
    before = server.metric("unknown_fields_total")
    first, second = warnings(server, path, stream=stream, temprature=0.5, colour_of_the_answer="red")
    assert (first["code"], first["param"]) == ("unknown_field", "temprature")
    assert first["message"].endswith("Did you mean `temperature`?")
    assert second["param"] == "colour_of_the_answer" and "Did you mean" not in second["message"]
    assert server.metric("unknown_fields_total") == before + 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"client_metadata": {"a": "b"}},
        {"colour": None},
        {"colour": False},
        {"colour": []},
        {"priority": 0},
    ],
    ids=str,
)
def test_labels_values_that_ask_for_nothing_and_known_fields_are_not_warned(server, path, fields):
    before = server.metric("unknown_fields_total")
    assert warnings(server, path, **fields) == []
    assert server.metric("unknown_fields_total") == before


def test_many_or_long_names_make_few_and_short_warnings(server):
    before = server.metric("unknown_fields_total")
    many = warnings(server, "/v1/chat/completions", n=2, **{f"{'x' * 1000}{i}": 1 for i in range(100)})
    assert len(many) == 16 and {len(warning["param"]) for warning in many} == {128}
    assert server.metric("unknown_fields_total") == before + 100, "all are counted"
