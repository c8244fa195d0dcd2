"""docs/clients.md lists the clients that the code runs, with the versions that it pins."""

import re

from tests import ROOT
from tests.clients.page import COLUMNS, END, key, table
from tests.clients.programs import CLIENTS

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")


def test_the_page_has_the_codes_clients_and_versions() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    keys = [match[0] for row in rows[1:] if (match := re.match(r"\| [^|]+ \| [^|]+ \|", row))]
    assert keys == [key(name) for name in CLIENTS]
    assert rows[0] == table({}).splitlines()[0] and END in PAGE
    assert all(f"**{column}**" in PAGE for column in COLUMNS)


def test_the_page_shows_no_failure() -> None:
    assert "FAILS" not in PAGE
