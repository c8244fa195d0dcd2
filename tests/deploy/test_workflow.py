"""The workflow of GitHub Actions fits its schema, and runs what the repository has."""

import re
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.deploy.schemas import schema_errors

FILE = ROOT / ".github" / "workflows" / "ci.yml"
TEXT = FILE.read_text(encoding="utf-8")
JOBS: dict[str, Any] = yaml.safe_load(TEXT)["jobs"]


def test_it_fits_the_schema(tmp_path: Path) -> None:
    assert schema_errors(TEXT, "github-workflows", tmp_path) == ""
    planted = TEXT.replace("timeout-minutes", "timeout-hours", 1)
    assert "timeout-hours" in schema_errors(planted, "github-workflows", tmp_path)


def test_each_command_is_there() -> None:
    commands = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for command in commands for word in re.findall(r"make (?:\w+=\S+ )?(\S+)", command)):
        assert re.search(rf"^{re.escape(target)}\b", makefile, re.MULTILINE) or target == ".venv/.installed"
    assert {".ci/run", "make proof"} <= set(commands) and (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert any("tools.report" in command for command in commands)


def test_linux_on_two_processors_at_each_push_and_devices_by_hand() -> None:
    assert JOBS["test"]["strategy"]["matrix"]["os"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert JOBS["device"]["runs-on"] == ["self-hosted", "${{ inputs.label }}"]
    for name, event in (("test", "push"), ("nightly", "schedule"), ("device", "workflow_dispatch")):
        assert f"github.event_name == '{event}'" in JOBS[name]["if"]
