"""docs/clients.md lists the clients that the code runs, with the versions that it pins."""

import re

from tests import ROOT
from tests.clients.environments import version_of
from tests.clients.page import COLUMNS, END, key, table
from tests.clients.programs import CLIENTS

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


def test_the_page_has_the_codes_clients_and_versions() -> None:
    rows = [line for line in PAGE.partition(END)[0].splitlines() if line.startswith("| ")]
    keys = [match[0] for row in rows[1:] if (match := re.match(r"\| [^|]+ \| [^|]+ \|", row))]
    assert keys == [key(name) for name in CLIENTS]
    assert rows[0] == table({}).splitlines()[0]
    assert all(f"**{column}**" in PAGE for column in COLUMNS)


def test_the_settings_are_of_the_versions_that_are_run() -> None:
    settings = PAGE.partition("\n## Settings of agents\n")[2]
    tried = dict(re.findall(r"^\| `?([@\w/.-]+?)`? ([\d.]+) \|", settings, re.MULTILINE))
    pinned = {client.package: version_of(client) for client in CLIENTS.values()} | {
        "Codex": version_of(CLIENTS["Codex"])
    }
    assert {"Codex", "@ai-sdk/openai", "@openai/agents"} < tried.keys()
    assert {name: pinned[name] for name in tried if name in pinned} == {n: v for n, v in tried.items() if n in pinned}


def test_the_page_shows_no_failure() -> None:
    assert "FAILS" not in PAGE
