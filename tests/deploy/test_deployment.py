"""docker/ and docs/ascend.md are well formed and true of this code. No Docker engine, no cluster, no network.

Schemas hold what keys a manifest may have. Tests hold what files must agree on, and what is in the images.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import promql_parser
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from app.api.server import ROUTERS
from app.config.error import ConfigError
from app.config.flags import parse_flags, serve_parser
from app.config.pairs import PAIRS, default_model
from app.config.settings import Config, env_name
from app.config.sources import SETTINGS, load_config
from app.engine.npu.error_codes import MEANINGS
from app.messages import FinishReason
from app.metrics import TABLE
from tests import ROOT
from tests.deploy.schemas import schema_errors
from tests.images import recipe

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
MANIFESTS = {name: read(f"docker/{name}") for name in ("k8s.yaml", "k8s-cuda.yaml", "k8s-cpu.yaml")}
README_SECTION = read("README.md").partition("\n## Docker")[2].partition("\n## ")[0]


# --- form -------------------------------------------------------------------------------------------------------------


def lint(dockerfile: str) -> list[str]:
    done = subprocess.run([BIN / "hadolint", "--format", "json", "-"], input=dockerfile, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return [f"{finding['line']}: {finding['code']} {finding['message']}" for finding in json.loads(done.stdout)]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_minds_nothing_but_a_planted_mistake(name: str) -> None:
    assert lint(read(f"docker/{name}")) == []
    assert any("DL3002" in finding for finding in lint(f"{read(f'docker/{name}')}\nUSER root\n"))


def test_compose_fits_its_schema(tmp_path: Path) -> None:
    assert schema_errors(COMPOSE, "compose-spec", tmp_path) == ""
    planted = COMPOSE.replace("stop_grace_period:", "stop_grace_time:", 1)
    assert "stop_grace_time" in schema_errors(planted, "compose-spec", tmp_path)


def validate_manifest(text: str) -> None:
    for document in yaml.safe_load_all(text):
        for version in ("1.28", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_kubernetes_manifests_fit_their_schemas(name: str) -> None:
    validate_manifest(MANIFESTS[name])
    for right, wrong in (("replicas: 1", "replicas: one"), ("readinessProbe:", "readynessProbe:")):
        with pytest.raises(kubernetes_validate.ValidationError):
            validate_manifest(MANIFESTS[name].replace(right, wrong))


def with_key(text: str) -> str:
    """Return a file as it is with a key."""
    return text.replace("#key ", "")


def test_with_a_key_prometheus_has_it_and_kubernetes_scrapers_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert schema_errors(with_key(COMPOSE), "compose-spec", tmp_path) == ""
    compose = yaml.safe_load(with_key(COMPOSE))
    servers = [name for name, service in compose["services"].items() if "DFLASH_MODEL" in str(service)]
    assert len(servers) >= 12
    for name in servers:
        assert "DFLASH_API_KEY" in compose["services"][name]["environment"], name
    (secret,) = compose["services"]["prometheus"]["secrets"]
    assert compose["secrets"][secret] == {"environment": "DFLASH_API_KEY"}
    jobs = yaml.safe_load(with_key(read("docker/prometheus.yml")))["scrape_configs"]
    credentials = {job["job_name"]: job.get("authorization") for job in jobs}
    assert credentials == {"dflash": {"credentials_file": f"/run/secrets/{secret}"}, "dflash-ready": None}
    assert "authorization" not in str(JOBS) and "API_KEY" not in str(yaml.safe_load(COMPOSE))
    for manifest in MANIFESTS.values():
        validate_manifest(with_key(manifest))
        (container,) = pod_of(with_key(manifest))["containers"]
        with monkeypatch.context() as environment:
            for variable in container["env"]:
                environment.setenv(variable["name"], variable.get("value", "a-key-of-a-secret"))
            config = load_config()
        assert config.api_keys() == ["a-key-of-a-secret"] and config.metrics_without_key


JOBS = yaml.safe_load(read("docker/prometheus.yml"))["scrape_configs"]
RULES = [rule for group in yaml.safe_load(read("docker/alerts.yml"))["groups"] for rule in group["rules"]]


def test_every_alert_names_its_replica_and_is_known_to_the_guide() -> None:
    for rule in RULES:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert re.findall(r"{{ \$labels\.(\w+)", rule["annotations"]["summary"]) == ["instance"], rule["alert"]
    alerts = {rule["alert"] for rule in RULES}
    assert {"DflashDown", "DflashNotReady", "DflashNoProgress"} | set(re.findall(r"\bDflash[A-Z]\w+", GUIDE)) <= alerts


# --- PromQL and metrics -----------------------------------------------------------------------------------------------


def metric_labels() -> dict[str, set[str]]:
    """Every series that Prometheus can have from us -> its labels."""
    labels: dict[str, set[str]] = {"up": set(), "probe_success": set()}
    for metric in TABLE:
        own = set(metric.labels)
        for ending in {"gauge": [""], "counter": ["_total"]}.get(metric.kind, ["_bucket", "_sum", "_count"]):
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


@pytest.mark.parametrize("query", [rule["expr"] for rule in RULES] + DASHBOARD_QUERIES)
def test_every_query_parses_and_asks_for_metrics_labels_and_values_that_exist(query: str) -> None:
    assert query_errors(query) == wrong_values(query) == []


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
        "job": {job["job_name"] for job in JOBS},
    }
    matchers = re.findall(r'(\w+)="([^"]*)"', query)
    return [f"{label}={value}" for label, value in matchers if value not in values[label]]


# --- flags, variables, paths, files -----------------------------------------------------------------------------------

FOREIGN_FLAGS = {
    "docker": "file tag build-arg platform rm name publish shm-size stop-timeout device volume group-add user env "
    "cap-drop cpuset-cpus runtime entrypoint detach profile from chmod interval timeout start-period retries mount "
    "init help",
    "pip": "no-cache-dir no-deps no-build-isolation no-index only-binary require-hashes requirement index-url",
    "other tools": "out yes no-install-recommends gid uid create-home non-unique local-dir local_dir model format "
    "dataset real-pair sections seconds target from-literal",
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
    files = {name: read(f"docker/{name}") for name in (*DOCKERFILES, "compose.yaml", "entrypoint-npu.sh")} | MANIFESTS
    return files | {"docs/ascend.md": GUIDE.replace(theirs, ""), "README.md, Docker": README_SECTION}


def pod_of(manifest: str) -> dict[str, Any]:
    return dict(yaml.safe_load(manifest.partition("---")[0])["spec"]["template"]["spec"])


def test_the_arguments_of_the_manifests_are_taken_by_the_command_line() -> None:
    for manifest in MANIFESTS.values():
        arguments = pod_of(manifest)["containers"][0]["args"]
        assert arguments[0] == "serve"
        load_config(parse_flags(arguments[1:]))
        with pytest.raises(ConfigError):
            parse_flags([*arguments[1:], "--draft-modell", "x"])
    for command in re.findall(r"dflash-server:npu serve (.*)", GUIDE):
        load_config(parse_flags(command.split()))


def test_commands_that_the_guide_names_exist() -> None:
    usage = subprocess.run([sys.executable, "-m", "app", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    for command in set(re.findall(r"dflash-server(?::npu|:cpu)? ([a-z][a-z-]*)", GUIDE + README_SECTION)):
        assert re.search(rf"^  {command}\b", usage, re.MULTILINE) or command == "python", command


def variable_errors(text: str) -> list[str]:
    """DFLASH_* variables that are no setting and that no code reads."""
    known = {env_name(field) for field in SETTINGS}
    for source in (ROOT / "app").rglob("*.py"):
        known |= set(re.findall(r"""environ(?:\.get)?[\[(]["'](DFLASH_\w+)""", source.read_text(encoding="utf-8")))
    return [name for name in re.findall(r"\bDFLASH_[A-Z]\w*", text) if name not in known]


@pytest.mark.parametrize("name", texts_with_flags())
def test_every_flag_and_variable_exists(name: str) -> None:
    text = texts_with_flags()[name]
    planted = f"{text} serve --max-num-seq 8 --shutdown_timeouts=3"
    assert flag_errors(text) == [] and flag_errors(planted) == ["--max-num-seq", "--shutdown_timeouts"]
    assert variable_errors(text) == []
    assert variable_errors(f"{text} DFLASH_MAX_SEQS=3") == ["DFLASH_MAX_SEQS"]


def instructions(name: str) -> list[tuple[str, str]]:
    return recipe.instructions(DOCKER / name)


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
    assert config.engine.device == name.removeprefix("Dockerfile.")


def test_the_build_arguments_in_the_guide_are_the_dockerfiles() -> None:
    given = (text.partition("=") for i, text in instructions("Dockerfile.npu") if i == "ARG" and text != "TARGETARCH")
    arguments = {name: default for name, _, default in given}
    documented = {
        name: row[1].strip("`") for row in table(GUIDE, "build argument") for name in re.findall(r"`(\w+)`", row[0])
    }
    assert documented == arguments
    assert arguments["CANN_VERSION"] == "9.1.0"


def commands_of_docker() -> list[list[str]]:
    blocks = "\n".join(re.findall(r"```console\n(.*?)```", GUIDE, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line[2:], comments=True) for line in blocks.splitlines() if line.startswith("$ docker ")]


def test_the_guides_commands_come_in_order_and_are_the_recipes_and_composes() -> None:
    commands, order = commands_of_docker(), ("pull", "build", "run", "compose")
    kinds = [words[1] for words in commands]
    assert kinds == sorted(kinds, key=order.index) and set(kinds) == set(order)
    recipes = instructions("Dockerfile.npu")
    default = dict(text.split("=", 1) for kind, text in recipes if kind == "ARG" and "=" in text)
    base = next(text for kind, text in recipes if kind == "FROM" and "CANN" in text).replace("${", "{")
    pulled = {words[2] for words in commands if words[1] == "pull"}
    assert pulled == {base.format(**default | {"CHIP": chip}) for chip in ("910b", "a3")}
    for words in commands:
        options = {name: [value for flag, value in pairwise(words) if flag == name] for name in words}
        assert all((ROOT / value).is_file() for value in options.get("--file", []))
        assert all(value.partition("=")[0] in default for value in options.get("--build-arg", []))
        if words[1] == "run" and "--mount" in words:
            mounted = {part for value in options["--mount"] for part in value.split(",") if part.startswith("target=")}
            service, device = services()["server-0"], words.index("dflash-server:npu")
            assert [value for value in options["--device"] if value in words[:device]] == service["devices"]
            assert mounted == {f"target={volume['target']}" for volume in service["volumes"]} - {"target=/home/dflash"}
            assert all(value.endswith(",readonly") for value in options["--mount"])


PATHS = {route.path for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]


def probed_paths() -> Iterator[tuple[str, str]]:
    """(where, path) of everything that is asked over HTTP."""
    for name in DOCKERFILES:
        yield from ((name, path) for path in re.findall(r"'GET', '([^']+)'", read(f"docker/{name}")))
    yield from (("haproxy.cfg", path) for path in re.findall(r"meth GET uri (\S+)", read("docker/haproxy.cfg")))
    for name, manifest in MANIFESTS.items():
        yield from ((name, path) for path in re.findall(r"\bpath: (/[\w/]*)", manifest))
        yield from ((name, path) for path in re.findall(r"prometheus.io/path: (\S+)", manifest))
    for job in JOBS:
        labels = job.get("relabel_configs", [])
        targets = [label["replacement"] for label in labels if label["target_label"] == "__param_target"]
        yield job["job_name"], targets[0].removeprefix("http://$1") if targets else job.get("metrics_path", "/metrics")
    for path in re.findall(r"`(/[a-z]+)`", GUIDE):
        if path != "/models":  # the folder
            yield "docs/ascend.md", path


def test_every_path_that_is_asked_is_served() -> None:
    asked = list(probed_paths())
    assert {where for where, _ in asked} >= {*DOCKERFILES, *MANIFESTS, "haproxy.cfg", "dflash", "dflash-ready"}
    for where, path in asked:
        assert path in PATHS, f"{where}: {path}"
    assert "/readyz" not in PATHS


def test_no_weights_but_those_of_pairs_go_into_the_package() -> None:
    weights = {str(path.relative_to(ROOT)) for path in (ROOT / "app").rglob("*.safetensors")}
    folders = [str(pair.draft.relative_to(ROOT)) for pair in PAIRS.values()] + ["app/demo/checkpoint/target"]
    assert sorted({str(Path(path).parent) for path in weights}) == sorted(folders)


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


def test_replicas_are_known_to_the_proxy_and_to_prometheus_and_models_over_cards_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = services()
    servers = [name for name in known if name.startswith("server-")]
    proxied = re.findall(r"^ +server (\S+) (\S+):8000$", read("docker/haproxy.cfg"), re.MULTILINE)
    assert proxied == [(name, name) for name in servers]
    assert all(found["names"] == servers for job in JOBS for found in job["dns_sd_configs"])
    for name, cards in (*((server, 1) for server in servers), ("two-cards", 2), ("four-cards", 4)):
        first = int(name.removeprefix("server-")) if name in servers else 0
        devices = [device for device in known[name]["devices"] if re.fullmatch(r"/dev/davinci\d+", device)]
        assert devices == [f"/dev/davinci{first + card}" for card in range(cards)]
        for variable, value in known[name]["environment"].items():
            monkeypatch.setenv(variable, value)
        assert load_config().engine.tensor_parallel_size == cards


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_compose_runs_without_an_npu_in_the_place_of_the_first_server(kind: str) -> None:
    service = services()[kind]
    assert service["image"] == f"dflash-server:{kind}" and (DOCKER / f"Dockerfile.{kind}").exists()
    assert service["profiles"] == [kind] and service["networks"]["default"]["aliases"] == ["server-0"]
    assert [mount["target"] for mount in service["volumes"]] == ["/models", "/home/dflash"]
    assert not re.search(r"davinci|Ascend|npu|dcmi", json.dumps(service))
    assert ("nvidia" in json.dumps(service)) is (kind == "cuda")


def test_files_that_compose_mounts_exist() -> None:
    mounts = [mount for service in services().values() for mount in service.get("volumes", [])]
    mounted = [mount.split(":")[0] for mount in mounts if isinstance(mount, str) and mount.startswith(".")]
    assert mounted and all((DOCKER / path).exists() for path in mounted)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_is_given_the_time_that_the_server_takes_to_end_and_to_load(name: str) -> None:
    pod = pod_of(MANIFESTS[name])
    (container,) = pod["containers"]
    drain = load_config(parse_flags(container["args"][1:])).shutdown_timeout
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 1800
    assert int(re.findall(r"--stop-timeout (\d+)", GUIDE)[0]) >= Config.model_fields["shutdown_timeout"].default + 10


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_pod_on_another_device_differs_by_its_device_and_model_only(kind: str) -> None:
    pod, npus = pod_of(MANIFESTS[f"k8s-{kind}.yaml"]), pod_of(MANIFEST)
    (container,), (other,) = pod["containers"], npus["containers"]
    assert container["image"] == other["image"].replace(":npu", f":{kind}")
    assert not re.search(r"(?i)davinci|ascend|huawei|NPU", MANIFESTS[f"k8s-{kind}.yaml"])
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (1 if kind == "cuda" else None)
    requested, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert kind == "cuda" or requested == limits, "threads beyond the quota would throttle all"
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "securityContext"):
        assert container[name] == other[name], name
    services = [manifest.partition("---")[2] for manifest in MANIFESTS.values()]
    assert len(set(services)) == 1


def test_variables_that_compose_reads_are_explained_at_its_top() -> None:
    head = COMPOSE.partition("\nname:")[0]
    for variable in set(re.findall(r"\$\{(\w+)", COMPOSE)):
        assert variable in head, variable


def test_the_settings_of_compose_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in services()["server-0"]["environment"].items():
        monkeypatch.setenv(variable, value)
    config = load_config()
    assert (config.model, config.draft_model) == (default_model(), None)
    seconds = int(services()["server-0"]["stop_grace_period"].removesuffix("s"))
    assert seconds >= config.drain_delay + config.shutdown_timeout + 10
    interval, fall = re.findall(r"check inter (\d+)s fall (\d+) ", read("docker/haproxy.cfg"))[0]
    assert config.drain_delay > int(interval) * int(fall), "HAProxy goes elsewhere before requests are refused"


def test_a_pod_gets_as_many_npus_as_the_model_is_shared_by() -> None:
    """At the places that the manifest marks, and no others."""
    for cards in (1, 2, 4):
        text, places = re.subn(r'1("?) (?=# cards)', rf"{cards}\1 ", MANIFEST)
        container = yaml.safe_load(text.partition("---")[0])["spec"]["template"]["spec"]["containers"][0]
        assert places == 3 and load_config(parse_flags(container["args"][1:])).engine.tensor_parallel_size == cards
        assert {container["resources"][kind]["huawei.com/Ascend910"] for kind in ("requests", "limits")} == {cards}


# --- what a build reads and leaves behind -----------------------------------------------------------------------------


RUNS = ("apt-get install", "/torch.txt", "/smollm2.txt", "/requirements.txt", "/src", "useradd")
"""Words of the steps that make layers, from what changes least to what changes most."""
WITH_SMOLLM2 = ("Dockerfile.cpu",)
"""Images that hold the target of smollm2. Devices are for larger models, which their users mount."""
COMPILERS = {"Dockerfile.cpu": " g++ ", "Dockerfile.cuda": " gcc libc6-dev"}
"""What the CPU's operators and Triton's launchers are compiled with when a container runs."""


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_changes_often_lies_above_what_is_large_and_no_password_stays(name: str) -> None:
    steps = instructions(name)
    last = [*reversed([*enumerate(steps)])]
    words = [word for word in RUNS if word != "/smollm2.txt" or name in WITH_SMOLLM2]
    runs = [next(i for i, (kind, text) in last if kind == "RUN" and word in text) for word in words]
    assert runs == sorted(runs) and runs[-2] < steps.index(("ARG", "USER_ID=1000"))
    assert runs[0] < steps.index(("ARG", "PIP_INDEX_URL")), "a default would be preferred to the secret's index"
    for run in runs[1:-2]:
        assert "--mount=type=secret,id=pip,target=/etc/pip.conf " in steps[run][1]
    assert COMPILERS.get(name, "") in steps[runs[0]][1]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what .dockerignore lets into a build: `!` takes a path in, other lines leave one out."""
    folder = tmp_path_factory.mktemp("image")
    lines = read(".dockerignore").splitlines()
    left_out = {line for line in lines if not line.startswith(("!", "*"))}

    def ignore(parent: str, names: list[str]) -> set[str]:
        above = Path(parent).relative_to(ROOT)
        return {name for name in names if str(above / name) in left_out or name == "__pycache__"}

    for line in lines:
        for path in ROOT.glob(line.removeprefix("!")) if line.startswith("!") else ():
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree(path, target, ignore=ignore) if path.is_dir() else shutil.copy2(path, target))
    return folder


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_finds_what_it_is_made_of_and_runs_a_report(name: str, image: Path, tmp_path: Path) -> None:
    """The server is in the place of packages, and the instruments are where PYTHONPATH says."""
    for source, target in re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+) (\S+)$", read(f"docker/{name}"), re.MULTILINE):
        for arch in ARCHITECTURES:
            assert (image / source.replace("${TARGETARCH}", arch)).exists(), source
        if source == "tools":
            assert Path(target).parent == Path(image_variables(name)["PYTHONPATH"])
            shutil.copytree(image / source, tmp_path / "share" / source)
    shutil.copytree(image / "app", tmp_path / "packages" / "app", ignore=shutil.ignore_patterns("*.safetensors"))
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("share", "packages"))
    command = [sys.executable, "-P", "-m", "tools.report", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: --device cpu: a report is on npu or cuda")
    for room in ("report", "lab"):  # a section imports its modules when it is made
        carried = {path.name for path in (tmp_path / "share" / "tools" / room).glob("*.py")}
        assert carried == {path.name for path in (ROOT / "tools" / room).glob("*.py")}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_build_without_buildkit_says_what_is_missing(name: str) -> None:
    guard = re.findall(
        r': "\$\{TARGETARCH:\?[^"]*"', next(text for instruction, text in instructions(name) if instruction == "RUN")
    )[0]
    done = subprocess.run(["sh", "-c", guard], env={"TARGETARCH": ""}, capture_output=True, text=True)
    assert done.returncode != 0 and "BuildKit" in done.stderr
    assert subprocess.run(["sh", "-c", guard], env={"TARGETARCH": "arm64"}).returncode == 0


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
    program = "import os; print(os.environ['ASCEND_OPP_PATH'], os.environ.get('LD_PRELOAD'))"
    said = subprocess.check_output([*entrypoint, "python3", "-c", program])
    assert said == b"opp:0 None\n", (
        "a report has the same environment, and an allocator that cannot be loaded is left out"
    )


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
    extra, tools = (PROJECT["optional-dependencies"][name] for name in ("npu", "tools"))
    for (kind, _), versions in LOCKS.items():
        assert unmet(PROJECT["dependencies"] + tools + (extra if kind == "npu" else []), versions) == []
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


def test_the_setuptools_of_the_images_builds_the_package_and_has_what_canns_python_imports() -> None:
    """Our licence needs 77, and pkg_resources went with 82. The lock replaces the one of CANN's image."""
    for versions in LOCKS.values():
        assert Version("77") <= Version(versions["setuptools"]) < Version("81")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_the_guide_and_the_log_mean_the_same_by_an_error_code() -> None:
    rows = {code: row[1] for row in table(GUIDE, "error") for code in re.findall(r"\b\d{6}\b", row[0])}
    assert {"507009", "107041", "561002", "507015", "507035", "507011", "507046", "107030"} <= rows.keys()
    for code, meaning in rows.items():
        words = re.split(r"[:;,.(]", MEANINGS[int(code)])[0].strip()
        assert words in meaning, f"{code}: {words}"
