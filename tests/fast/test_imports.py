"""Rules about what tests import."""

import ast

import pytest

from tests import ROOT
from tests.costs import FOLDERS

TESTS = ROOT / "tests"
POLICY = "app.engine.schedule.policy"

Imports = list[tuple[str, str]]
"""(module, name) of every import; the name is empty where a module is imported whole."""


def imports_of(text: str) -> Imports:
    """Return the imports of a file, those inside its functions too."""
    found: Imports = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or ".", alias.name) for alias in node.names]
    return found


def modules_of(imports: Imports) -> set[str]:
    """Return every module that an import may load: `from a import b` may load a.b."""
    return {found for module, name in imports for found in (module, f"{module}.{name}".rstrip("."))}


def imported_tests(imports: Imports) -> list[str]:
    return [name for name in modules_of(imports) if name.startswith("tests.") and ".test_" in name]


def private_names_of_the_policy(imports: Imports) -> list[str]:
    return [name for module, name in imports if module == POLICY and name.startswith("_")]


def imports_transformers(imports: Imports) -> bool:
    return "transformers" in {name.partition(".")[0] for name in modules_of(imports)}


def test_every_file_keeps_the_rules() -> None:
    """Parts that tests share go to a plain module. The policy's constants are tuning, and no promise. A fast test reads
    tests/golden instead of what Transformers says."""
    for path in TESTS.rglob("*.py"):
        imports = imports_of(path.read_text(encoding="utf-8"))
        assert not imported_tests(imports), path
        assert not private_names_of_the_policy(imports), path
        assert not (imports_transformers(imports) and path.is_relative_to(TESTS / "fast")), path


@pytest.mark.parametrize(
    "line", ["from tests.fast.api import test_chat", "import tests.fast.api.test_chat", "from tests.x.test_y import Z"]
)
def test_an_imported_test_is_seen(line: str) -> None:
    assert imported_tests(imports_of(line))
    assert not imported_tests(imports_of(line.replace("test_", "")))


def test_a_private_name_of_the_policy_is_seen() -> None:
    assert private_names_of_the_policy(imports_of(f"from {POLICY} import Policy, _WEIGHTS")) == ["_WEIGHTS"]


@pytest.mark.parametrize("line", ["def f():\n    import transformers.utils", "from transformers import AutoTokenizer"])
def test_transformers_is_seen(line: str) -> None:
    assert imports_transformers(imports_of(line)) and not imports_transformers(imports_of("import torch"))


def test_every_folder_of_tests_has_a_price() -> None:
    priced = tuple(TESTS / folder for folder in FOLDERS)
    unpriced = [path for path in TESTS.rglob("test_*.py") if not any(map(path.is_relative_to, priced))]
    assert not unpriced, "tests/costs.py gives each folder its marker"
