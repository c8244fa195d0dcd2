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


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Every file of the tests."""
    return {path.relative_to(TESTS): ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}


def imported_tests(tree: ast.AST) -> list[str]:
    return [name for name in modules_of(tree) if name.startswith("tests.") and ".test_" in name]


def private_names_of_the_policy(tree: ast.AST) -> list[str]:
    return [name for module, name in imports_of(tree) if module == POLICY and name.startswith("_")]


def test_no_test_is_imported(trees: dict[Path, ast.Module]) -> None:
    found = {path: names for path, tree in trees.items() if (names := imported_tests(tree))}
    assert not found, "shared parts go to a plain module beside the tests"


def test_no_private_name_of_the_policy_is_imported(trees: dict[Path, ast.Module]) -> None:
    found = {path: names for path, tree in trees.items() if (names := private_names_of_the_policy(tree))}
    assert not found, "its constants are tuning, and no promise"


def test_no_fast_test_imports_transformers(trees: dict[Path, ast.Module]) -> None:
    """Not even inside a function. tests/golden has what it says."""
    fast = {path: modules_of(tree) for path, tree in trees.items() if path.is_relative_to("fast")}
    assert not [path for path, names in fast.items() if {"transformers"} & {name.partition(".")[0] for name in names}]


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
