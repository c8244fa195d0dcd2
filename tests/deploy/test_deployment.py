"""docker/ and docs/ascend.md are well formed and true of this code. No Docker engine, no cluster, no network.

Every check gets a planted mistake too, because a check that cannot fail proves nothing.
"""

import fnmatch
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal, get_args

import kubernetes_validate
import promql_parser
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.api.app import ROUTERS
from app.config.aliases import PEER_FLAGS
from app.config.error import ConfigError
from app.config.flags import parse_flags, serve_parser
from app.config.settings import Config, env_name
from app.config.sources import SETTINGS, load_config
from app.engine.npu.error_codes import MEANINGS
from app.messages import FinishReason
from app.metrics import TABLE
from tests import ROOT

DOCKER = ROOT / "docker"
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILES = ("Dockerfile.npu", "Dockerfile.cpu", "Dockerfile.cuda")
ARCHITECTURES = ("amd64", "arm64")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(page: str, first_heading: str) -> list[list[str]]:
    """The cells of a Markdown table, found by the words of its first headings."""
    rows = page.split(f"| {first_heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip()[1:-1].split("|")] for row in rows]


GUIDE = read("docs/ascend.md")
COMPOSE = read("docker/compose.yaml")
MANIFEST = read("docker/k8s.yaml")
README_SECTION = read("README.md").partition("\n## Docker")[2].partition("\n## ")[0]


# --- form -------------------------------------------------------------------------------------------------------------


def lint(dockerfile: str) -> list[str]:
    done = subprocess.run([BIN / "hadolint", "--format", "json", "-"], input=dockerfile, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [f"{finding['line']}: {finding['code']} {finding['message']}" for finding in json.loads(done.stdout)]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_dockerfiles_have_nothing_that_hadolint_minds(name: str) -> None:
    assert lint(read(f"docker/{name}")) == []


@pytest.mark.parametrize(
    ("line", "code"), [("COPPY a b", "DL1000"), ("RUN cd /x && ls", "DL3003"), ("USER root", "DL3002")]
)
def test_hadolint_sees_a_planted_mistake(line: str, code: str) -> None:
    assert any(code in finding for finding in lint(f"{read('docker/Dockerfile.cpu')}\n{line}\n"))


def compose_errors(text: str, folder: Path) -> str:
    (folder / "compose.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(folder / "compose.yaml")], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_compose_fits_its_schema(tmp_path: Path) -> None:
    assert compose_errors(COMPOSE, tmp_path) == ""
    planted = COMPOSE.replace("stop_grace_period:", "stop_grace_time:", 1)
    assert "stop_grace_time" in compose_errors(planted, tmp_path)


def validate_manifest(text: str) -> None:
    for document in yaml.safe_load_all(text):
        for version in ("1.28", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


def test_the_kubernetes_manifest_fits_its_schemas() -> None:
    validate_manifest(MANIFEST)
    for right, wrong in (("replicas: 1", "replicas: one"), ("readinessProbe:", "readynessProbe:")):
        with pytest.raises(kubernetes_validate.ValidationError):
            validate_manifest(MANIFEST.replace(right, wrong))


def test_the_inference_pool_selects_the_manifests_pods_and_their_port() -> None:
    pool, route = yaml.safe_load_all(read("docker/inference-pool.yaml"))
    deployment = next(yaml.safe_load_all(MANIFEST))
    pod = deployment["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [server["ports"][0]["containerPort"]]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    group = pool["apiVersion"].partition("/")[0]
    assert (backend["group"], backend["kind"], backend["name"]) == (group, pool["kind"], pool["metadata"]["name"])


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Duration = Field(pattern=r"^(\d+(ms|[smhdwy]))+$")


class Rule(Strict):
    alert: str = Field(pattern=r"^\w+$")
    expr: str
    wait: str | None = Field(None, alias="for", pattern=r"^(\d+(ms|[smhdwy]))+$")
    labels: dict[Literal["severity"], Literal["info", "warning", "critical"]]
    annotations: dict[Literal["summary"], str]


class Group(Strict):
    name: str
    rules: list[Rule]


class Alerts(Strict):
    groups: list[Group]


class DnsDiscovery(Strict):
    names: list[str]
    type: Literal["A"]
    port: int
    refresh_interval: str = Duration


class Relabel(Strict):
    source_labels: list[str] = []
    target_label: str
    replacement: str = "$1"


class Job(Strict):
    job_name: str
    metrics_path: str = "/metrics"
    params: dict[str, list[str]] = {}
    dns_sd_configs: list[DnsDiscovery]
    relabel_configs: list[Relabel] = []


class GlobalTimes(Strict):
    scrape_interval: str = Duration
    evaluation_interval: str = Duration


class Prometheus(Strict):
    times: GlobalTimes = Field(alias="global")
    rule_files: list[str]
    scrape_configs: list[Job]


PROMETHEUS = Prometheus.model_validate(yaml.safe_load(read("docker/prometheus.yml")))
RULES = [
    rule for group in Alerts.model_validate(yaml.safe_load(read("docker/alerts.yml"))).groups for rule in group.rules
]


@pytest.mark.parametrize(("right", "wrong"), [("expr:", "expression:"), ("for: 2m", "for: 2 minutes")])
def test_a_misspelt_rule_is_seen(right: str, wrong: str) -> None:
    with pytest.raises(ValidationError):
        Alerts.model_validate(yaml.safe_load(read("docker/alerts.yml").replace(right, wrong)))


def test_a_misspelt_scrape_job_is_seen() -> None:
    with pytest.raises(ValidationError):
        Prometheus.model_validate(yaml.safe_load(read("docker/prometheus.yml").replace("metrics_path", "metric_path")))


# --- PromQL and metrics -----------------------------------------------------------------------------------------------


def metric_labels() -> dict[str, set[str]]:
    """Every series that Prometheus can have from us -> its labels."""
    labels: dict[str, set[str]] = {"up": set(), "probe_success": set()}
    for metric in TABLE:
        own = set(metric.labels)
        for ending in {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}[metric.kind]:
            labels[f"dflash:{metric.name}{ending}"] = own | ({"le"} if ending == "_bucket" else set())
    return {name: own | {"instance", "job"} for name, own in labels.items()}


def query_errors(query: str) -> list[str]:
    """Return the mistakes of a PromQL expression: its grammar, or metrics and labels that do not exist."""
    for variable, value in {"$__rate_interval": "1m", "$__range": "1h", "$instance": ".*"}.items():
        query = query.replace(variable, value)
    try:
        tree = promql_parser.parse(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    known, errors, names, wanted = metric_labels(), [], set(), set()

    def visit(node: Any) -> None:
        selector = node.vector_selector if isinstance(node, promql_parser.MatrixSelector) else node
        if isinstance(selector, promql_parser.VectorSelector):
            names.add(selector.name)
            wanted.update(matcher.name for matcher in selector.matchers.matchers)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            wanted.update(node.modifier.labels)
        if isinstance(node, promql_parser.Call) and node.func.name == "label_replace":
            wanted.add(node.args[3].val)

    promql_parser.walk(tree, visit)
    errors += [f"there is no metric {name}" for name in names - known.keys()]
    there = set.intersection(*(known[name] for name in names & known.keys())) if names & known.keys() else set()
    return errors + [f"{sorted(names)} have no label {label}" for label in wanted - there]


DASHBOARD = json.loads(read("docker/grafana/dashboards/dflash.json"))
DASHBOARD_QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("query", [rule.expr for rule in RULES] + DASHBOARD_QUERIES)
def test_every_query_parses_and_asks_for_metrics_that_exist(query: str) -> None:
    assert query_errors(query) == []


@pytest.mark.parametrize(
    "query",
    [
        "rate(dflash:preemptions_total[5m)",
        "dflash:preemption_total",
        "dflash:preemptions",
        "rate(dflash:spec_decode_num_drafts[5m])",
        "sum by (positon) (rate(dflash:spec_decode_num_accepted_tokens_per_pos_total[5m]))",
        'dflash:preemptions_total{position="0"}',
        'label_replace(dflash:preemptions_total, "at", "0$1", "position", "(.)")',
    ],
)
def test_a_wrong_query_is_seen(query: str) -> None:
    assert query_errors(query) != []


def test_rules_cover_what_an_operator_must_hear_of_and_name_labels_that_exist() -> None:
    alerts = {rule.alert for rule in RULES}
    assert {"DflashDown", "DflashNotReady", "DflashNoProgress", "DflashAcceptanceCollapsed"} <= alerts
    assert any("Kv" in alert for alert in alerts)
    for rule in RULES:
        assert re.findall(r"\$labels\.(\w+)", rule.annotations["summary"]) == ["instance"], rule.alert
        assert "{{ $labels.instance }}" in rule.annotations["summary"]
    for alert in re.findall(r"\bDflash[A-Z]\w+", GUIDE):
        assert alert in alerts


def test_the_dashboard_shows_every_metric_but_one() -> None:
    shown = set(re.findall(r"dflash:(\w+?)(?:_total|_bucket|_sum|_count)?\b", " ".join(DASHBOARD_QUERIES)))
    missing = {metric.name for metric in TABLE} - shown
    assert missing == {"spec_decode_num_draft_tokens"}, "which is the sum of the verified ones by position"


def wrong_values(query: str) -> list[str]:
    """Values of labels that no series of ours ever has."""
    values = {
        "code": set("server_busy client_busy engine_loading engine_draining engine_dead".split()),
        "finished_reason": {*get_args(FinishReason), "deadline"},
        "drafting": {"yes", "no"},
        "position": set(map(str, range(64))),
        "job": {job["job_name"] for job in yaml.safe_load(read("docker/prometheus.yml"))["scrape_configs"]},
    }
    matchers = re.findall(r'(\w+)="([^"]*)"', query)
    return [f"{label}={value}" for label, value in matchers if value not in values[label]]


@pytest.mark.parametrize("query", [rule.expr for rule in RULES] + DASHBOARD_QUERIES)
def test_every_query_asks_for_values_that_labels_have(query: str) -> None:
    assert wrong_values(query) == []


def test_a_misspelt_value_of_a_label_is_seen() -> None:
    query = 'dflash:requests_turned_away_total{code="server_bussy"} + up{job="dflash"} > 0'
    assert wrong_values(query) == ["code=server_bussy"]


def test_the_dashboard_hangs_together() -> None:
    source = yaml.safe_load(read("docker/grafana/provisioning/datasources/prometheus.yaml"))["datasources"][0]
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": source["uid"]}
        where = panel["gridPos"]
        own = {(where["x"] + x, where["y"] + y) for x in range(where["w"]) for y in range(where["h"])}
        assert not own & cells and max(x for x, _ in own) < 24, panel["title"]
        cells |= own
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in target["expr"] or label == "instance", panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services()


# --- flags, variables, paths, files -----------------------------------------------------------------------------------

FOREIGN_FLAGS = {
    "docker": "file tag build-arg platform rm name publish shm-size stop-timeout device volume group-add user env "
    "runtime entrypoint detach profile from chmod interval timeout start-period retries mount init help",
    "pip": "no-cache-dir no-deps no-build-isolation no-index only-binary require-hashes requirement index-url",
    "other tools": "yes no-install-recommends gid uid create-home non-unique local-dir local_dir model format",
}
"""Flags of the tools that stand around our own command in these files."""


def flag_errors(text: str) -> list[str]:
    """Flags that neither we nor the tools around us know, `no-` forms included."""
    known = {flag.lstrip("-") for flag in serve_parser()._option_string_actions}
    known |= {flag for flags in FOREIGN_FLAGS.values() for flag in flags.split()}
    found = re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)
    return [f"--{flag}" for flag in found if flag not in known]


def texts_with_flags() -> dict[str, str]:
    """Our files, without the table of flags that are vLLM's alone, which has a test of its own."""
    theirs = GUIDE.partition("| theirs | what to do here |")[2].partition("\n\n")[0]
    files = {name: read(f"docker/{name}") for name in (*DOCKERFILES, "compose.yaml", "k8s.yaml", "entrypoint-npu.sh")}
    return files | {"docs/ascend.md": GUIDE.replace(theirs, ""), "README.md, Docker": README_SECTION}


@pytest.mark.parametrize("name", texts_with_flags())
def test_every_flag_exists(name: str) -> None:
    text = texts_with_flags()[name]
    assert flag_errors(text) == []
    assert flag_errors(f"{text} serve --max-num-seq 8 --shutdown_timeouts=3") == [
        "--max-num-seq",
        "--shutdown_timeouts",
    ]


def test_the_arguments_of_the_manifests_are_taken_by_the_command_line() -> None:
    arguments = yaml.safe_load(MANIFEST.partition("---")[0])["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[0] == "serve"
    load_config(parse_flags(arguments[1:]))
    with pytest.raises(ConfigError):
        parse_flags([*arguments[1:], "--draft-modell", "x"])
    for command in re.findall(r"dflash-server:npu serve (.*)", GUIDE):
        load_config(parse_flags(command.split()))


def test_the_guide_points_to_the_table_of_vllms_flags() -> None:
    """Another test holds that table to the code."""
    assert "[migrating.md](migrating.md)" in GUIDE
    rows = {row[0]: row[2] for row in table(read("docs/migrating.md"), "theirs | ours | whose")}
    for peer in PEER_FLAGS:
        assert rows[f"`{peer.flag}`"] == peer.peers


def test_flags_that_the_guide_calls_unknown_stop_the_start() -> None:
    flags = re.findall(r"`(--[\w-]+)`", " ".join(row[0] for row in table(GUIDE, "theirs | what to do here")))
    assert len(flags) > 5
    for flag in flags:
        with pytest.raises(ConfigError, match=flag):
            parse_flags([flag, "1"])


COMING = {"npu-report"}
"""Commands that the guide names already; empty this when they are there."""


def test_commands_that_the_guide_names_exist() -> None:
    usage = subprocess.run([sys.executable, "-m", "app", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    for command in set(re.findall(r"dflash-server(?::npu|:cpu)? ([a-z][a-z-]*)", GUIDE + README_SECTION)):
        assert re.search(rf"^  {command}\b", usage, re.MULTILINE) or command in COMING, command


def variable_errors(text: str) -> list[str]:
    """DFLASH_* variables that are no setting and that no code reads."""
    known = {env_name(field) for field in SETTINGS}
    for source in (ROOT / "app").rglob("*.py"):
        known |= set(re.findall(r"""environ(?:\.get)?[\[(]["'](DFLASH_\w+)""", source.read_text(encoding="utf-8")))
    return [name for name in re.findall(r"\bDFLASH_[A-Z]\w*", text) if name not in known]


@pytest.mark.parametrize("name", texts_with_flags())
def test_every_variable_exists(name: str) -> None:
    text = texts_with_flags()[name]
    assert variable_errors(text) == []
    assert variable_errors(f"{text} DFLASH_MAX_SEQS=3") == ["DFLASH_MAX_SEQS"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, its text) of a Dockerfile, continued lines joined, comments left out."""
    text = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", read(f"docker/{name}"), flags=re.MULTILINE))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def image_variables(name: str) -> dict[str, str]:
    texts = " ".join(text for instruction, text in instructions(name) if instruction == "ENV")
    return dict(pair.split("=", 1) for pair in texts.split())


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_settings_of_the_images_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in image_variables(name).items():
        if variable.startswith("DFLASH_"):
            monkeypatch.setenv(variable, value)
    config = load_config()
    assert (config.host, config.port) == ("0.0.0.0", 8000)
    assert config.device == name.removeprefix("Dockerfile.")


def test_variables_of_other_tools_that_are_set_have_their_row_in_the_guide() -> None:
    rows = {name: row[1] for row in table(GUIDE, "variable") for name in re.findall(r"`(\w+)`", row[0])}
    pod = yaml.safe_load(MANIFEST.partition("---")[0])["spec"]["template"]["spec"]["containers"][0]
    given = {variable["name"] for variable in pod["env"]} | services()["server-0"]["environment"].keys()
    ours = {name for name in given | image_variables("Dockerfile.npu").keys() if name.startswith("DFLASH_")}
    assert given - ours <= rows.keys()
    for variable, value in image_variables("Dockerfile.npu").items():
        if variable not in ours:
            assert rows[variable].strip("`") == value, variable
    for variable, value in rows.items():
        assert bool(value) == (variable in image_variables("Dockerfile.npu")), variable


def test_the_build_arguments_in_the_guide_are_the_dockerfiles() -> None:
    given = (text.partition("=") for i, text in instructions("Dockerfile.npu") if i == "ARG" and text != "TARGETARCH")
    arguments = {name: default for name, _, default in given}
    documented = {
        name: row[1].strip("`") for row in table(GUIDE, "build argument") for name in re.findall(r"`(\w+)`", row[0])
    }
    assert documented == arguments
    assert arguments["CANN_VERSION"] == "9.1.0"


PATHS = {route.path for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]


def probed_paths() -> Iterator[tuple[str, str]]:
    """(where, path) of everything that is asked over HTTP."""
    for name in DOCKERFILES:
        yield from ((name, path) for path in re.findall(r"'GET', '([^']+)'", read(f"docker/{name}")))
    yield from (("haproxy.cfg", path) for path in re.findall(r"meth GET uri (\S+)", read("docker/haproxy.cfg")))
    yield from (("k8s.yaml", path) for path in re.findall(r"\bpath: (/[\w/]*)", MANIFEST))
    yield from (("k8s.yaml", path) for path in re.findall(r"prometheus.io/path: (\S+)", MANIFEST))
    for job in PROMETHEUS.scrape_configs:
        targets = [label.replacement for label in job.relabel_configs if label.target_label == "__param_target"]
        yield job.job_name, targets[0].removeprefix("http://$1") if targets else job.metrics_path
    for path in re.findall(r"`(/[a-z]+)`", GUIDE):
        if path != "/models":  # the folder
            yield "docs/ascend.md", path


def test_every_path_that_is_asked_is_served() -> None:
    asked = list(probed_paths())
    assert {where for where, _ in asked} >= {*DOCKERFILES, "haproxy.cfg", "k8s.yaml", "dflash", "dflash-ready"}
    for where, path in asked:
        assert path in PATHS, f"{where}: {path}"
    assert "/readyz" not in PATHS


def ignored(path: str, patterns: str) -> bool:
    """Return True if .dockerignore keeps `path` out. The last pattern that fits it, or a folder of it, decides."""
    parts = path.split("/")
    above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    out = False
    for line in filter(None, map(str.strip, patterns.splitlines())):
        pattern = line.removeprefix("!")
        names = parts if pattern.startswith("**/") else above
        if any(name.count("/") == pattern.removeprefix("**/").count("/") for name in names) and any(
            fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names
        ):
            out = not line.startswith("!")
    return out


def missing_sources(dockerfile: str, patterns: str) -> list[str]:
    """Files that the build takes from the repository, and that are not there or kept out."""
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+) \S+$", dockerfile, re.MULTILINE)
    needed = list(dict.fromkeys(path.replace("${TARGETARCH}", arch) for path in copied for arch in ARCHITECTURES))
    needed += ["pyproject.toml", "app/api/static/index.html", "app/demo/checkpoint/target/config.json"]
    return [path for path in needed if not (ROOT / path).is_file() or ignored(path, patterns)]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_images_find_all_that_they_are_made_of(name: str) -> None:
    text, patterns = read(f"docker/{name}"), read(".dockerignore")
    assert missing_sources(text, patterns) == []
    assert missing_sources(f"{text}COPY docker/nothing.sh /x\n", patterns) == ["docker/nothing.sh"]
    assert "pyproject.toml" in missing_sources(text, patterns.replace("!pyproject.toml", ""))
    for path in ("app/__pycache__/cli.cpython-311.pyc", "tests/proof.py", ".venv/bin/python", ".git/config"):
        assert ignored(path, patterns), path


def test_no_weights_but_the_demo_pairs_go_into_the_package() -> None:
    weights = {str(path.relative_to(ROOT)) for path in (ROOT / "app").rglob("*.safetensors")}
    assert weights and all(path.startswith("app/demo/checkpoint/") for path in weights)


def test_files_that_the_guide_names_exist() -> None:
    for path in re.findall(r"\]\(([\w./-]+)\)", GUIDE):
        assert (ROOT / "docs" / path).is_file(), path
    for path in re.findall(r"(?<![/\w])(?:docker|tests|docs)/[\w./-]*\w", GUIDE + README_SECTION + COMPOSE):
        assert (ROOT / path).exists() or path == "docker/.env", path


# --- the parts fit each other -----------------------------------------------------------------------------------------


def services() -> dict[str, Any]:
    """The services of compose.yaml, as they are where no variable is set."""
    plain = json.dumps(yaml.safe_load(COMPOSE)["services"])
    return dict(json.loads(re.sub(r"\$\{\w+(?::-([^}]*))?\}", r"\1", plain)))


def test_eight_replicas_have_one_npu_each_and_everybody_knows_them() -> None:
    servers = {name: service for name, service in services().items() if name.startswith("server-")}
    assert len(servers) == 8
    for number, (name, server) in enumerate(servers.items()):
        assert name == f"server-{number}"
        assert server["devices"] == [f"/dev/davinci{number}", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
        assert server.get("profiles", []) == (["replicas"] if number else [])
    proxied = re.findall(r"^ +server (\S+) (\S+):8000$", read("docker/haproxy.cfg"), re.MULTILINE)
    assert proxied == [(name, name) for name in servers]
    for job in PROMETHEUS.scrape_configs:
        assert [config.names for config in job.dns_sd_configs] == [list(servers)]
    assert "blackbox" in services() and "replacement: blackbox:9115" in read("docker/prometheus.yml")


@pytest.mark.parametrize(("name", "cards"), [("two-cards", 2), ("four-cards", 4)])
def test_a_model_over_several_cards_has_as_many_devices_as_ranks(
    name: str, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, alone = services()[name], services()["server-0"]
    assert [device for device in service["devices"] if device not in alone["devices"][1:]] == [
        f"/dev/davinci{card}" for card in range(cards)
    ]
    assert service["profiles"] == [name], "it starts in the place of server-0, not beside it"
    assert service["ports"] == alone["ports"] and service["networks"] == {"default": {"aliases": ["server-0"]}}
    assert f" up --detach {name} " in GUIDE
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    assert load_config().tensor_parallel_size == cards


def test_files_that_compose_mounts_exist_where_the_containers_look_for_them() -> None:
    mounts = [mount for service in services().values() for mount in service.get("volumes", [])]
    mounted = [mount for mount in mounts if isinstance(mount, str) and mount.startswith(".")]
    inside = {mount.split(":")[1] for mount in mounted}
    assert mounted and all((DOCKER / mount.split(":")[0]).exists() for mount in mounted)
    assert set(PROMETHEUS.rule_files) <= inside
    provider = yaml.safe_load(read("docker/grafana/provisioning/dashboards/dflash.yaml"))["providers"][0]
    assert provider["options"]["path"] in inside
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert (DOCKER / "grafana" / "dashboards" / Path(home).name).is_file()


def test_variables_that_compose_reads_are_explained_at_its_top() -> None:
    head = COMPOSE.partition("\nname:")[0]
    for variable in set(re.findall(r"\$\{(\w+)", COMPOSE)):
        assert variable in head, variable


def test_the_settings_of_compose_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in services()["server-0"]["environment"].items():
        monkeypatch.setenv(variable, value)
    config = load_config()
    assert (config.model, config.draft_model) == ("demo", None)
    seconds = int(services()["server-0"]["stop_grace_period"].removesuffix("s"))
    assert seconds >= config.drain_delay + config.shutdown_timeout + 10
    interval, fall = re.findall(r"check inter (\d+)s fall (\d+) ", read("docker/haproxy.cfg"))[0]
    assert config.drain_delay > int(interval) * int(fall), "HAProxy goes elsewhere before requests are refused"


def test_everybody_waits_longer_than_the_server_drains_and_as_long_as_it_may_load() -> None:
    default = Config.model_fields["shutdown_timeout"].default
    for name in DOCKERFILES:
        assert ("STOPSIGNAL", "SIGTERM") in instructions(name)
        assert "--start-period=30m " in dict(instructions(name))["HEALTHCHECK"]
    assert int(re.findall(r"--stop-timeout (\d+)", GUIDE)[0]) >= default + 10
    pod = yaml.safe_load(MANIFEST.partition("---")[0])["spec"]["template"]["spec"]
    container = pod["containers"][0]
    arguments = container["args"]
    drain = float(arguments[arguments.index("--shutdown-timeout") + 1])
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    assert startup["httpGet"] == container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"


def test_a_path_that_the_host_does_not_have_is_an_error_and_no_new_folder() -> None:
    mounts = services()["server-7"]["volumes"]
    of_host = [mount for mount in mounts if mount["type"] == "bind"]
    assert len(of_host) == 6
    for mount in of_host:
        assert mount["bind"] == {"create_host_path": False} and mount["read_only"] is True, mount["source"]
    for command in re.findall(r"docker run(?: .*\\\n)+.*", GUIDE + README_SECTION):
        assert not re.findall(r"--volume /\S+", command)
        assert all("type=bind," in mount for mount in re.findall(r"--mount (\S+)", command))


def test_servers_have_a_read_only_root_and_folders_to_write_to_everywhere() -> None:
    server = services()["server-7"]
    assert server["read_only"] is True and server["cap_drop"] == ["ALL"]
    writable = {path.split(":")[0] for path in server["tmpfs"]}
    assert writable | {mount["target"] for mount in server["volumes"] if mount["type"] == "volume"} == {
        "/tmp",
        "/home/dflash",
    }
    pod = yaml.safe_load(MANIFEST.partition("---")[0])["spec"]["template"]["spec"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] in empty}
    assert mounts == {"/dev/shm", "/tmp", "/home/dflash"}


def test_a_pod_gets_as_many_npus_as_the_model_is_shared_by() -> None:
    """At the places that the manifest marks, and no others."""
    for cards in (1, 2, 4):
        text, places = re.subn(r'1("?) (?=# cards)', rf"{cards}\1 ", MANIFEST)
        container = yaml.safe_load(text.partition("---")[0])["spec"]["template"]["spec"]["containers"][0]
        assert places == 3 and load_config(parse_flags(container["args"][1:])).tensor_parallel_size == cards
        assert {container["resources"][kind]["huawei.com/Ascend910"] for kind in ("requests", "limits")} == {cards}


def test_the_pod_asks_for_one_npu_and_for_no_rights() -> None:
    deployment, service = yaml.safe_load_all(MANIFEST)
    pod = deployment["spec"]["template"]
    container = pod["spec"]["containers"][0]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["huawei.com/Ascend910"] == 1
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == selector and selector.items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


# --- what a build reads and leaves behind -----------------------------------------------------------------------------


def last_stage(name: str) -> list[tuple[str, str]]:
    steps = instructions(name)
    return steps[max(number for number, (instruction, _) in enumerate(steps) if instruction == "FROM") :]


def steps_with(name: str, *words: str) -> list[str]:
    return [text for instruction, text in last_stage(name) if instruction == "RUN" and all(w in text for w in words)]


def rebuilt(name: str, change: str) -> list[str]:
    """The RUNs that BuildKit makes again after a change of a build argument or of a file."""
    runs, changed = [], False
    for instruction, text in last_stage(name):
        if instruction == "ARG":
            changed |= text.partition("=")[0] == change
        if instruction == "COPY" and "--from=" not in text:
            source = next(word for word in text.split() if not word.startswith("--"))
            changed |= any(source.replace("${TARGETARCH}", arch) == change for arch in ARCHITECTURES)
        if instruction == "RUN":
            for mount in re.findall(r"--mount=type=bind\S*", text):
                folder = re.search(r"source=([^,\s]+)", mount)
                changed |= "/" in change and (folder is None or change.startswith(folder.group(1)))
            if changed:
                runs.append(text)
    return runs


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_change_rebuilds_no_layer_that_it_does_not_concern(name: str) -> None:
    kind = name.removeprefix("Dockerfile.")
    torch, packages = steps_with(name, "--requirement", "torch.txt"), steps_with(name, "requirements.txt")
    assert len(torch) == len(packages) == 1
    lock = "torch-cuda-amd64" if kind == "cuda" else "torch-amd64"
    assert torch[0] in rebuilt(name, f"docker/{lock}.txt") and torch[0] in rebuilt(name, "TORCH_INDEX_URL")
    packages_alone = rebuilt(name, f"docker/requirements-{kind}-amd64.txt")
    assert torch[0] not in packages_alone and packages[0] in packages_alone
    for change in ("docker/entrypoint-npu.sh", "app/cli.py", "USER_ID", "GROUP_ID"):
        assert not {*torch, *packages} & {*rebuilt(name, change)}, change
    own = steps_with(name, "pip install", "/src")[0]
    assert own not in rebuilt(name, "USER_ID") and own in rebuilt(name, "app/cli.py")
    for change in ("PIP_INDEX_URL", "TORCH_INDEX_URL", "USER_ID"):
        assert not any("apt-get" in run for run in rebuilt(name, change)), change


@pytest.mark.parametrize("name", DOCKERFILES)
def test_torch_is_asked_of_its_index_and_all_other_packages_of_theirs(name: str) -> None:
    assert "extra" not in read(f"docker/{name}").lower(), "an index more is asked for every package"
    assert steps_with(name, "pip install", "TORCH_INDEX_URL") == steps_with(name, "torch.txt")
    for (kind, arch), versions in LOCKS.items():
        of_torch = set(locked(read(f"docker/{torch_lock(kind, arch)}.txt")))
        libraries = {package for package in of_torch if package.startswith(("nvidia-", "cuda-"))}
        assert of_torch - libraries == ({"torch", "triton"} if kind == "cuda" else {"torch"}) and "torch" in versions
        assert bool(libraries) == (kind == "cuda")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_torchs_own_tests_go_in_the_step_that_brings_them(name: str) -> None:
    assert re.search(r' && rm -rf "\$\(python3 -c .*\)/test"$', steps_with(name, "pip install", "torch.txt")[0])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_password_of_a_mirror_need_not_stay_in_the_image(name: str) -> None:
    downloads = steps_with(name, "pip install", "--requirement")
    assert len(downloads) == 2
    for text in downloads:
        assert "--mount=type=secret,id=pip,target=/etc/pip.conf " in text and "--mount=type=secret,id=ca " in text
    assert ("ARG", "PIP_INDEX_URL") in last_stage(name), "a default would stand above the secret's index"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_build_without_buildkit_says_what_is_missing(name: str) -> None:
    guard = re.findall(
        r': "\$\{TARGETARCH:\?[^"]*"', next(text for instruction, text in instructions(name) if instruction == "RUN")
    )[0]
    done = subprocess.run(["sh", "-c", guard], env={"TARGETARCH": ""}, capture_output=True, text=True)
    assert done.returncode != 0 and "BuildKit" in done.stderr
    assert subprocess.run(["sh", "-c", guard], env={"TARGETARCH": "arm64"}).returncode == 0


def test_the_cpu_image_has_what_products_of_few_rows_are_compiled_with() -> None:
    (system,) = steps_with("Dockerfile.cpu", "apt-get install")
    assert " g++ " in system, "without it bfloat16 checkpoints become float32, and decoding is several times slower"


def test_the_cuda_image_has_what_triton_compiles_with_and_is_refused_on_arm64() -> None:
    (system,) = steps_with("Dockerfile.cuda", "apt-get install")
    assert " gcc " in system and " libc6-dev" in system, "`dflash-server check` fails without them"
    assert "python:3.11-" in read("docker/Dockerfile.cuda"), "this base has Python.h, which Debian's python3 has not"
    refusal = re.findall(r"if \[ \"\$\{TARGETARCH\}\".*?; fi", system)[0]
    for arch, code in (("amd64", 0), ("arm64", 1)):
        done = subprocess.run(["sh", "-c", refusal], env={"TARGETARCH": arch}, capture_output=True, text=True)
        assert done.returncode == code and ("amd64" in done.stderr) == bool(code)


# --- what runs in the images ------------------------------------------------------------------------------------------


def health_command(name: str) -> list[str]:
    command = json.loads(dict(instructions(name))["HEALTHCHECK"].partition(" CMD ")[2])
    assert command[:2] == ["python3", "-c"]
    return [sys.executable, *command[1:]]


@pytest.fixture
def answering() -> Iterator[Callable[[int], int]]:
    """Answers every GET with the status last asked for, on the port that is returned."""
    status, asked = [200], []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()

        def answer(code: int) -> int:
            status[0] = code
            return server.server_port

        yield answer
        server.shutdown()
        thread.join()
    assert set(asked) == {"/ready"}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_health_check_follows_ready_whatever_proxy_is_set(name: str, answering: Callable[[int], int]) -> None:
    proxy = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    for status, healthy in ((200, True), (503, False)):
        environment = os.environ | proxy | {"DFLASH_PORT": str(answering(status))}
        done = subprocess.run(health_command(name), env=environment, capture_output=True)
        assert (done.returncode == 0) is healthy


@pytest.fixture
def entrypoint(tmp_path: Path) -> list[str]:
    """The NPU image's entrypoint with CANN and the server as small scripts."""
    toolkit = tmp_path / "Ascend" / "ascend-toolkit"
    toolkit.mkdir(parents=True)
    (toolkit / "set_env.sh").write_text('export ASCEND_OPP_PATH="opp:$#"\nfalse\n')
    server = tmp_path / "dflash-server"
    server.write_text('#!/bin/bash\necho "$$" "$ASCEND_OPP_PATH" "$LD_LIBRARY_PATH"\nprintf "<%s>" "$@"\n')
    server.chmod(0o755)
    script = tmp_path / "entrypoint.sh"
    script.write_text(read("docker/entrypoint-npu.sh").replace("/usr/local/Ascend", f"{tmp_path}/Ascend"))
    return ["/usr/bin/env", f"PATH={tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH=/base", "bash", str(script)]


def test_the_entrypoint_sets_cann_up_and_becomes_the_server(entrypoint: list[str], tmp_path: Path) -> None:
    with subprocess.Popen([*entrypoint, "serve", "/models/a b"], stdout=subprocess.PIPE, text=True) as process:
        first, arguments = process.communicate()[0].splitlines()
    pid, opp, libraries = first.split()
    assert int(pid) == process.pid, "a signal would not reach the server"
    assert opp == "opp:0", "set_env.sh saw the server's arguments"
    assert libraries.split(":")[0] == f"{tmp_path}/Ascend/driver/lib64" and libraries.split(":")[-1] == "/base"
    assert arguments == "<serve></models/a b>"


def test_the_entrypoint_says_where_cann_is_missing(entrypoint: list[str], tmp_path: Path) -> None:
    (tmp_path / "Ascend" / "ascend-toolkit" / "set_env.sh").unlink()
    done = subprocess.run([*entrypoint, "serve"], capture_output=True, text=True)
    assert done.returncode == 1 and "set_env.sh cannot be read" in done.stderr


# --- the lock files ---------------------------------------------------------------------------------------------------


def locked(text: str) -> dict[str, str]:
    """Package -> version; every entry must be pinned and have hashes."""
    entries = re.sub(r" \\\n", "", re.sub(r"^#.*\n", "", text)).splitlines()
    versions = {}
    for entry in entries:
        match = re.fullmatch(r"([a-z0-9.-]+)==(\S+)(?: +--hash=sha256:[0-9a-f]{64})+", entry)
        assert match, f"not a pin with hashes: {entry}"
        versions[match.group(1)] = match.group(2)
    return versions


def torch_lock(kind: str, arch: str) -> str:
    return f"torch-cuda-{arch}" if kind == "cuda" else f"torch-{arch}"


LOCKS = {
    (kind, arch): locked(read(f"docker/requirements-{kind}-{arch}.txt"))
    | locked(read(f"docker/{torch_lock(kind, arch)}.txt"))
    for kind, arch in [*((kind, arch) for kind in ("npu", "cpu") for arch in ARCHITECTURES), ("cuda", "amd64")]
}


def unmet(requirements: list[str], versions: dict[str, str]) -> list[str]:
    def met(wanted: Requirement) -> bool:
        name = wanted.name.lower().replace("_", "-")
        return name in versions and wanted.specifier.contains(versions[name])

    return [text for text in requirements if not met(Requirement(text))]


def test_the_lock_files_satisfy_the_project() -> None:
    extra = PROJECT["optional-dependencies"]["npu"]
    for (kind, _), versions in LOCKS.items():
        assert unmet(PROJECT["dependencies"] + (extra if kind == "npu" else []), versions) == []
    assert unmet(["torch==2.11.0", "flask"], LOCKS["npu", "arm64"]) == ["torch==2.11.0", "flask"]


def test_images_have_the_same_versions_and_a_cpu_torch_but_for_cudas() -> None:
    assert LOCKS["npu", "amd64"]["torch"] == "2.10.0+cpu", "PyPI's torch for x86 is a CUDA build"
    plain = {key: {name: Version(v).public for name, v in versions.items()} for key, versions in LOCKS.items()}
    assert plain["npu", "amd64"] == plain["npu", "arm64"]
    cuda = plain["cuda", "amd64"]
    assert (cuda["torch"], cuda["triton"]) == ("2.11.0", "3.6.0"), "the report was written for these two"
    for arch in ARCHITECTURES:
        assert plain["npu", arch] == plain["cpu", arch] | {"torch-npu": "2.10.0.post4"}
    for name, version in (("torch", "2.10.0"), ("torch_npu", "2.10.0.post4"), ("CANN", "9.1.0")):
        assert any(row[0] == name and row[1].startswith(version) for row in table(GUIDE, "part")), name


def test_an_entry_without_a_hash_is_seen() -> None:
    text = read("docker/requirements-npu-arm64.txt")
    for planted in ("left-pad==1.0\n", "left-pad>=1.0 --hash=sha256:" + "0" * 64 + "\n"):
        with pytest.raises(AssertionError, match="left-pad"):
            locked(text + planted)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_the_guide_and_the_log_mean_the_same_by_an_error_code() -> None:
    rows = {code: row[1] for row in table(GUIDE, "error") for code in re.findall(r"\b\d{6}\b", row[0])}
    assert {"561002", "507015", "507035", "507011", "507046", "107030"} <= rows.keys()
    for code, meaning in rows.items():
        words = re.split(r"[:;,.(]", MEANINGS[int(code)])[0].strip()
        assert words in meaning, f"{code}: {words}"


def test_no_page_says_more_than_was_checked() -> None:
    wording = "checked against torch_npu's schemas, meta kernels and host checks on CPU; not run on an Ascend device"
    assert wording in " ".join(GUIDE.split())
    assert "## Tasks and launches of a step" in GUIDE
