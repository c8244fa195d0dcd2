"""The guard of tests/costs.py: a fast test that is not fast fails, and none other does."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.costs import MARKERS, marker_of

TESTS = ROOT / "tests"


@pytest.mark.parametrize(
    ("path", "marker"),
    [
        ("fast/api/test_x.py", None),
        ("devices/npu/test_x.py", "npu"),
        ("exhaustive/test_x.py", "exhaustive"),
        ("soak/test_x.py", "soak"),
    ],
)
def test_the_folder_gives_the_marker(path: str, marker: str | None) -> None:
    assert marker_of(TESTS / path, TESTS) == marker
    assert marker is None or marker in MARKERS


@pytest.mark.parametrize("path", ["test_x.py", "fastest/test_x.py", "devices/test_x.py"])
def test_a_folder_without_a_price_is_refused(path: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"tests/costs\.py"):
        marker_of(TESTS / path, TESTS)


BURN = "exec(open('heavy.py').read())"
FAST = {
    "sleeps": "import time\ndef test_it(): time.sleep(0.5)\n",
    "imports": "def test_it(): import heavy\n",
    "is_marked": f"import pytest\n@pytest.mark.slow\ndef test_it(): {BURN}\n",
    "has_a_dear_fixture_of_the_module": (
        f"import pytest\n@pytest.fixture(scope='module')\ndef dear(): {BURN}\ndef test_it(dear): pass\n"
    ),
}
DEAR = {
    "computes": f"def test_it(): {BURN}\n",
    "has_a_child_that_computes": (
        "import subprocess, sys\ndef test_it(): subprocess.run([sys.executable, 'heavy.py'], check=True)\n"
    ),
    "has_a_dear_fixture": f"import pytest\n@pytest.fixture\ndef dear(): {BURN}\ndef test_it(dear): pass\n",
    "has_a_fixture_that_is_dear_in_the_end": (
        f"import pytest\n@pytest.fixture\ndef dear():\n    yield\n    {BURN}\ndef test_it(dear): pass\n"
    ),
}
LIVE = {"loads_transformers": "def test_it(): import transformers\n"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The last word of pytest about every program, under a limit of 0.2 s."""
    folder = tmp_path_factory.mktemp("tests")
    (folder / "conftest.py").write_text(
        "import tests.costs\nfrom tests.costs import cost, pytest_collection_modifyitems\ntests.costs.LIMIT = 0.2\n"
        "tests.costs.slowness = lambda: 1.0\n"
    )
    (folder / "heavy.py").write_text(
        "import os\nbegun = sum(os.times()[:2])\nwhile sum(os.times()[:2]) < begun + 0.8: pass\n"
    )
    (folder / "transformers.py").touch()
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n    fast:\n    slow:\npythonpath = {ROOT} {folder}\n")
    for name, program in (FAST | DEAR | LIVE).items():
        (folder / f"test_{name}.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", folder]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return dict(re.findall(r"(?m)^(?:PASSED|ERROR) test_(\w+)\.py::test_it(.*)$", done.stdout))


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", FAST)
def test_a_test_is_fast_that(what: str, report: dict[str, str]) -> None:
    assert report[what] == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", DEAR)
def test_a_test_is_not_fast_that(what: str, report: dict[str, str]) -> None:
    assert "s of process time" in report[what]


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", LIVE)
def test_nor_is_one_that(what: str, report: dict[str, str]) -> None:
    assert "a fast test loads Transformers" in report[what]
