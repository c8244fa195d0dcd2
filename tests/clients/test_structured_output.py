"""docs/structured-output.md: frameworks get structured data of a scripted model, which writes what a model would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.clients.environments import call, python_of
from tests.clients.frameworks import CASES, REFUSED
from tests.clients.scripted import ARGUMENTS


def run(case: str, url: str) -> "subprocess.CompletedProcess[str]":
    environment = "openai2" if case.startswith("instructor") else "openai3"
    return call([python_of(environment), Path(__file__).with_name("frameworks.py"), case, url])


@pytest.mark.parametrize("case", CASES)
def test_a_framework_gets_structured_data(environments, url, case):
    done = run(case, url)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("case", REFUSED)
def test_what_asks_for_a_grammar_is_refused_by_name(environments, url, case):
    done = run(case, url)
    assert done.returncode != 0 and "response_format" in done.stderr and "400" in done.stderr, done.stderr[-3000:]


def test_the_page_names_the_cases_that_are_run():
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    section = page.partition("\n## Frameworks\n")[2]
    assert re.findall(r"^- (.+)$", section, re.MULTILINE) == [*CASES, *REFUSED]


def test_the_pages_example_works(url, tmp_path):
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = example.replace("http://127.0.0.1:8000/v1", url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1700)
    assert done.stdout == f"{ARGUMENTS}\n", done.stderr
