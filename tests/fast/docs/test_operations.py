"""docs/operations.md and SECURITY.md name what there is, and everything that there is of it."""

import re
from dataclasses import fields
from types import SimpleNamespace

import promql_parser
import torch
import yaml

from app.api import body, connection, json_values, middleware, prompts, schemas, shares
from app.config.aliases import PEER_FLAGS
from app.config.settings import flag_name
from app.config.sources import SETTINGS
from app.engine.load.refusals import REFUSALS
from app.engine.models.kv_pool import bytes_per_token
from app.messages import EngineInfo
from app.metrics import TABLE
from app.text import sandbox
from tests import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "app" / "api").glob("*.py"))


def test_every_code_of_an_error_has_its_row_and_every_row_its_code() -> None:
    table = PAGE.partition("| status |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`([a-z]+_[a-z_]+)`", table))
    assert set(re.findall(r'code="([a-z_]+)"', SOURCES)) - told == {"cors_refused"}
    phases = {f"engine_{phase}" for phase in ("loading", "draining", "dead")}
    assert [code for code in told - phases if f'"{code}"' not in SOURCES] == []


def test_every_alert_has_its_row_and_every_row_its_alert() -> None:
    groups = yaml.safe_load((ROOT / "docker" / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set(re.findall(r"`(Dflash\w+)`", PAGE)) == alerts


def test_every_flag_and_metric_that_is_named_exists() -> None:
    flags = {flag_name(field) for field in SETTINGS}
    flags |= {flag.replace("--", "--no-", 1) for flag in flags} | {"--base-url", "--concurrency", "--dataset"}
    flags |= {name for peer in PEER_FLAGS for name in peer.names}
    flags |= {
        "--health-check-endpoint",
        "--head",
        "--address",
        "--generate",
        "--http-host",
        "--http-port",
    }  # of a router and of Ray
    flags |= {"--rounds"}  # of tests.ray.overhead
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE + SECURITY)) <= flags
    metrics = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in TABLE}
    symptoms = PAGE.partition("| symptom |")[2].partition("\n\n")[0]
    for name in re.findall(r"`((?:num|step|kv|decode|[a-z_]+_total)[a-z_]*)(?:\{[^`]*)?`", symptoms):
        assert name in metrics, name


def test_the_lists_of_metrics_are_the_codes_own() -> None:
    titles = {
        "gauge": "Gauges",
        "counter": "Counters",
        "seconds": "Histograms of seconds",
        "tokens": "Histograms of tokens",
    }
    for kind, title in titles.items():
        own = []
        for name, _, meaning, labels in (metric for metric in TABLE if metric.kind == kind):
            shown = name + ("_total" if kind == "counter" else "") + (f"{{{','.join(labels)}}}" if labels else "")
            own.append(f"- `{shown}`: {meaning}")
        listed = PAGE.partition(f"\n{title}:\n\n")[2].partition("\n\n")[0].replace("`*: ", "`: ")
        assert listed.splitlines() == own
    assert {metric.kind for metric in TABLE} == titles.keys()


def test_queries_and_formulas_of_capacity_are_the_servers() -> None:
    capacity = PAGE.partition("## How many replicas")[2]
    queries = [query for query in re.findall(r"`([^`]*dflash:[^`]+)`", capacity) if query != "dflash:"]
    names = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in TABLE}
    for query in queries:
        promql_parser.parse(query)
        assert set(re.findall(r"dflash:(\w+)", query)) <= names, query
    assert len(queries) == 6
    qwen3_8b = SimpleNamespace(num_kv_layers=36, num_kv_heads=8, head_dim=128)
    draft = SimpleNamespace(num_kv_layers=5, num_kv_heads=8, head_dim=128)
    target, both = (
        bytes_per_token(qwen3_8b, torch.bfloat16),
        sum(bytes_per_token(m, torch.bfloat16) for m in (qwen3_8b, draft)),
    )
    tokens = 20 * 2**30 // both
    for figure in (target, both, tokens):
        assert f"{figure:,}" in capacity
    assert f"are {tokens // 4096} sequences of 4,096" in capacity.replace("\n", " ")
    facts = {field.name for field in fields(EngineInfo)}
    assert {"num_pages", "page_size", "block_size", "max_num_seqs", "state_bytes", "state_cache_bytes"} <= facts


def test_the_limits_that_are_told_are_the_codes_own() -> None:
    for told in (
        f"{middleware.MAX_HEAD_BYTES // 2**10} KiB, {middleware.MAX_HEADERS} headers, whole within "
        f"{connection.HEAD_SECONDS:g} s",
        f"{body.MAX_BODY_BYTES // 2**20} MiB (413); {body.BODY_SECONDS:g} s and then "
        f"{body.MIN_BYTES_PER_SECOND // 2**10} KiB a second (408); {shares.MAX_HELD_BYTES // 2**20} MiB",
        f"{json_values.MAX_VALUES:,} keys, strings, objects, lists and other values",
        f"{json_values.MAX_ITEMS:,} items",
        f"{shares.NUM_THREADS} threads",
        f"{prompts.MAX_COUNTED_BYTES:,} bytes",
        f"{schemas.MAX_MESSAGES:,} messages, {schemas.MAX_STOPS} stop strings of {schemas.MAX_STOP_LENGTH:,} "
        f"characters, {schemas.MAX_STOP_IDS:,} stop token ids, {schemas.MAX_BIASES:,} entries in `logit_bias`, "
        f"{schemas.MAX_CHOICES} choices, {schemas.MAX_TOOLS} tools",
        f"reads nothing for {connection.STALLED_SECONDS:g} s",
        f"{sandbox.MAX_SECONDS:g} s and {sandbox.MAX_CHARACTERS // 2**20} Mi characters a rendering, and a value; "
        f"{sandbox.MAX_MADE // 2**20} Mi characters",
    ):
        assert told in SECURITY, told
    assert f"Idle connections are kept for {connection.SETTINGS['timeout_keep_alive']} s" in PAGE


def test_the_table_of_settings_that_do_not_go_together_is_the_codes_own() -> None:
    rows = [
        (f"`{row.flag.partition(' {')[0]}`", row.other, re.sub(r"{.*?}", "N", why.replace("{result}", "")))
        for row in REFUSALS
        for why, _ in [row.why.rsplit("; ", 1)]
    ]
    table = "\n".join(f"| {flag} | {other} | {why or 'each rank has an equal share'} |" for flag, other, why in rows)
    assert f"|---|---|---|\n{table}\n" in PAGE, f"put this into docs/operations.md:\n{table}"
