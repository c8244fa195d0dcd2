"""Responses that a later request continues, refers to, fetches or deletes: for their client alone, and in memory."""

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from app.api import response_store, responses, shares
from app.api.response_store import CLIENT_PART, MAX_RESPONSES, ResponseStore, Turn
from app.api.responses_schemas import ITEMS
from tests.fast.api.errors import error_of
from tests.fast.api.served import Server
from tests.fast.api.templates import HEAD, QWEN, TURN

PATH = "/v1/responses"
SERVED = {"template": QWEN, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3"}
CLOCK = {"type": "function", "name": "clock"}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLook:\n{CALL}"
MINE, YOURS = {"Authorization": "Bearer mine-12345"}, {"Authorization": "Bearer yours-12345"}
KEYS = {"api_key": ["mine-12345", "yours-12345"]}


def ask(
    server: Server, text: str = "Fine.", stream: bool = False, headers: Any = None, **fields: Any
) -> dict[str, Any]:
    """The response, complete."""
    server.plan_text(text)
    body = {"input": "hello", "tools": [CLOCK]} | fields | {"stream": stream}
    answer = server.http.post(PATH, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    return json.loads(answer.text.split("data: ")[-1])["response"]


def prompt(server: Server, **fields: Any) -> str:
    """The prompt that the engine was given for a request with these fields."""
    server.settle()
    ask(server, **fields)
    return server.prompt()


def refused(server: Server, headers: Any = None, status: int = 404, **fields: Any) -> dict[str, Any]:
    return error_of(server.http.post(PATH, json={"input": "hello"} | fields, headers=headers), status)


def messages(prompt: str) -> str:
    return prompt.partition("</tools><|im_end|>\n")[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_continues_the_conversation_of_a_response(server, stream):
    first = ask(server, ANSWER, stream)
    assert first["store"] is True and first["previous_response_id"] is None
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12"}
    whole = prompt(server, input=[{"role": "user", "content": "hello"}, *first["output"], result])
    second = ask(server, "Twelve.", stream, input=[result], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert prompt(server, input=[result], previous_response_id=first["id"]) == whole
    third = messages(prompt(server, input="bye", previous_response_id=second["id"]))
    assert third.startswith(HEAD) and third.endswith(f"Twelve.<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n{TURN}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("typed", [{"type": "item_reference"}, {}], ids=["typed", "an id alone"])
def test_items_of_a_response_are_sent_back_by_their_ids(server, stream, typed):
    first = ask(server, ANSWER, stream)
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "12"}
    hello = {"role": "user", "content": "hello"}
    references = [{"id": item["id"]} | typed for item in first["output"]]
    assert len(references) == 3
    whole = prompt(server, input=[hello, *first["output"], result])
    assert prompt(server, input=[hello, *references, result]) == whole


def test_items_are_found_in_a_newer_response_when_the_older_ones_are_gone(server):
    first = ask(server, "One.")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    ask(server, "Two.", input=[{"role": "user", "content": "hello"}, reference, {"role": "user", "content": "and"}])
    assert server.http.delete(f"{PATH}/{first['id']}").status_code == 200
    assert "One." in prompt(server, input=[reference, {"role": "user", "content": "so"}])


def test_an_id_that_a_client_used_twice_names_the_newer_item(server):
    hello = {"role": "user", "content": "hello"}
    ask(server, input=[hello | {"id": "mine", "content": "older"}, hello | {"id": "other", "content": "beside it"}])
    ask(server, input=[hello | {"id": "mine", "content": "newer"}])
    for ids in (["mine"], ["mine", "other"]):
        told = prompt(server, input=[{"id": each} for each in ids])
        assert "newer" in told and "older" not in told and ("beside it" in told) == ("other" in ids)


def test_namespaces_and_images_come_back_from_the_store_as_they_were(server):
    group = {"type": "namespace", "name": "n", "tools": [CLOCK]}
    first = ask(server, CALL.replace("clock", "n__clock"), tools=[group])
    image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 5000}
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": [image]}
    second = ask(server, tools=[group], input=[result], previous_response_id=first["id"])
    told = prompt(server, tools=[group], previous_response_id=second["id"])
    assert '{"name": "n__clock", "arguments": {}}' in told and "(an image, which this model cannot see)" in told


def test_what_a_request_recalls_counts_like_the_bytes_of_its_body(server, monkeypatch):
    first = ask(server, input="hello " * 300)
    monkeypatch.setattr(shares, "MAX_HELD_BYTES", 2000)
    for fields in ({"previous_response_id": first["id"]}, {"input": [{"id": first["output"][0]["id"]}]}):
        assert refused(server, status=429, **fields)["code"] == "client_busy"
    ask(server)


def test_an_item_is_referred_to_once(server):
    reference = {"type": "item_reference", "id": ask(server)["output"][0]["id"]}
    error = refused(server, status=400, input=[reference, {"role": "user", "content": "x"}, reference])
    assert (error["param"], error["code"]) == ("input.2.id", "invalid_value") and "once" in error["message"]


def test_a_conversation_has_as_many_items_as_a_body_may_have(server, monkeypatch):
    monkeypatch.setattr(responses, "MAX_MESSAGES", 5)
    thoughts = [{"type": "reasoning"}] * 2
    first = ask(server, input=[{"role": "user", "content": "x"}, *thoughts])
    assert ask(server, previous_response_id=first["id"])["status"] == "completed"
    error = refused(server, status=400, previous_response_id=first["id"], input=thoughts)
    assert error["param"] == "input" and "6 items; at most 5" in error["message"]


def test_instructions_are_not_inherited(server):
    first = ask(server, instructions="Be brief.")
    assert "Be brief." not in prompt(server, previous_response_id=first["id"])


def test_the_owner_fetches_and_deletes_a_response(server):
    first = ask(server, ANSWER, metadata={"a": "b"})
    assert server.http.get(f"{PATH}/{first['id']}").json() == first
    assert server.openai.responses.retrieve(first["id"]).id == first["id"]
    error_of(server.http.get(f"{PATH}/{first['id']}?stream=true"), 400)
    deleted = server.http.delete(f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    error_of(server.http.get(f"{PATH}/{first['id']}"), 404)
    error_of(server.http.delete(f"{PATH}/{first['id']}"), 404)
    assert refused(server, previous_response_id=first["id"])["param"] == "previous_response_id"


def test_the_sdk_continues_a_response(server):
    server.plan_text("One.")
    first = server.openai.responses.create(model="tiny", input="hello")
    second = server.openai.responses.create(model="tiny", input="and", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    server.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="another replica"):
        server.openai.responses.create(model="tiny", input="and", previous_response_id=first.id)


def test_another_clients_response_is_answered_exactly_as_an_unknown_one(start):
    server = start(QWEN, **KEYS)
    first = ask(server, headers=MINE)
    item, unknown = first["output"][0]["id"], response_store.new_id("resp")
    assert ask(server, headers=MINE, previous_response_id=first["id"])

    def answers(identifier: str, item: str) -> list[Any]:
        url = f"{PATH}/{identifier}"
        return [
            *(server.http.request(method, url, headers=YOURS) for method in ("GET", "DELETE")),
            *(
                server.http.post(PATH, json={"input": "x"} | fields, headers=YOURS)
                for fields in (
                    {"previous_response_id": identifier},
                    {"input": [{"type": "item_reference", "id": item}]},
                )
            ),
        ]

    for theirs, none in zip(answers(first["id"], item), answers(unknown, "msg_unknown"), strict=True):
        assert theirs.status_code == none.status_code == 404
        text = none.text.replace(unknown, first["id"]).replace("msg_unknown", item)
        assert theirs.text == text and "another client's" in theirs.text and "restart" in theirs.text
    assert server.http.get(f"{PATH}/{first['id']}", headers=MINE).json() == first
    assert server.http.get(f"{PATH}/{first['id']}").status_code == 401


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"store": False}, {"max_output_tokens": 2}], ids=str)
def test_what_is_not_wanted_or_was_cut_is_not_kept_and_says_so(server, stream, fields):
    answer = ask(server, "It is fine.", stream, **fields)
    assert answer["store"] is False
    error = refused(server, previous_response_id=answer["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    item = answer["output"][0]["id"]
    error = refused(server, input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": item}])
    assert (error["param"], error["code"]) == ("input.1.id", "item_not_found")


def test_a_failed_stream_is_not_kept_and_says_so(server, background):
    started = background.submit(server.answer, server.bytes("a"))
    with server.http.stream("POST", PATH, json={"input": "hello", "stream": True}) as response:
        server.script.emit(started.result(), [], finish="error", error="broken")
        text = response.read().decode()
    failed = json.loads(text.split("data: ")[-1])["response"]
    assert (failed["status"], failed["store"]) == ("failed", False)
    refused(server, previous_response_id=failed["id"])


def test_a_call_whose_arguments_are_no_json_is_not_kept():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "b"}

    async def kept(arguments: str) -> bool:
        return ResponseStore(2**20).keep(
            "me", Turn.of([]), {"id": "resp_1", "output": [call | {"arguments": arguments}]}
        )

    assert [asyncio.run(kept(arguments)) for arguments in ('{"a": b}', '{"a": 1}')] == [False, True]


def test_ids_have_128_random_bits(server):
    answer = ask(server, ANSWER)
    for identifier in (answer["id"], *(item["id"] for item in answer["output"])):
        assert len(bytes.fromhex(identifier.partition("_")[2])) == 16


def test_the_log_has_no_id_and_no_text_of_a_response(server, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    first = ask(server, "A secret answer.", input="A secret question.")
    ask(server, previous_response_id=first["id"])
    refused(server, previous_response_id="resp_unknown")
    server.http.get(f"{PATH}/{first['id']}")
    server.http.delete(f"{PATH}/{first['id']}")
    for path in (f"/V1/Responses/{first['id']}", f"{PATH}//{first['id']}", f"{PATH}/{first['id']}/input_items"):
        error_of(server.http.get(path), 404)
    monkeypatch.setattr(server.services.responses, "get", lambda owner, identifier: 1 / 0)
    assert server.http.get(f"{PATH}/{first['id']}").status_code == 500
    ours = [record for record in caplog.records if record.name.startswith("app")]
    texts = "".join(f"{record.getMessage()} {record.__dict__}" for record in ours)
    assert "/v1/responses/ID" in texts
    for secret in (first["id"], first["id"][5:], first["output"][0]["id"], "secret", "resp_unknown"):
        assert secret not in texts


def test_without_a_store_every_use_of_one_is_refused_and_answers_say_so(start):
    server = start(QWEN, response_store_bytes=0)
    answer = ask(server)
    assert answer["store"] is False
    for fields in ({"previous_response_id": answer["id"]}, {"input": [{"type": "item_reference", "id": "msg_1"}]}):
        assert "--response-store-bytes 0" in refused(server, **fields)["message"]
    assert refused(server, status=400, store=True)["param"] == "store"
    assert "--response-store-bytes 0" in error_of(server.http.get(f"{PATH}/{answer['id']}"), 404)["message"]


def test_a_conversation_above_a_clients_part_is_answered_with_a_warning_and_not_kept(start):
    server = start(QWEN, response_store_bytes=2**15)
    assert ask(server)["store"] is True
    answer = ask(server, input="hello " * 600)
    assert answer["store"] is False
    assert [(one["code"], one["param"]) for one in answer["warnings"]] == [("response_not_kept", "store")]
    assert "warnings" not in ask(server, input="hello " * 600, store=False)


class Kept:
    """A store that a test fills on a loop."""

    def __init__(self, max_bytes: int) -> None:
        self.store = ResponseStore(max_bytes)
        self.count = 0

    def add(self, owner: str, size: int = 0) -> str:
        self.count += 1
        items = ITEMS.validate_python([{"role": "user", "content": "x" * size, "id": f"item_{self.count}"}])
        assert self.store.keep(owner, Turn.of(items), {"id": f"resp_{self.count}", "output": []})
        return f"resp_{self.count}"

    def has(self, owner: str, *ids: str) -> list[bool]:
        return [self.store.get(owner, each) is not None for each in ids]


def test_at_most_so_many_responses_are_kept_and_the_client_with_most_loses_its_oldest():
    async def fill() -> None:
        kept = Kept(2**26)
        yours = kept.add("you")
        mine = [kept.add("me") for _ in range(MAX_RESPONSES)]
        assert kept.has("you", yours) == [True]
        assert kept.has("me", mine[0], mine[1], mine[-1]) == [False, True, True]
        assert kept.has("you", mine[-1]) == [False]

    asyncio.run(fill())


def test_a_client_fills_its_part_of_the_bytes_and_all_clients_no_more_than_there_are():
    async def fill() -> None:
        kept = Kept(2**20)
        part = 2**20 // CLIENT_PART
        yours = kept.add("you", part // 2)
        mine = [kept.add("me", part // 2 - 2**11) for _ in range(3)]
        assert kept.has("me", *mine) == [False, True, True] and kept.has("you", yours) == [True]
        assert not kept.store.fits(Turn.of(ITEMS.validate_python([{"role": "user", "content": "x" * part}])))
        owners = [str(number) for number in range(3 * CLIENT_PART)]
        last = [kept.add(owner, part // 2) for owner in owners]
        assert sum(kept.store._num_bytes.values()) <= 2**20
        assert kept.has(owners[-1], last[-1]) == [True] and kept.has("me", *mine[1:]) == [False, True]

    asyncio.run(fill())


def test_ids_count_with_the_memory_that_they_take():
    store = ResponseStore(CLIENT_PART * 2**14)
    for count, fits in ((100, True), (130, False)):
        items = [{"role": "user", "content": "", "id": str(100 + number)} for number in range(count)]
        assert store.fits(Turn.of(ITEMS.validate_python(items))) is fits


def test_a_response_is_forgotten_after_its_time_and_nothing_of_it_is_left(monkeypatch):
    monkeypatch.setattr(response_store, "SECONDS", 0.01)

    async def fill() -> None:
        kept, errors = Kept(2**20), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        deleted = kept.add("me")
        assert kept.store.delete("me", deleted)
        first = kept.add("me")
        assert kept.store.with_items("me", {"item_2"})[0] and not kept.store.with_items("you", {"item_2"})[0]
        while kept.has("me", first) == [True]:
            await asyncio.sleep(0.005)
        assert kept.store.with_items("me", {"item_2"}) == ([], {"item_2"})
        assert not kept.store._stored and not kept.store._num_bytes and not errors, "a deleted one is not dropped again"

    asyncio.run(fill())


@pytest.mark.parametrize("field", ["conversation", "background"])
def test_conversations_and_answers_in_the_background_stay_refused(server, field):
    assert refused(server, status=400, **{field: True})["param"] == field
