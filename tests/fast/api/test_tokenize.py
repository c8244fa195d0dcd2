"""/tokenize and /detokenize, /v1/models/{id}, /version, and HEAD."""

import re
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
from tokenizers import processors

from app.api import prompts
from tests.fast.api.errors import error_of
from tests.fast.api.served import Server, serving_ready
from tests.fast.api.templates import ASK, HEAD, HELLO, QWEN, TURN

WORDS = ["hello world", "", " ", "naïve 漢字 👩‍👩‍👧 e\u0301", "<|im_start|>user\n", "\x00\x1f", "a" * 300]
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}]}
SERVED = {"template": QWEN}


@pytest.fixture(scope="module")
def bos_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose tokenizer begins every text with <|endoftext|>, id 0."""
    folder = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(model_folder, folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(folder / "tokenizer.json"))
    with serving_ready(folder) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", WORDS)
def test_a_text_comes_back_from_its_tokens(server, text):
    tokens = post(server, "/tokenize", prompt=text)
    assert tokens == {
        "count": len(tokens["tokens"]),
        "max_model_len": 4096,
        "tokens": server.ids(text),
        "token_strs": None,
    }
    assert post(server, "/detokenize", tokens=tokens["tokens"]) == {"prompt": text}


def test_detokenize_shows_special_tokens_and_whatever_bytes_there_are(server):
    assert post(server, "/detokenize", tokens=[1, *server.ids("hi"), 2, 0]) == {
        "prompt": "<|im_start|>hi<|im_end|><|endoftext|>"
    }
    assert post(server, "/detokenize", tokens=server.bytes("漢")[:2]) == {"prompt": "\ufffd"}
    assert post(server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_tokens_can_be_named_as_the_vocabulary_has_them(server):
    answer = post(server, "/tokenize", prompt="hello world<|im_end|>", return_token_strs=True)
    assert [server.tokenizer.backend.token_to_id(name) for name in answer["token_strs"]] == answer["tokens"]
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert post(server, "/tokenize", messages=[HELLO], return_token_strs=True)["token_strs"][0] == "<|im_start|>"
    for value in (False, None):
        assert post(server, "/tokenize", prompt="x", return_token_strs=value)["token_strs"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [{"role": "developer", "content": "be short"}, HELLO]},
        {"messages": [HELLO, CALLED, {"role": "tool", "content": "12", "tool_call_id": "a"}]},
        {"tools": [CLOCK]},
        {"tools": [CLOCK], "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"messages": [HELLO, {"role": "assistant", "content": "Once "}], "continue_final_message": True},
    ],
    ids=["plain", "developer", "called", "tools", "no tools", "no thinking", "no turn", "continued"],
)
def test_a_conversation_has_the_tokens_that_a_chat_is_answered_for(server, fields):
    server.script.plan([2])
    post(server, "/v1/chat/completions", **ASK | fields)
    submitted = server.script.see("Submit")["token_ids"]
    answer = post(server, "/tokenize", **ASK | fields)
    assert (answer["tokens"], answer["count"]) == (submitted, len(submitted))


@pytest.mark.parametrize(("value", "expected"), [(None, True), (True, True), (False, False)])
def test_a_bare_text_has_the_special_tokens_of_a_completion_unless_they_are_not_wanted(bos_server, value, expected):
    bare = bos_server.tokenizer.encode("hi", add_special_tokens=False)
    tokens = post(bos_server, "/tokenize", prompt="hi", add_special_tokens=value)["tokens"]
    assert tokens == [0] * expected + bare
    bos_server.script.plan([2])
    bos_server.openai.completions.create(model="tiny", prompt="hi")
    assert bos_server.script.see("Submit")["token_ids"] == [0, *bare]


def test_a_conversation_has_no_special_tokens_but_those_of_its_template(bos_server):
    tokens = post(bos_server, "/tokenize", messages=[HELLO])["tokens"]
    assert bos_server.tokenizer.decode(tokens, skip_special_tokens=False) == HEAD + TURN
    assert post(bos_server, "/tokenize", messages=[HELLO], add_special_tokens=False)["tokens"] == tokens


@pytest.mark.parametrize(
    ("path", "prompt", "value", "first"),
    [
        ("/tokenize", {"messages": [HELLO]}, True, 0),
        ("/v1/chat/completions", {"messages": [HELLO]}, True, 0),
        ("/v1/completions", {"prompt": "hi"}, False, None),
    ],
)
def test_vllms_add_special_tokens_is_honoured_or_refused_by_name(bos_server, path, prompt, value, first):
    bos_server.script.plan([2])
    response = bos_server.http.post(path, json=prompt | {"add_special_tokens": value})
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "add_special_tokens"
    else:
        tokens = response.json().get("tokens") or bos_server.script.see("Submit")["token_ids"]
        assert (tokens[0] == 0) is (first == 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ("/tokenize", {"messages": [HELLO], "prompt": "x"}, "prompt"),
        ("/tokenize", {"messages": [HELLO], "chat_template": "{{ messages }}"}, "chat_template"),
        ("/tokenize", {"messages": [HELLO], "documents": [{"text": "x"}]}, "documents"),
        ("/tokenize", {"messages": [HELLO], "chat_template_kwargs": 1}, "chat_template_kwargs"),
        ("/tokenize", {"messages": [HELLO], "tool_choice": "required"}, "tool_choice"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1 2"}, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, -2]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, 2.5]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, True]}, "tokens.1"),
        ("/detokenize", {"tokens": [1, 512]}, "tokens.1"),
        ("/detokenize", {"tokens": [2**70]}, "tokens.0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(server, path, body, param):
    assert error_of(server.http.post(path, json=body), 400)["param"] == param


def test_an_id_out_of_range_is_told_with_the_last_there_is(server):
    message = error_of(server.http.post("/detokenize", json={"tokens": [1, 512]}), 400)["message"]
    assert "512" in message and "511" in message


@pytest.mark.parametrize("length", [3000, 30_000])
@pytest.mark.parametrize("kind", ["text", "conversation"])
def test_a_text_beyond_the_context_is_counted(server, kind, length):
    """A client asks for the length before it shortens the prompt."""
    text = "漢" * length
    body = {"prompt": text} if kind == "text" else {"messages": [HELLO | {"content": text}]}
    assert post(server, "/tokenize", **body)["count"] >= 3 * length


def test_a_text_far_beyond_the_context_is_counted_up_to_a_bound(server, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_COUNTED_BYTES", 50_000)
    assert post(server, "/tokenize", prompt="%" * 50_000)["count"] == 50_000
    for text in ("%" * 200_000, "\U0001f600" * 40_000):  # 160,000 bytes, each of which is a token
        error = error_of(server.http.post("/tokenize", json={"prompt": text}), 400)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.fixture
def slash_server(model_folder: Path) -> Iterator[Server]:
    """A server of a model whose name has a slash."""
    with serving_ready(model_folder, served_model_name=["org/tiny", "tiny"]) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models/org/tiny", "/v1/models/org%2Ftiny"])
def test_a_model_is_found_by_its_name_slash_or_not(slash_server, path):
    card = slash_server.http.get(path).json()
    assert (card["id"], card["object"], card["max_model_len"]) == ("org/tiny", "model", 256)
    assert card == slash_server.http.get("/v1/models").json()["data"][0]
    assert slash_server.openai.models.retrieve("org/tiny").id == "org/tiny"
    assert slash_server.openai.models.retrieve("tiny").id == "tiny"
    assert slash_server.http.head(path).status_code == 200


@pytest.mark.parametrize("name", ["gpt-4", "tiny/", "tiny/x", "Tiny", "org%2Fother", "%F0%9F%98%80", "x" * 5000])
def test_a_model_that_is_not_here_is_404_with_those_that_are(server, name):
    error = error_of(server.http.get(f"/v1/models/{name}"), 404)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
    assert "`tiny`, `also-tiny`" in error["message"] and len(error["message"]) < 300
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("gpt-4")


def test_models_can_be_asked_for_while_the_model_loads(own_server):
    assert own_server.http.get("/v1/models/tiny").json()["max_model_len"] is None
    response = own_server.http.post("/tokenize", json={"prompt": "x"})
    assert response.status_code == 503 and response.headers["retry-after"]


def test_the_facts_of_the_engine_and_of_its_draft_are_told_once_it_is_loaded(own_server):
    response = own_server.http.get("/server_info")
    assert (response.status_code, response.json()["status"]) == (503, "loading")
    own_server.ready()
    found = own_server.http.get("/server_info").json()
    named = {"model": "tiny", "model_path": "tiny", "served_model_name": "tiny", "tp_size": 1, "dp_size": 1}
    settings = {"--served-model-name": "['tiny', 'also-tiny']", "--reasoning-parser": "none"}
    assert found["settings"].items() >= settings.items() and "--port" not in found["settings"]
    ours = {"version": version("dflash-server"), "settings": found["settings"]}
    facts = dict(own_server.script.info)
    facts["draft_block_size"] = facts["block_size"]
    assert found == facts | named | ours
    assert found["draft_config"]["masks"].startswith("1 causal, window 2048")


def test_the_version_is_that_of_the_package(server):
    answer = server.http.get("/version").json()
    assert answer == {"version": version("dflash-server")}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", answer["version"])
