import logging
from dataclasses import replace
from importlib.metadata import version

import pytest

from app.messages import SpecStep, StepOutput, StepStats, TokenDelta
from app.metrics import TABLE, Metrics

LATENCIES_OF_VLLM = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")


def output(steps: list[SpecStep], queries: int = 0, hits: int = 0) -> StepOutput:
    tokens = sum(step.n_tokens for step in steps)
    stats = StepStats("decode", 0.02, 3, 1, 50, 200, 0, queries, hits)
    return StepOutput([TokenDelta("r", [7] * tokens, steps)], stats)


def samples(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_every_name_of_the_table_is_exposed_under_the_prefix():
    text = Metrics("vllm:").render().decode()
    for metric in TABLE:
        kind = metric.kind if metric.kind in ("gauge", "counter") else "histogram"
        assert f"# TYPE vllm:{metric.name}{'_total' if kind == 'counter' else ''} {kind}" in text


def test_every_panel_of_vllms_dashboard_has_its_metric_under_its_prefix():
    """The names that examples/observability/prometheus_grafana/grafana.json of vLLM asks for."""
    latencies = [f"{name}_seconds_{end}" for name in LATENCIES_OF_VLLM for end in ("bucket", "sum", "count")]
    tokens = ["request_prompt_tokens_bucket", "request_generation_tokens_bucket", "iteration_tokens_total_bucket"]
    phases = [f"request_{phase}_time_seconds_sum" for phase in ("queue", "prefill", "decode")]
    totals = ["prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total"]
    gauges = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
    exposed = {name.partition("{")[0] for name in samples(Metrics("vllm:", "m"))}
    names = [*latencies, *tokens, *phases, *totals, *gauges, "request_max_num_generation_tokens_sum"]
    assert {f"vllm:{name}" for name in names} <= exposed


def test_labels_that_are_known_have_a_sample_before_their_first_event():
    found = samples(Metrics())
    reasons = ("stop", "length", "abort", "error", "deadline")
    assert [found[f'dflash:request_success_total{{finished_reason="{reason}"}}'] for reason in reasons] == [0] * 5
    assert found['dflash:requests_turned_away_total{code="server_busy"}'] == 0


def test_the_version_and_the_memory_of_the_process_are_exposed():
    found = samples(Metrics())
    assert found[f'dflash:build_info{{version="{version("dflash-server")}"}}'] == 1
    assert found["process_resident_memory_bytes"] > 1 << 20 and found["process_open_fds"] > 0


def test_the_tokens_of_a_step_are_those_emitted_and_prompts_that_began():
    metrics = Metrics()
    metrics.step(output([SpecStep(3, 4, 2)], queries=100))
    metrics.step(output([SpecStep(2, 4, 1)], queries=100))
    found = samples(metrics)
    assert found["dflash:iteration_tokens_total_sum"] == 105 and found["dflash:iteration_tokens_total_count"] == 2


def test_no_sample_says_when_a_counter_was_created():
    metrics = Metrics()
    metrics.count("request_success", label="stop")
    assert not [name for name in samples(metrics) if "_created" in name]


def test_two_servers_in_one_process_share_no_metric():
    first, second = Metrics(), Metrics()
    first.step(output([SpecStep(1, 0, 0)]))
    assert samples(first)["dflash:generation_tokens_total"] == 1
    assert samples(second)["dflash:generation_tokens_total"] == 0


def test_slots_of_recurrent_state_are_a_share_and_0_without_any():
    metrics, step = Metrics(), output([])
    metrics.step(step)
    assert samples(metrics)["dflash:state_slots_usage_perc"] == 0
    metrics.step(replace(step, stats=replace(step.stats, used_state_slots=3, num_state_slots=12)))
    assert samples(metrics)["dflash:state_slots_usage_perc"] == 0.25
    assert samples(metrics)["dflash:state_cache_usage_perc"] == 0
    metrics.step(replace(step, stats=replace(step.stats, used_state_checkpoints=1, num_state_checkpoints=2)))
    assert samples(metrics)["dflash:state_cache_usage_perc"] == 0.5


def test_requests_that_went_wrong_are_counted_across_restarts():
    metrics = Metrics()
    for not_finite, dropped in ((1, 0), (2, 3)):
        step = output([])
        metrics.step(replace(step, stats=replace(step.stats, num_not_finite=not_finite, num_faults=dropped)))
    metrics.engine_ended()
    metrics.step(replace(step, stats=replace(step.stats, num_not_finite=1)))
    found = samples(metrics)
    assert (found["dflash:requests_not_finite_total"], found["dflash:requests_dropped_total"]) == (3, 3)


def test_acceptance_per_position_is_accepted_over_verified_at_that_position():
    metrics = Metrics()
    metrics.step(output([SpecStep(3, 4, 2), SpecStep(1, 2, 0), SpecStep(1, 0, 0)]))
    found = samples(metrics)
    verified = [found[f'dflash:spec_decode_num_verified_tokens_per_pos_total{{position="{k}"}}'] for k in range(4)]
    accepted = [found[f'dflash:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}}'] for k in range(4)]
    assert (verified, accepted) == ([2, 2, 1, 1], [1, 1, 0, 0])
    assert found["dflash:spec_decode_num_drafts_total"] == 2


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("num_preemptions", "num_preemptions"),
        ("prefix_cache_queries", "prefix_cache_queries"),
        ("prefix_cache_hits", "prefix_cache_hits"),
    ],
)
def test_what_an_engine_counts_from_its_start_is_counted_across_restarts(name: str, field: str):
    metrics = Metrics()

    def says(count: int) -> None:
        stats = replace(output([]).stats, **{field: count})
        metrics.step(StepOutput([], stats))

    says(2), says(5), metrics.engine_ended()
    assert samples(metrics)[f"dflash:{name}_total"] == 5
    says(1)
    assert samples(metrics)[f"dflash:{name}_total"] == 6


def test_an_idle_output_sets_the_gauges_and_is_no_step():
    metrics = Metrics()
    metrics.step(output([SpecStep(1, 0, 0)]))
    metrics.step(StepOutput([], StepStats("idle", 0.0, 0, 0, 0, 200, 0)))
    found = samples(metrics)
    assert found["dflash:num_requests_running"] == found["dflash:kv_cache_usage_perc"] == 0
    assert not any("step_seconds" in name and "idle" in name for name in found)


def test_tokens_of_one_step_share_its_time():
    metrics = Metrics()
    metrics.observe("inter_token_latency_seconds", 0.8, 16)
    found = samples(metrics)
    assert found["dflash:inter_token_latency_seconds_count"] == 16
    assert round(found["dflash:inter_token_latency_seconds_sum"], 9) == 0.8
    buckets = [
        found[f'dflash:inter_token_latency_seconds_bucket{{le="{le}"}}'] for le in ("0.0001", "0.025", "0.05", "+Inf")
    ]
    assert buckets == [0, 0, 16, 16]


def test_the_log_line_speaks_of_the_time_since_the_last_one_and_is_silent_without_work(caplog):
    metrics = Metrics()
    with caplog.at_level(logging.INFO):
        metrics.log_line()
        metrics.step(output([SpecStep(9, 15, 8), SpecStep(3, 15, 2), SpecStep(1, 0, 0)]))
        metrics.log_line()
        metrics.log_line()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "running 3, waiting 1" in line
    assert "mean acceptance length 6.00" in line and "KV use 25.0 %" in line
    assert line.endswith("prefix cache hits -"), "nothing was looked up"


def test_the_log_line_has_the_hit_rate_since_the_last_one(caplog):
    metrics = Metrics()
    with caplog.at_level(logging.INFO):
        metrics.step(output([], queries=100, hits=0))
        metrics.log_line()
        metrics.step(output([], queries=180, hits=20))
        metrics.step(output([], queries=200, hits=75))
        metrics.log_line()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rpartition("prefix cache hits ")[2] for line in lines] == ["0.0 %", "75.0 %"]
