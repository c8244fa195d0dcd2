"""The README says what the code does: tables are made from it, and what it names exists."""

import re

from app.api.refusals import field_table
from app.config.aliases import PEER_FLAGS
from tests import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def flags_as_markdown() -> str:
    rows = [("theirs", "ours", "whose", "note"), ("---",) * 4]
    rows += [(f"`{p.flag}`", f"`{p.ours}`" if p.ours else "-", p.peers, p.note) for p in PEER_FLAGS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_the_table_of_peers_flags_is_the_codes_own() -> None:
    assert flags_as_markdown() in README, f"put this into README.md:\n{flags_as_markdown()}"


def test_the_acceptance_table_is_the_one_that_the_report_printed() -> None:
    report = (ROOT / "app" / "demo" / "README.md").read_text(encoding="utf-8")
    table = report[report.index("| domain | samples") :].partition("\n\n")[0]
    assert table.count("\n") > 4 and table in README, f"put this into README.md:\n{table}"


def fields_as_markdown() -> str:
    rows = [("fields", "what happens"), ("---",) * 2, *field_table()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_the_table_of_request_fields_is_the_codes_own() -> None:
    assert fields_as_markdown() in README, f"put this into README.md:\n{fields_as_markdown()}"


def test_every_file_and_make_target_that_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`?make ([a-z]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / path).exists(), path
