"""The wheel is a whole server: it checks a device and answers without `tools`, tests and a source tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from app.config.pairs import PAIRS
from tests import ROOT
from tests.fast.api.served import PATIENCE
from tests.images.build import copied_tree
from tests.server.demo import ready

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
ABSENT = ("tools", "tests", "httpx", "openai", "pytest")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel, where what it must not need cannot be imported."""
    tree, folder = copied_tree(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name!r}', name={name!r})\n")
    return folder


@pytest.fixture
def alone(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    return installed


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], env=dict(os.environ), capture_output=True, text=True)


def test_a_server_from_the_wheel_answers(alone: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "1 + 1 ="}], "temperature": 0, "max_tokens": 4}
    with ready("demo") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


def test_the_wheel_has_the_drafts_of_all_pairs_byte_by_byte(installed: Path) -> None:
    for pair in PAIRS.values():
        for file in pair.draft.iterdir():
            assert (installed / file.relative_to(ROOT)).read_bytes() == file.read_bytes(), file
    assert not list(installed.rglob("*.gguf")), "a package of its own has the target of smollm2"


def test_the_device_is_checked_from_the_wheel(alone: Path) -> None:
    done = python("-m", "app", "check", "--device", "cpu")
    assert done.returncode == 0 and "nothing failed" in done.stdout, done.stdout + done.stderr
    where = python("-c", "import app; print(app.__file__)").stdout
    assert Path(where.strip()).is_relative_to(alone)
    assert "No module named 'tools'" in python("-c", "import tools").stderr


def test_the_wheel_says_and_has_its_licence(installed: Path) -> None:
    (facts,) = installed.glob("*.dist-info")
    assert "License-Expression: Apache-2.0 AND MIT AND BSD-2-Clause" in (facts / "METADATA").read_text(encoding="utf-8")
    assert "Apache License" in (facts / "licenses" / "LICENSE").read_text(encoding="utf-8")
    assert "SmolLM2-135M-Instruct" in (facts / "licenses" / "NOTICE").read_text(encoding="utf-8")
    library = installed / "app" / "api" / "static" / "markdown-it.LICENSE.txt"
    assert (facts / "licenses" / library.relative_to(installed)).read_bytes() == library.read_bytes()
