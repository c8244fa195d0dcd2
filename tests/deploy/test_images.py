"""The parts of tests/images that need no Docker engine, and the page that it writes."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.images.__main__ import unmet
from tests.images.build import BASES, copied_tree, torch_lock
from tests.images.report import BEGIN, END, Row, into_page, table

PAGE = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")


def test_a_local_wheel_is_locked_by_its_own_hash(tmp_path: Path) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    assert torch_lock(wheel) == ("2.13.0+cpu", f"torch==2.13.0+cpu \\\n    --hash=sha256:{digest}\n")
    with pytest.raises(RuntimeError, match="no wheel of torch"):
        torch_lock(tmp_path / "numpy-2.0.whl")


def test_a_copy_of_the_tree_has_what_a_build_takes_and_nothing_else(tmp_path: Path) -> None:
    copy = copied_tree(tmp_path / "context")
    assert {path.name for path in copy.iterdir()} == {"app", "docker", "tools", "pyproject.toml", ".dockerignore"}
    assert (copy / "docker" / "torch-amd64.txt").is_file() and not list(copy.rglob("__pycache__"))


def test_the_base_made_here_has_the_names_that_the_dockerfiles_ask_for() -> None:
    asked = [re.findall(rf"^ARG {name}=(\S+)$", read, re.MULTILINE)[0] for name, read in ARGUMENTS.items()]
    assert asked == list(BASES)


ARGUMENTS = {
    "PYTHON_IMAGE": (ROOT / "docker" / "Dockerfile.cpu").read_text(encoding="utf-8"),
    "TINI_IMAGE": (ROOT / "docker" / "Dockerfile.npu").read_text(encoding="utf-8"),
}


def test_a_page_keeps_all_but_the_result(tmp_path: Path) -> None:
    page = tmp_path / "images.md"
    page.write_text(f"head\n{BEGIN}\nold\n{END}\ntail\n")
    rows = [Row("cpu", "build", "1.31 GB", 70.4), Row("host", "afterwards", "as before")]
    into_page(page, "make test-images", rows)
    into_page(page, "make test-images", rows)
    text = page.read_text()
    assert text.startswith("head\n") and text.endswith(f"{END}\ntail\n") and "old" not in text
    assert text.count("| cpu | build | 1.31 GB | 70 |\n| host | afterwards | as before |  |\n") == 1
    assert text.count("$ make test-images\n") == 1


def test_what_is_missing_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(unmet(None))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "docker.io" in str(unmet(None)) and "slirp4netns" in str(unmet(None))


def test_the_page_shows_a_run_in_which_everything_held() -> None:
    result = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert "make test-images" in result and table([])[0] in result
    for subject in ("docker stop", "kill -9 of the engine", "POST /v1/chat/completions", "GET /metrics", "build"):
        assert subject in result, subject
    assert "FAILED" not in result and "| host | afterwards | as before" in result
