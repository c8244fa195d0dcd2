"""The parts of tests/images that need no Docker engine, and the page that it writes."""

import re
from pathlib import Path

from tests import ROOT
from tests.images.build import BASES, copied_tree
from tests.images.report import BEGIN, END, table

PAGE = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")


def test_a_copy_of_the_tree_has_what_a_build_takes_and_nothing_else(tmp_path: Path) -> None:
    copy = copied_tree(tmp_path / "context")
    assert {path.name for path in copy.iterdir()} == {
        "LICENSE",
        "NOTICE",
        "app",
        "docker",
        "tools",
        "pyproject.toml",
        ".dockerignore",
    }
    assert (copy / "docker" / "torch-amd64.txt").is_file() and not list(copy.rglob("__pycache__"))


def test_the_base_made_here_has_the_names_that_the_dockerfiles_ask_for() -> None:
    asked = [re.findall(rf"^ARG {name}=(\S+)$", read, re.MULTILINE)[0] for name, read in ARGUMENTS.items()]
    assert asked == list(BASES)


ARGUMENTS = {
    "PYTHON_IMAGE": (ROOT / "docker" / "Dockerfile.cpu").read_text(encoding="utf-8"),
    "TINI_IMAGE": (ROOT / "docker" / "Dockerfile.npu").read_text(encoding="utf-8"),
}


def test_the_page_shows_a_run_in_which_everything_held() -> None:
    result = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert "make test-images" in result and table([])[0] in result
    for subject in ("docker stop", "kill -9 of the engine", "POST /v1/chat/completions", "GET /metrics", "build"):
        assert subject in result, subject
    assert "FAILED" not in result and "| host | afterwards | as before" in result
