"""Rules about what tests import."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.costs import FOLDERS

TESTS = ROOT / "tests"
POLICY = "app.engine.dflash.policy"


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every import; the name is empty where a module is imported whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or ".", alias.name) for alias in node.names)


def modules_of(tree: ast.AST) -> set[str]:
    """Return every module that an import may load: `from a import b` may load a.b."""
    return {found for module, name in imports_of(tree) for found in (module, f"{module}.{name}".rstrip("."))}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_tests(tree: ast.AST) -> list[str]:
    return [name for name in modules_of(tree) if name.startswith("tests.") and ".test_" in name]


def private_names_of_the_policy(tree: ast.AST) -> list[str]:
    return [name for module, name in imports_of(tree) if module == POLICY and name.startswith("_")]


def test_no_test_is_imported() -> None:
    found = {path.relative_to(ROOT): names for path in TESTS.rglob("*.py") if (names := imported_tests(parsed(path)))}
    assert not found, "shared parts go to a plain module beside the tests"


def test_no_private_name_of_the_policy_is_imported() -> None:
    found = {
        path.relative_to(ROOT): names
        for path in TESTS.rglob("*.py")
        if (names := private_names_of_the_policy(parsed(path)))
    }
    assert not found, "its constants are tuning, and no promise"


@pytest.mark.parametrize(
    "line", ["from tests.fast.api import test_chat", "import tests.fast.api.test_chat", "from tests.x.test_y import Z"]
)
def test_an_imported_test_is_seen(line: str) -> None:
    assert imported_tests(ast.parse(line))
    assert not imported_tests(ast.parse(line.replace("test_", "")))


def test_a_private_name_of_the_policy_is_seen() -> None:
    assert private_names_of_the_policy(ast.parse(f"from {POLICY} import Policy, _WEIGHTS")) == ["_WEIGHTS"]


def test_every_folder_of_tests_has_a_price() -> None:
    priced = tuple(TESTS / folder for folder in FOLDERS)
    unpriced = [path for path in TESTS.rglob("test_*.py") if not any(map(path.is_relative_to, priced))]
    assert not unpriced, "tests/costs.py gives each folder its marker"
