"""Ray's own commands, as docs/ray.md has them: `ray start`, `serve run`, `serve deploy` and `serve status`."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import yaml

from tests import ROOT
from tests.ray.cluster import ENVIRONMENT, PATIENCE, PYTHON, SETTINGS, engines, skip_without_ray, until
from tools.bench.own_server import free_port


class Head:
    """Cluster of this machine without Serve, which `ray start` has begun."""

    def __init__(self, ports: list[int], log: Path) -> None:
        self.ports, self.log = ports, log
        self.url = f"http://127.0.0.1:{ports[2]}"
        addresses = {"RAY_ADDRESS": f"127.0.0.1:{ports[0]}", "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{ports[1]}"}
        self.environment = os.environ | ENVIRONMENT | addresses | {"PYTHONPATH": str(ROOT)}

    def begin(self, *command: str) -> "subprocess.Popen[bytes]":
        """Begin a command of Ray's. What it says goes into `log`."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [PYTHON.parent / command[0], *command[1:]], stdout=log, stderr=subprocess.STDOUT, env=self.environment
            )

    def serve(self, *command: str) -> str:
        """Return what a command of Serve's says. Raises CalledProcessError if it fails."""
        program = PYTHON.parent / "serve"
        return subprocess.check_output([program, *command], env=self.environment, text=True, timeout=PATIENCE)

    def application(self, name: str) -> dict[str, Any]:
        """Return what `serve status` says of an application, and nothing before Serve is there."""
        with contextlib.suppress(subprocess.CalledProcessError):
            found = yaml.safe_load(self.serve("status"))
            return dict((found or {}).get("applications", {}).get(name, {}))
        return {}

    def replicas(self, name: str) -> dict[str, int]:
        deployments = self.application(name).get("deployments", {})
        return dict(deployments.get("dflash", {}).get("replica_states", {}))

    def text(self) -> str:
        body = {"model": "demo", "prompt": "Count from one to nine.", "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)
        return str(answer.json()["choices"][0]["text"])


def end(program: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    program.send_signal(number)
    try:
        program.wait(PATIENCE)
    finally:
        program.kill()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    skip_without_ray()
    ports = [free_port() for _ in range(3)]
    head = Head(ports, tmp_path_factory.mktemp("ray") / "log")
    with TemporaryDirectory() as folder:  # a socket's path has 107 bytes at most
        program = head.begin(
            "ray", "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000",
            f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--temp-dir={folder}",
        )  # fmt: skip
        try:
            until(lambda: "Ray runtime started" in head.log.read_text(encoding="utf-8"), "Ray did not start")
            yield head
            head.serve("shutdown", "--yes")
        finally:
            end(program, signal.SIGTERM)


def test_serve_run_starts_replicas_and_its_end_stops_them(head: Head):
    head.serve("start", "--http-host=127.0.0.1", f"--http-port={head.ports[2]}")
    arguments = [f"{name}={value}" for name, value in SETTINGS.items() if name != "device"]
    running = head.begin("serve", "run", "app.ray_serve:application", *arguments)
    try:
        until(lambda: head.replicas("default") == {"RUNNING": 2}, "two replicas")
        assert head.text()
        assert len(set(engines().values())) == 2
    finally:
        end(running, signal.SIGINT)
    until(lambda: not engines(), "the engines outlived `serve run`")


def test_serve_deploy_takes_the_file_of_the_manual_its_changes_and_no_mistake(head: Head, tmp_path: Path):
    file = yaml.safe_load((ROOT / "docker" / "ray.yaml").read_text(encoding="utf-8"))
    file["http_options"] = {"host": "127.0.0.1", "port": head.ports[2]}
    (app,) = file["applications"]
    app["args"] = {name: value for name, value in SETTINGS.items() if name != "num_replicas"}
    (deployment,) = app["deployments"]

    def deploy() -> None:
        (tmp_path / "ray.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
        head.serve("deploy", str(tmp_path / "ray.yaml"))

    deployment["num_replicas"] = 2
    deploy()
    until(lambda: head.replicas("dflash") == {"RUNNING": 2}, "two replicas")
    before, text = set(engines()), head.text()
    deployment["num_replicas"] = 1
    deploy()
    until(lambda: head.replicas("dflash") == {"RUNNING": 1} and len(engines()) == 1, "one replica")
    assert set(engines()) < before, "a change of the number alone replaced a replica"
    app["args"]["devise"] = "cpu"
    deploy()
    until(lambda: head.application("dflash")["status"] == "DEPLOY_FAILED", "the mistake was taken")
    assert "unknown key devise (did you mean device?)" in head.application("dflash")["message"]
    assert set(engines()) < before and head.text() == text, "the mistake stopped what served"
