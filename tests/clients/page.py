"""The table of docs/clients.md, made from the results of the clients' tests."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.environments import version_of
from tests.clients.programs import CLIENTS

CHAT, DEMO_LOOP, LOOP = "chat and streams, demo pair", "tool loop, demo pair", "tool loop, scripted model"
COLUMNS = (CHAT, DEMO_LOOP, LOOP)
BEGIN, END = "<!-- make test-clients -->\n", "<!-- end of make test-clients -->"
WORDS = {"passed": "works", "failed": "FAILS"}
Cell = tuple[str, str]


class Results:
    """Plugin of pytest that keeps the outcome of the tests with a property `cell`. One failure decides."""

    def __init__(self) -> None:
        self.outcomes: dict[Cell, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = dict(report.user_properties).get("cell")
        if isinstance(cell, tuple) and (report.when == "call" or report.failed):
            self.outcomes[cell] = "failed" if "failed" in (report.outcome, self.outcomes.get(cell)) else report.outcome


def key(name: str) -> str:
    """Return the beginning of a client's row, by which page and code are compared."""
    return f"| {name} | {version_of(CLIENTS[name])} |"


def table(outcomes: Mapping[Cell, str]) -> str:
    """Return the table in Markdown. A cell without an outcome was not run."""
    lines = [f"| client | version | {' | '.join(COLUMNS)} |", "|---|---|---|---|---|"]
    for name, client in CLIENTS.items():
        cells = [WORDS.get(outcomes.get((name, column), ""), "not run") for column in COLUMNS]
        for column in (CHAT, DEMO_LOOP):
            if client.is_agent or (column == DEMO_LOOP and not client.prompt_fits):
                cells[COLUMNS.index(column)] = "its prompt is longer than the demo's context"
        lines.append(f"{key(name)} {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def into_page(page: Path, outcomes: Mapping[Cell, str]) -> None:
    """Replace the part of the page between BEGIN and END with the table."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{table(outcomes)}\n{END}{tail}", encoding="utf-8")
