"""docs/DESIGN.md names what there is: rooms, import rules and functions."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
APP = ROOT / "app"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Return the cells of the section's tables, without their headings."""
    lines = re.sub(r"^\|.*\n\|-.*\n", "", section(title), flags=re.MULTILINE).splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]


def numbered(title: str) -> list[str]:
    return re.findall(r"^(\d)\. ", section(title), re.MULTILINE)


def test_it_opens_with_a_promise_and_a_short_glossary() -> None:
    assert re.findall(r"^## (.*)", PAGE, re.MULTILINE)[:2] == ["The promise", "Glossary"]
    assert 10 <= len(rows("Glossary")) <= 15


@pytest.mark.parametrize("title", ["A request's life", "A step"])
def test_it_tells_them_in_eight_lines(title: str) -> None:
    assert numbered(title) == list("12345678")
    assert max(map(len, section(title).splitlines())) <= 132


def test_the_map_has_every_file_of_app_and_no_other() -> None:
    chart = section("The map").partition("```\n")[2].partition("```")[0]
    below: dict[int, str] = {}
    rooms, listed = set(), set()
    for line in chart.splitlines():
        if match := re.match(r"( *)((?:[\w]+/ ?)+)", line):
            indent = len(match[1])
            below = {depth: room for depth, room in below.items() if depth < indent}
            places = ["/".join([*below.values(), name]) for name in match[2].replace("/", "").split()]
            below[indent] = match[2].split("/")[0]
            rooms |= set(places)
        for name in re.findall(r"\w+\.(?:py|cpp|h)\b", line):
            assert any((ROOT / place / name).is_file() for place in places), f"{places[0]}/{name}"
            listed |= {f"{place}/{name}" for place in places}
    for room in rooms:
        assert (ROOT / room).is_dir(), room
    files = {
        path.relative_to(ROOT).as_posix()
        for path in APP.rglob("*")
        if path.suffix in (".py", ".cpp", ".h") and not path.name.startswith("__")
    }
    assert sorted(files - listed) == []


ROOMS = sorted(path.parent for path in APP.rglob("__init__.py") if path.parent != APP)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(APP)))
def test_every_room_says_what_belongs_there_and_where_other_things_are(room: Path) -> None:
    says = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    words = re.findall(r"\b\w+(?:[./]\w+)+|\b\w+(?=/)|(?<=`)\w+(?=`)", says)
    paths = [base / re.sub(r"\.(?!py$)", "/", word) for word in words for base in (ROOT, APP, APP / "engine")]
    named = [path for path in paths if path.exists() or path.with_suffix(".py").exists()]
    assert [path for path in named if room not in (path, *path.parents)], f"where is what does not belong here? {says}"


NAMED = [(cell[0], cell[1]) for cell in rows("The map")]
IN_FILES = re.findall(r"`([\w.]+)` \(([\w/]+\.py)\)", section("A request's life") + section("A step"))


@pytest.mark.parametrize(("question", "place"), NAMED)
def test_every_place_that_answers_a_question_exists(question: str, place: str) -> None:
    *names, path = re.findall(r"`([\w./]+)`", place.partition(", ")[0])
    text = (ROOT / path).read_text(encoding="utf-8")
    for name in ".".join(names).split(".") if names else ():
        assert re.search(rf"^ *(?:(?:async )?(?:def|class) {name}\b|{name} = )", text, re.MULTILINE), name


@pytest.mark.parametrize(("name", "path"), IN_FILES)
def test_every_function_of_the_two_lives_is_in_its_file(name: str, path: str) -> None:
    text = next(file for file in (APP / path, APP / "engine" / path) if file.is_file()).read_text(encoding="utf-8")
    for part in name.split("."):
        assert re.search(rf"^ *(?:async )?(?:def|class) {part}\b", text, re.MULTILINE), part


def test_its_import_rules_are_those_that_the_linter_holds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    whole, engine, *_ = [
        contract["layers"] for contract in project["tool"]["importlinter"]["contracts"] if contract["type"] == "layers"
    ]
    stated = " ".join(section("Who may import whom").split())
    for layers in ([layer for layer in whole if layer != "app.__main__"], engine):
        told = " > ".join(f"`{re.sub(r'app[.]|[()]', '', layer)}`" for layer in layers)
        assert f"downward only: {told}." in stated, told
