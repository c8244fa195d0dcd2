"""Serving is one command of the Makefile, and installs nothing that only tests use."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

SERVING, TESTS = "--editable '.[tools]'", "pip install --editable '.[dev]'"

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One in which nothing was made yet."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def commands(checkout: Path, target: str) -> list[str]:
    """Return the commands that `make` would run."""
    command = ["make", "--dry-run", "--no-print-directory", target, "ARGS=--anything"]
    done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def installed(lines: list[str]) -> list[str]:
    return [what for line in lines for what in (SERVING, TESTS) if what in line]


@pytest.mark.parametrize(("target", "command"), [("serve", "dflash-server serve"), ("bench", "python -m tools.bench")])
def test_serving_is_one_command_without_what_tests_need(checkout: Path, target: str, command: str) -> None:
    lines = commands(checkout, target)
    assert installed(lines) == [SERVING]
    assert lines[-1].split() == f".venv/bin/{command} --anything".split()


@pytest.mark.parametrize("target", ["test", "test-rest", "check"])
def test_whatever_looks_at_the_code_has_both_installed_first(checkout: Path, target: str) -> None:
    assert installed(commands(checkout, target)) == [SERVING, TESTS]


def test_what_is_installed_is_installed_once(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert installed(commands(checkout, "serve")) == [] and installed(commands(checkout, "check")) == [TESTS]
    (checkout / ".venv" / ".installed-dev").touch()
    assert installed(commands(checkout, "check")) == []
    (checkout / "pyproject.toml").touch()
    assert installed(commands(checkout, "check")) == [SERVING, TESTS]
