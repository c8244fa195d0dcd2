"""docs/troubleshooting.md quotes messages that the code still has."""

import ast
import re
from collections.abc import Iterator

from tests import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
APP = ROOT / "app"


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a file, with … for what is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[sdfgr]", "…", node.value).replace("%%", "%")
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def quoted() -> list[str]:
    """What stands as code in the first column of the tables."""
    cells = re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`(.+?)`", cell)]


def test_every_message_that_it_quotes_is_one_of_the_codes() -> None:
    said = {text for path in APP.rglob("*.py") for text in texts(ast.parse(path.read_text(encoding="utf-8")))}
    everything = "\n".join(said)
    assert len(quoted()) >= 40
    assert [message for message in [*quoted(), "no such message"] if message not in everything] == ["no such message"]
