"""Rules about what tests import."""

import re

import pytest

from tests import ROOT
from tests.costs import FOLDERS

TESTS = ROOT / "tests"
NAMES = r"import (?:\([^)]*|.*)\b"
A_TEST = re.compile(rf"^ *(?:(?:import|from) tests\.[\w.]*\btest_|from tests[\w.]* {NAMES}test_)", re.MULTILINE)
OF_THE_POLICY = re.compile(rf"^ *from app\.engine\.schedule\.policy {NAMES}_", re.MULTILINE)
TRANSFORMERS = re.compile(r"^ *(?:import|from) transformers\b", re.MULTILINE)


def test_every_file_keeps_the_rules() -> None:
    """Parts that tests share go to a plain module. The policy's constants are tuning, and no promise. A fast test reads
    tests/golden instead of what Transformers says."""
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not A_TEST.search(text), path
        assert not OF_THE_POLICY.search(text), path
        assert not (path.is_relative_to(TESTS / "fast") and TRANSFORMERS.search(text)), path


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (A_TEST, "from tests.fast.api import test_chat"),
        (A_TEST, "import tests.fast.api.test_chat"),
        (A_TEST, "from tests.x.test_y import Z"),
        (OF_THE_POLICY, "from app.engine.schedule.policy import (\n    Policy,\n    _WEIGHTS,\n)"),
        (TRANSFORMERS, "def f():\n    import transformers.utils"),
        (TRANSFORMERS, "from transformers import AutoTokenizer"),
    ],
)
def test_a_broken_rule_is_seen(rule: re.Pattern[str], line: str) -> None:
    assert rule.search(line) and not rule.search(re.sub("test_|_(?=WEI)|transformers", "", line))


def test_every_folder_of_tests_has_a_price() -> None:
    priced = tuple(TESTS / folder for folder in FOLDERS)
    unpriced = [path for path in TESTS.rglob("test_*.py") if not any(map(path.is_relative_to, priced))]
    assert not unpriced, "tests/costs.py gives each folder its marker"
