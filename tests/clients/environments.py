"""Environments of the clients. `make .venv-clients/.installed` fills them from the files beside this one.

Clients disagree about the version of the openai package, so they share two environments. Node and
a router have their own.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.clients.programs import CLIENTS, Client

HERE = Path(__file__).parent
FOLDER = ROOT / ".venv-clients"
NODE = FOLDER / "openai2" / "bin" / "node"
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "AI_SDK_LOG_WARNINGS": "false",
}
"""Settings that keep clients from asking hosts of their own, which a test must not need."""


def are_complete() -> bool:
    return (FOLDER / ".installed").is_file() and python_of("router").exists()


def python_of(environment: str) -> Path:
    return FOLDER / environment / "bin" / "python"


def version_of(client: Client) -> str:
    """Return the version that the requirements pin."""
    if client.environment == "node":
        return str(
            json.loads((HERE / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"][client.package]
        )
    pins = (HERE / f"{client.environment}.txt").read_text(encoding="utf-8")
    (version,) = re.findall(rf"^{client.package}(?:\[\w+\])?==(\S+)$", pins, re.MULTILINE)
    return str(version)


def call(command: list[str | Path], cwd: Path | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run a client's program without the keys and addresses of this machine's user. `more` is in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1700,
        cwd=cwd,
        env=kept | QUIET | more,
    )


def run(name: str, part: str, url: str, model: str, question: str) -> dict[str, Any]:
    """Return what a client's program prints. Raises AssertionError with the end of its errors if it fails."""
    client = CLIENTS[name]
    program: list[str | Path] = [python_of(client.environment), HERE / "programs.py", name]
    if client.environment == "node":
        program = [NODE, FOLDER / "node" / "programs.mjs", name]
    done = call([*program, part, url, model, question])
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))
