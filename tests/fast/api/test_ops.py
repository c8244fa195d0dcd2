"""Probes and metrics."""

import json
import time

import pytest

from tests.fast.api.served import PATIENCE

ASK = {"model": "tiny", "prompt": "hi"}


def test_while_loading_ready_is_503_with_progress_and_requests_are_refused(own_server):
    own_server.script.see("started")
    own_server.script.order("progress", stage="target", done=40, total=100, started=time.monotonic() - 3)
    own_server.until(lambda state: state.progress is not None)
    ready = own_server.http.get("/ready")
    assert ready.status_code == 503 and int(ready.headers["retry-after"]) > 0
    assert ready.json() == {
        "status": "loading",
        "progress": {"stage": "target", "seconds": 3, "done": 40, "total": 100},
    }
    assert own_server.http.get("/live").status_code == 200
    assert [own_server.http.request(how, "/ping").status_code for how in ("GET", "POST")] == [503, 503]
    assert own_server.http.get("/health").status_code == 503
    refused = own_server.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "engine_loading"
    own_server.script.order("ready", info=own_server.script.info)
    own_server.reach("ready")
    assert own_server.http.get("/ready").json() == {"status": "ready"}
    assert own_server.http.get("/health").status_code == 200
    assert [own_server.http.request(how, "/ping").status_code for how in ("GET", "POST")] == [200, 200]


def test_the_engine_is_given_its_settings_on_stdin(own_server):
    assert own_server.script.see("started")["settings"] == {"engine": {}, "target": "tiny", "draft": None}


def test_while_draining_running_requests_finish_and_new_ones_are_refused(own_server, background):
    own_server.ready()
    running, request_id = own_server.begin(background)
    draining = background.submit(lambda: own_server.call(lambda: own_server.engine.drain(PATIENCE)))
    own_server.reach("draining")
    assert own_server.http.get("/ready").json()["status"] == "draining"
    assert own_server.http.get("/health").status_code == 200
    refused = own_server.http.post("/v1/completions", json=ASK)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_draining"
    own_server.script.emit(request_id, [*own_server.ids("done"), 2])
    assert running.result().json()["choices"][0]["text"] == "done"
    draining.result()


def test_what_outlasts_the_drain_ends_in_an_error(own_server, background):
    own_server.ready()
    running, _ = own_server.begin(background)
    own_server.call(lambda: own_server.engine.drain(0.01))
    assert running.result().status_code == 503
    assert "shut down" in running.result().json()["error"]["message"]


def test_metrics_tell_what_was_drafted_verified_and_accepted(own_server):
    own_server.ready()
    ids = own_server.bytes("abcdefgh")
    own_server.script.plan(ids[:1], ids[1:5], ids[5:], [2])
    own_server.openai.completions.create(**ASK)
    prompt = len(own_server.script.see("Submit")["token_ids"])
    assert own_server.metric("prompt_tokens_total") == prompt
    assert own_server.metric("generation_tokens_total") == 9
    assert own_server.metric("request_success_total", finished_reason="stop") == 1
    assert own_server.metric("spec_decode_num_drafts_total") == 4
    assert own_server.metric("spec_decode_num_draft_tokens_total") == 60
    assert own_server.metric("spec_decode_num_accepted_tokens_total") == 5
    accepted = [own_server.metric("spec_decode_num_accepted_tokens_per_pos_total", position=str(p)) for p in range(15)]
    assert accepted == [2, 2, 1] + [0] * 12
    assert own_server.metric("spec_decode_num_verified_tokens_per_pos_total", position="14") == 4
    assert own_server.metric("time_to_first_token_seconds_count") == 1
    assert own_server.metric("inter_token_latency_seconds_count") == 8
    assert own_server.metric("e2e_request_latency_seconds_count") == 1
    assert own_server.metric("step_seconds_count", kind="decode") == 4
    assert own_server.metric("num_requests_running") == 0
    assert own_server.metric("kv_cache_usage_perc") == 0


def test_metrics_are_prometheus_text(server):
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE dflash:num_requests_running gauge" in response.text


@pytest.mark.parametrize(
    "path", "/live /ready /health /metrics /v1/models /v1/models/tiny /version /openapi.json".split()
)
def test_head_is_get_without_the_body(server, path):
    got, asked = server.http.get(path), server.http.head(path)
    assert got.status_code == asked.status_code == 200 and got.headers["x-request-id"]
    assert asked.content == b"" and asked.headers.get("content-type") == got.headers.get("content-type")


def test_the_log_has_request_ids_and_never_a_prompt_or_an_answer(server, caplog):
    server.script.plan([*server.ids("secret answer"), 2])
    with caplog.at_level("DEBUG"):
        server.http.post(
            "/v1/completions", content=json.dumps(ASK | {"prompt": "secret prompt"}), headers={"X-Request-Id": "me-7"}
        )
    assert any(record.name == "app.access" and "200" in record.getMessage() for record in caplog.records)
    assert "secret" not in caplog.text


def test_the_document_tells_whole_answers_as_they_are_sent(server):
    document = server.http.get("/openapi.json").json()
    shapes = document["components"]["schemas"]
    reasons = {name: shapes[name]["properties"]["finish_reason"]["enum"] for name in ("ChatChoice", "TextChoice")}
    assert reasons == {"ChatChoice": ["stop", "length", "tool_calls"], "TextChoice": ["stop", "length"]}
    for name in ("ResponseBody", "OutputMessage", "OutputReasoning", "OutputCall"):
        assert shapes[name]["properties"]["status"]["enum"] == ["completed", "incomplete"]
    answers = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    described = answers["text/event-stream"]["schema"]["description"]
    assert "`failed`" in described and "[DONE]" not in described
    assert set(shapes["ServerInfo"]["required"]) == set(server.http.get("/server_info").json())
