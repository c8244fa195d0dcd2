"""`make serve` installs by uv as pip would: with the user's mirrors, or by pip where a setting has no counterpart."""

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tools import install

LISTED = r"""
:env:.extra-index-url='https://download.pytorch.org/whl/cpu'
:env:.disable-pip-version-check='1'
global.cert='/etc/ca.pem'
global.extra-index-url='https://other.example/simple'
global.find-links='\n/opt/wheels\n/srv/wheels'
global.index-url='https://user:word@mirror.example/simple'
install.trusted-host='mirror.example other.example'
download.no-deps='true'
""".strip()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs, and returns the last command with its environment."""

    def run(listed: str, *, uv: bool = True) -> tuple[list[str], dict[str, str]]:
        calls: list[tuple[Sequence[str], dict[str, str]]] = []

        def fake(command: Sequence[str], env: dict[str, str] | None = None, **_: Any) -> Any:
            calls.append((command, env or {}))
            if not uv and install._UV in command:
                raise subprocess.CalledProcessError(1, command)
            return SimpleNamespace(stdout=listed, returncode=3)

        monkeypatch.setattr(install.subprocess, "run", fake)
        assert install.main(["torch", "--editable", "."]) == 3, "the installer's status"
        command, environment = calls[-1]
        assert command[0] == sys.executable
        return list(command[1:]), environment

    return run


def test_uv_gets_pips_mirrors_certificates_and_wheels_and_takes_the_best_version_of_all_indexes(run, monkeypatch):
    for name in ("UV_INDEX", "UV_FIND_LINKS", "UV_INDEX_STRATEGY", "UV_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    command, environment = run(LISTED)
    assert command[:3] == ["-m", "uv", "pip"] and command[-3:] == ["torch", "--editable", "."]
    assert environment["UV_INDEX"] == "https://download.pytorch.org/whl/cpu", "a variable wins over a file"
    assert environment["UV_DEFAULT_INDEX"] == "https://user:word@mirror.example/simple"
    assert environment["UV_FIND_LINKS"] == "/opt/wheels,/srv/wheels"
    assert environment["UV_INSECURE_HOST"] == "mirror.example other.example"
    assert environment["SSL_CERT_FILE"] == "/etc/ca.pem" and "PATH" in environment
    assert environment["UV_INDEX_STRATEGY"] == "unsafe-best-match" and "UV_CONSTRAINT" not in environment


def test_the_users_own_setting_of_uv_wins(run, monkeypatch):
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert run(LISTED)[1]["UV_DEFAULT_INDEX"] == "https://own.example/simple"


@pytest.mark.parametrize(
    ("listed", "uv", "said"),
    [
        ("global.proxy='http://p:1'\nglobal.no_index='true'", True, "pip's no-index, proxy"),
        ("", False, "cannot be installed"),
    ],
)
def test_pip_installs_where_uv_could_not_do_the_same_and_says_why(run, capsys, listed, uv, said):
    assert run(listed, uv=uv)[0] == ["-m", "pip", "install", "--no-compile", "torch", "--editable", "."]
    assert said in capsys.readouterr().err
