"""Keys, CORS, a proxy's prefix, keep-alive comments, and secrets that the log must not have."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from app.api import middleware, ops, stream
from tests.fast.api.served import PATIENCE, Server, serving, serving_ready

KEYS = ["first-key", "second-key", "ключ"]
BEARER = {"Authorization": "Bearer first-key"}
ORIGIN = {"Origin": "https://app.example"}
ASK = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "secret words"}]}
CLOSED = [
    *(("GET", path) for path in "/v1/models /v1/models/tiny /version /server_info /get_model_info /get_load".split()),
    *(("GET", path) for path in "/metrics /nothing/here //health /health/ /health/../v1/models /%2e/metrics".split()),
    *(("POST", path) for path in "/v1/chat/completions /v1/completions /tokenize /detokenize".split()),
    ("POST", "/v1/chat/completions/render"),
    *((method, "/v1/models") for method in ("HEAD", "PUT", "OPTIONS")),
]
SERVED = {"api_key": KEYS, "allowed_origins": [ORIGIN["Origin"]]}


@pytest.fixture(scope="module")
def proxied_server(model_folder: Path) -> Iterator[Server]:
    """A server behind a proxy that puts /llm before every path."""
    with serving_ready(model_folder, root_path="/llm", api_key=KEYS) as server:
        yield server


def test_configured_keys_are_hashed_at_startup_and_a_request_hashes_only_its_own(monkeypatch):
    hashed, answers, sha256 = [], [], hashlib.sha256
    monkeypatch.setattr(middleware.hashlib, "sha256", lambda data: hashed.append(data.decode()) or sha256(data))

    async def served(scope, receive, send):
        answers.append(200)

    async def send(message):
        answers.extend([message["status"]] if "status" in message else [])

    gate = middleware.Gate(served, ["first", "second"], "")
    assert hashed == ["first", "second"]
    scope = {"type": "http", "method": "GET", "path": "/metrics", "raw_path": b"/metrics", "query_string": b""}
    for key in ("second", "wrong"):
        asyncio.run(gate(scope | {"headers": [(b"authorization", f"Bearer {key}".encode())]}, None, send))
    assert answers == [200, 401] and hashed == ["first", "second", "second", "wrong"]


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_without_a_key_everything_else_is_401_in_openais_shape(server, method, path):
    response = server.http.request(method, server.url + path, headers={"X-Request-Id": "me-1"})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"] == "me-1"
    if method != "HEAD":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert "Authorization: Bearer" in error["message"]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer first-ke",
        "Bearer first-key2",
        "Bearer FIRST-KEY",
        "Bearer first-key second-key",
        "Bearer first-key,second-key",
        "Bearer\tfirst-key",
        "Basic first-key",
        "Basic Zmlyc3Qta2V5Og==",
        "first-key",
        "BearerX first-key",
        b"Bearer \xff\xfe\x80",
        "Bearer \U0001f600".encode(),
        "Bearer ключ2".encode(),
        "Bearer " + "x" * 10_000,
    ],
    ids=lambda value: repr(value)[:24],
)
def test_what_is_no_key_of_ours_is_401_and_never_reaches_the_engine(server, header):
    response = httpx.post(f"{server.url}/v1/completions", json=ASK, headers={"Authorization": header}, timeout=PATIENCE)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "first-key" not in response.text
    server.script.plan([2])
    server.openai.with_options(api_key="first-key").completions.create(model="tiny", prompt="mine")
    assert server.text(server.script.see("Submit")["token_ids"]) == "mine"


@pytest.mark.parametrize(
    "header",
    ["Bearer first-key", "Bearer second-key", "bearer first-key", "BEARER  first-key", "Bearer ключ".encode()],
    ids=repr,
)
def test_every_key_opens_whatever_the_case_of_the_scheme(server, header):
    assert server.http.get("/v1/models", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_a_key_may_come_in_the_header_of_anthropics_and_azures_clients(server, name):
    basic = {"Authorization": "Basic of a proxy"}
    for headers, status in (
        ({name: "first-key"}, 200),
        (basic | {name: "first-key"}, 200),
        ({name: "wrong"}, 401),
        ({name: ""}, 401),
        ({name: "Bearer first-key"}, 401),
        ({"Authorization": "Bearer", name: "first-key"}, 200),
        ({"x-api-key": "", "api-key": "", name: "first-key"}, 200),
        ({"Authorization": "Bearer wrong", name: "first-key"}, 401),
        (BEARER | {name: "wrong"}, 200),
    ):
        assert server.http.get("/v1/models", headers=headers).status_code == status, headers


def test_the_sdk_takes_the_key_and_names_the_refusal(server):
    server.script.plan([*server.ids("fine"), 2])
    assert server.openai.with_options(api_key="second-key").completions.create(**ASK).choices[0].text == "fine"
    with pytest.raises(openai.AuthenticationError) as caught:
        server.openai.completions.create(**ASK)
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path", ["/live", "/ready", "/health", "/ping", "/", "/docs", "/markdown-it.js", "/openapi.json"]
)
def test_probes_and_pages_need_no_key(server, monkeypatch, method, path):
    monkeypatch.setattr(ops, "_static", lambda name: b"<p>page")
    assert server.http.request(method, path).status_code == 200
    assert server.http.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_metrics_alone_may_be_opened_to_scrapers_without_a_key(model_folder, prefix):
    with serving_ready(model_folder, root_path=prefix, api_key=KEYS, metrics_without_key=True) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, BEARER):
            assert server.http.get(f"{prefix}/metrics", headers=headers).status_code == 200
        for method, path in CLOSED:
            if path != "/metrics":
                assert server.http.request(method, server.url + prefix + path).status_code == 401
        document = server.http.get("/openapi.json").json()
        assert document["paths"]["/metrics"]["get"]["security"] == []


def test_the_document_says_that_a_key_is_needed(server, own_server):
    document = server.http.get("/openapi.json", headers=BEARER).json()
    (name,) = document["components"]["securitySchemes"]
    assert document["security"] == [{name: []}]
    assert document["paths"]["/live"]["get"]["security"] == []
    assert "security" not in document["paths"]["/metrics"]["get"]
    assert "security" not in own_server.http.get("/openapi.json").json()


def test_without_keys_any_authorization_passes(own_server):
    assert own_server.http.get("/v1/models", headers={"Authorization": "Bearer whatever"}).status_code == 200


def test_a_refused_body_does_not_spoil_the_connection(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.post("/v1/completions", content=b"x" * 300_000).status_code == 401
        assert client.get("/v1/models", headers=BEARER).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/metrics"])
def test_a_browser_may_ask_from_an_allowed_origin(server, path):
    response = server.http.options(
        path,
        headers=ORIGIN
        | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type, x-request-id, x-stainless-os",
        },
    )
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type", "x-request-id", "x-stainless-os"} <= set(allowed.split(", "))
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "wrong", [{"Origin": "https://evil.example"}, {"Access-Control-Request-Method": "PUT"}], ids=["origin", "method"]
)
def test_a_refused_preflight_is_told_in_openais_shape(server, wrong):
    response = server.http.options("/v1/models", headers=ORIGIN | {"Access-Control-Request-Method": "POST"} | wrong)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "cors_refused") and "Disallowed CORS" in error["message"]
    assert "Origin" in response.headers["vary"] and response.headers["x-request-id"]


def test_an_allowed_origin_may_read_answers_refusals_and_their_ids(server):
    for headers in (BEARER, {}):
        for path in ("/v1/models", "/nothing/here"):
            response = server.http.get(path, headers=ORIGIN | headers)
            assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
            assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
    assert server.http.post("/v1/completions", content=b"{", headers=ORIGIN | BEARER).status_code == 400


def test_an_allowed_origin_may_read_a_stream(server):
    server.script.plan([*server.ids("fine"), 2])
    response = server.http.post("/v1/completions", json=ASK | {"stream": True}, headers=ORIGIN | BEARER)
    assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://app.example", "https://app.example.evil", "null"])
def test_other_origins_get_no_permission(server, origin):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.http.options("/v1/models", headers=asked).headers
    response = server.http.get("/v1/models", headers=BEARER | {"Origin": origin})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_star_allows_all_origins_and_nothing_said_allows_none(model_folder, own_server):
    with serving(model_folder, allowed_origins=["*"]) as server:
        assert server.http.get("/live", headers=ORIGIN).headers["access-control-allow-origin"] == "*"
    response = own_server.http.get("/live", headers=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_strip_its_prefix_or_leave_it(proxied_server, monkeypatch, prefix):
    server = proxied_server
    monkeypatch.setattr(ops, "_static", lambda name: b"<p>page")
    server.script.plan([*server.ids("fine"), 2])
    answer = server.http.post(f"{prefix}/v1/completions", json=ASK, headers=BEARER)
    assert answer.json()["choices"][0]["text"] == "fine"
    assert server.http.get(f"{prefix}/v1/models/tiny", headers=BEARER).json()["id"] == "tiny"
    assert server.http.get(f"{prefix}/metrics", headers=BEARER).status_code == 200
    for path in ("/live", "/ready", "/health", "/"):
        assert server.http.get(prefix + path).status_code == 200
    for path in ("/v1/models", "/metrics", "/version"):
        assert server.http.get(prefix + path).status_code == 401
    assert server.http.get(f"{prefix}/nothing", headers=BEARER).status_code == 404


@pytest.mark.parametrize("path", ["/llmhealth", "/llm/llm/health", "/llm/v1/models", "/llm//health", "/v1/llm/health"])
def test_no_path_slips_past_the_keys_by_the_prefix(proxied_server, path):
    assert proxied_server.http.get(path).status_code == 401


def test_the_bare_prefix_leads_to_the_page(proxied_server, monkeypatch):
    monkeypatch.setattr(ops, "_static", lambda name: b"<p>page")
    for method in ("GET", "HEAD"):
        response = proxied_server.http.request(method, "/llm")
        assert (response.status_code, response.headers["location"]) == (307, "/llm/")
        assert response.headers["x-request-id"]
    assert proxied_server.http.get("/llm", follow_redirects=True).text == "<p>page"
    assert proxied_server.http.post("/llm", headers=BEARER).status_code == 404
    assert proxied_server.http.get("/llm/llm", headers=BEARER).status_code == 404


def test_the_document_and_its_page_know_the_prefix(proxied_server):
    for path in ("/openapi.json", "/llm/openapi.json"):
        document = proxied_server.http.get(path, headers=BEARER).json()
        assert document.get("servers") == [{"url": "/llm"}]
    assert 'fetch("openapi.json")' in proxied_server.http.get("/llm/docs").text


def test_a_silent_engine_is_bridged_by_comments_that_no_client_sees(own_server, background, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.02)
    own_server.ready()

    started = background.submit(own_server.answer, own_server.ids("fine"))
    received = ""
    with own_server.http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
        request_id = started.result()
        for text in response.iter_text():
            before, received = received.count(": keep-alive\n\n"), received + text
            if before < 2 <= received.count(": keep-alive\n\n"):
                own_server.script.emit(request_id, [*own_server.ids(" again"), 2])
    events = received.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith(("data: ", ": keep-alive")) for event in events[:-1])
    told = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == "fine again"


def test_the_sdk_reads_over_the_comments(own_server, background, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.005)
    own_server.ready()

    def play() -> None:
        request_id = own_server.script.see("Submit")["request_id"]
        for letter in "abcdefgh":
            own_server.script.emit(request_id, own_server.bytes(letter))
        own_server.script.emit(request_id, [2])

    playing = background.submit(play)
    with own_server.openai.completions.create(**ASK, stream=True) as chunks:
        assert "".join(chunk.choices[0].text for chunk in chunks) == "abcdefgh"
    playing.result()


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_are_logged_only_if_that_was_asked_for(model_folder, caplog, log_prompts):
    bodies = {
        "/v1/chat/completions": [CHAT, CHAT | {"stream": True}, CHAT | {"max_tokens": 10_000}],
        "/v1/completions": [{"prompt": "secret words"}, {"prompt": ["x", "secret words"]}],
        "/tokenize": [{"prompt": "secret words"}],
    }
    with serving(model_folder, log_prompts=log_prompts) as server, caplog.at_level(logging.DEBUG):
        server.ready()
        server.script.plan([*server.ids("secret answer"), 2])
        bodies["/v1/completions"].append({"prompt": server.ids("secret words")})
        for path, asked in bodies.items():
            for body in asked:
                server.http.post(path, content=json.dumps(body), headers={"X-Request-Id": "me-1"})
    prompts = [record for record in caplog.records if "secret words" in record.getMessage()]
    assert len(prompts) == (5 if log_prompts else 0)
    assert "secret answer" not in caplog.text
