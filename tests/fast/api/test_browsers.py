"""What web pages may ask of a server: those of other origins nothing, and by no name that is not the server's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.middleware import BrowserGuard, is_loopback
from tests.fast.api.errors import error_of
from tests.fast.api.served import Server, serving_ready

OWN_NAMES = "localhost:8000 LOCALHOST 127.0.0.1 127.9.9.9:1 [::1]:8000 box a.localhost host.docker.internal app.example"
STRANGE_NAMES = "evil.example evil.example:8000 127.0.0.1.evil.example localhost.evil.example."
ASK = {"model": "tiny", "prompt": "hi"}
EVIL, APP = "http://evil.example", "https://app.example"


@pytest.fixture(scope="module")
def open_server(model_folder: Path) -> Iterator[Server]:
    """A server without keys, which pages of one origin may ask."""
    with serving_ready(model_folder, allowed_origins=[APP]) as server:
        yield server


def post(server: Server, path: str = "/v1/completions", **headers: str) -> int:
    """Ask as a form or a `no-cors` fetch of a page can, and return the status."""
    server.script.plan([2])
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post(path, json=ASK, headers={"Content-Type": "text/plain"} | named).status_code


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/flush_cache", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": EVIL, "Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"},
    ],
    ids=str,
)
def test_a_page_of_another_origin_may_not_ask(server, path, headers):
    assert post(server, path, **headers) == 403


def test_the_refusal_names_the_origin_and_the_flag(server):
    error = error_of(server.http.post("/v1/completions", json=ASK, headers={"Origin": EVIL}), 403)
    assert error["code"] == "origin_refused" and EVIL in error["message"] and "--allowed-origins" in error["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": APP},
        {"Origin": APP, "Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": "https://llm.example", "Sec_Fetch_Site": "same-origin", "X_Forwarded_Proto": "https"},
        {"Origin": "vscode-webview://1a2b", "Sec_Fetch_Site": "cross-site"},
        {"Origin": "app://obsidian.md"},
        {"Origin": "http://box:8080", "Host": "box"},
    ],
    ids=str,
)
def test_programs_own_pages_and_pages_of_allowed_origins_may_ask(open_server, headers):
    assert post(open_server, **headers) == 200


def test_the_servers_own_page_may_ask(server):
    assert post(server, Origin=server.url) == 200


def test_a_star_lets_every_page_ask():
    BrowserGuard(["*"], is_local=True).check("POST", {"origin": "null", "host": "a.example"})  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/server_info"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example."]
)
def test_no_name_of_a_stranger_leads_to_a_server_on_this_machine(open_server, path, host):
    error = error_of(open_server.http.get(path, headers={"Host": host}), 403)
    assert error["code"] == "host_refused" and host in error["message"]


@pytest.mark.parametrize("host", OWN_NAMES.split())
def test_its_own_names_and_those_of_allowed_origins_do(open_server, host):
    assert open_server.http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_probes_are_answered_by_any_name(open_server):
    assert open_server.http.get("/ready", headers={"Host": "a.example"}).status_code == 200


@pytest.mark.parametrize("settings", [{"api_key": ["k"]}, {"host": "0.0.0.0"}], ids=str)
def test_a_key_or_another_address_makes_the_name_free(model_folder, settings):
    with serving_ready(model_folder, **settings) as server:
        headers = {"Host": "llm.example", "Authorization": "Bearer k"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200


def test_loopback_addresses_are_known():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.7", "")))
