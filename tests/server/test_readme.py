"""The blocks of README.md that a user pastes give what the page promises."""

import json
import os
import re
import subprocess
import sys

import httpx
import pytest

from tests import ROOT
from tests.exhaustive.smollm2 import check_installed
from tests.fast.api.served import PATIENCE
from tests.server.demo import ready

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def installed() -> None:
    check_installed()


def test_the_offline_example_answers_its_question() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", example]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."


def test_the_request_by_curl_gets_an_answer() -> None:
    (path, body) = re.findall(r"curl -s http://127\.0\.0\.1:8000(\S+) -d '([^']*)'", README)[0]
    with ready("smollm2") as url:
        answer = httpx.post(url + path, json=json.loads(body), timeout=PATIENCE).raise_for_status().json()
    (choice,) = answer["choices"]
    assert len(choice["message"]["content"].split()) > 20 and choice["finish_reason"] in ("stop", "length")
