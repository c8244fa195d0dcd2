"""Facts that routers of other projects read, by copies of their rules, and requests as they forward them."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.messages import EngineInfo, StepOutput, StepStats
from app.metrics import Metrics
from tests.fast.api.served import INFO, Server

ASK = {"model": "tiny", "prompt": "hello world"}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "hello world"}]}
FORWARDED = {
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "echo": False,
}
"""Fields that SGLang's gateway adds to each request."""


def scrape(prefix: str = "vllm:") -> str:
    """Return the metrics of a server whose engine has done a step."""
    metrics = Metrics(prefix, "org/tiny")
    metrics.engine_ready(EngineInfo(**INFO))
    metrics.step(StepOutput([], StepStats("decode", 0.02, 3, 2, 25, 100, 0)))
    return metrics.render().decode()


class LlmD:
    """Rules of llm-d's core-metrics-extractor: a family by name, the newest of its metrics, its value or its labels."""

    def __init__(self, text: str) -> None:
        self._families = {family.name: family for family in text_string_to_metric_families(text)}

    def _newest(self, name: str):
        return max(self._families[name].samples, key=lambda sample: sample.timestamp or 0)

    def gauge(self, name: str) -> float:
        assert self._families[name].type == "gauge"
        return self._newest(name).value

    def label(self, name: str, label: str) -> int:
        return int(self._newest(name).labels[label])


def production_stack(text: str) -> dict[str, float]:
    """Return the samples that production-stack's router takes by their literal names."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    wanted = {"vllm:num_requests_running", "vllm:num_requests_waiting"}
    return {sample.name: sample.value for sample in samples if sample.name in wanted}


def test_llm_d_and_production_stack_read_load_and_cache_by_vllms_names():
    text = scrape()
    rules = LlmD(text)
    assert rules.gauge("vllm:num_requests_waiting") == 2
    assert rules.gauge("vllm:num_requests_running") == 3
    assert rules.gauge("vllm:kv_cache_usage_perc") == 0.25
    assert rules.label("vllm:cache_config_info", "block_size") == INFO["page_size"]
    assert rules.label("vllm:cache_config_info", "num_gpu_blocks") == INFO["num_pages"]
    assert production_stack(text) == {"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2}


def test_each_sample_under_vllms_prefix_has_its_labels_and_none_under_ours():
    for prefix, wanted in (("vllm:", {"model_name": "org/tiny", "engine": "0"}), ("dflash:", {})):
        families = list(text_string_to_metric_families(scrape(prefix)))
        samples = [sample for family in families for sample in family.samples if family.name.startswith(prefix)]
        assert len(samples) > 50
        for sample in samples:
            assert {key: value for key, value in sample.labels.items() if key in ("model_name", "engine")} == wanted


def test_sizes_of_a_cache_go_with_its_engine_and_come_with_the_next():
    metrics = Metrics("dflash:", "tiny")
    metrics.engine_ready(EngineInfo(**INFO))
    metrics.engine_ended()
    assert "dflash:cache_config_info{" not in metrics.render().decode()
    metrics.engine_ready(EngineInfo(**INFO | {"num_pages": 70}))
    assert re.findall("cache_config_info{(.*)}", metrics.render().decode()) == ['block_size="16",num_gpu_blocks="70"']


def test_bytes_of_recurrent_state_are_told_and_go_with_their_engine():
    metrics = Metrics("dflash:", "tiny")
    metrics.engine_ready(EngineInfo(**INFO | {"state_bytes": 7, "state_cache_bytes": 3}))
    assert {"dflash:state_bytes 7.0", "dflash:state_cache_bytes 3.0"} <= set(metrics.render().decode().splitlines())
    metrics.engine_ended()
    assert "dflash:state_bytes 0.0" in metrics.render().decode().splitlines()


def test_sglangs_gateway_finds_its_names_under_both_paths(server):
    for path in ("/server_info", "/get_server_info"):
        found = server.http.get(path).json()
        assert found.items() >= {"served_model_name": "tiny", "model_path": "tiny", "tp_size": 1, "dp_size": 1}.items()
        assert (found["model"], found["dtype"]) == ("tiny", INFO["dtype"])
    for path in ("/model_info", "/get_model_info"):
        found = server.http.get(path).json()
        assert (found["model_path"], found["is_generation"]) == ("tiny", True)
        assert {"model_type", "architectures"} <= found.keys()


def test_the_load_counts_requests_that_run_and_tokens_on_pages(own_server):
    assert own_server.http.get("/get_load").status_code == 503
    own_server.ready()
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert own_server.http.get("/get_load").json() == [idle]
    own_server.engine.stats = StepStats("decode", 0.02, 3, 2, 25, 100, 0)
    assert own_server.http.get("/get_load").json() == [idle | {"num_waiting_reqs": 2, "num_tokens": 25 * 16}]


def submitted(server: Server, path: str, body: dict) -> list[list[int]]:
    """Return the prompts that the engine gets."""
    server.script.plan([*server.ids("hello"), 2])
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [server.script.see("Submit")["token_ids"] for _ in answer.json()["choices"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", TALK),
        ("/v1/completions", ASK),
        ("/v1/completions", ASK | {"prompt": ["hello", "the quick brown fox"]}),
        ("/v1/completions", ASK | {"prompt": [[5, 6, 7], [8]]}),
    ],
)
def test_render_returns_the_tokens_that_the_engine_would_get(server, path, body):
    server.script.forget()
    rendered = server.http.post(f"{path}/render", json=body).json()
    rendered = rendered if isinstance(rendered, list) else [rendered]
    assert [prompt["token_ids"] for prompt in rendered] == submitted(server, path, body)
    assert {prompt["model"] for prompt in rendered} == {"tiny"}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", TALK), ("/v1/completions", ASK)])
def test_render_refuses_what_generation_refuses(server, path, body):
    for wrong in ({"logprobs": 2}, {"temperature": -1}, {"model": "other"}, {"stop_token_ids": "x"}):
        refused = [server.http.post(end, json=body | wrong) for end in (path, f"{path}/render")]
        assert refused[0].status_code == refused[1].status_code >= 400
        assert refused[0].json() == refused[1].json()


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", TALK), ("/v1/completions", ASK)])
def test_requests_pass_with_the_fields_that_sglangs_gateway_adds(server, path, body):
    server.script.plan([*server.ids("hello"), 2])
    unfit = {"separate_reasoning", "stream_reasoning", "continue_final_message"} if "prompt" in body else {"echo"}
    added = {name: value for name, value in FORWARDED.items() if name not in unfit}
    assert server.http.post(path, json=body | added).status_code == 200
    assert server.http.post(path, json=body | FORWARDED).status_code == 200


def test_headers_of_an_endpoint_picker_change_nothing_and_are_logged(server, caplog):
    server.script.plan([*server.ids("hello"), 2])
    headers = {
        "x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000",
        "x-gateway-inference-objective": "chat\x7f\ttricky",
        "x-gateway-inference-fairness-id": "a" * 16_000,
        "x-gateway-destination-endpoint-subset": "10.0.0.1:8000",
        "x-session-token": "c2VjcmV0",
        "x-slo-ttft-ms": "200",
    }
    with caplog.at_level("INFO", "app.access"):
        answer = server.http.post("/v1/completions", content=json.dumps(ASK), headers=headers)
        server.http.get("/version")  # A line is written behind the answer, and before the next request.
    assert answer.status_code == 200
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "app.access" and "/v1/completions" in record.getMessage()
    ]
    assert "x-gateway-destination-endpoint=10.0.0.1:8000,10.0.0.2:8000" in line and "x-slo-ttft-ms=200" in line
    assert "x-gateway-inference-objective=chat%7F%09tricky" in line
    assert f"x-gateway-inference-fairness-id={'a' * 128} " in line + " ", "no more of a header than that"
    assert "c2VjcmV0" not in line
