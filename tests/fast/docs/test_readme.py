"""The README and the pages beside it say what the code does: tables are made from it, and every name exists."""

import re
from collections.abc import Sequence

import pytest

from app.api.refusals import LEFT_OUT, REFUSALS, RESPONSES, Refusal
from app.api.responses_schemas import ResponsesRequest
from app.api.schemas import ChatCompletionRequest, CompletionRequest, SamplingRequest
from app.config.aliases import PEER_FLAGS
from app.config.flags import serve_parser
from tests import ROOT

FILES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
PAGES = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
README = PAGES["README.md"]
OTHER_COMMANDS = {"--extra-index-url", "--base-url", "--device", "--json", "--publish", "--rm", "--stop-timeout"}
OTHER_COMMANDS |= {"--volume", "--file", "--tag", "--sections"}


def markdown(*rows: tuple[str, ...]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"README.md"}))
def test_a_page_begins_with_who_needs_it(name: str) -> None:
    assert PAGES[name].split("\n\n")[1].startswith("For ")


@pytest.mark.parametrize("name", PAGES)
def test_every_path_of_the_tree_that_a_page_names_exists(name: str) -> None:
    named = set(re.findall(r"`((?:app|tests|tools|docker)/[\w./-]*\w)`", PAGES[name]))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_the_table_of_peers_flags_is_the_codes_own() -> None:
    shown = {"refused": "**refused**", "nothing to set": "nothing to set"}
    rows = [(" ".join(f"`{name}`" for name in p.names), shown.get(p.ours, f"`{p.ours}`"), p.note) for p in PEER_FLAGS]
    table = markdown(("theirs", "ours", "note"), ("---",) * 3, *rows)
    assert f"\n\n{table}\n\n" in PAGES["migrating.md"], f"put this into docs/migrating.md:\n{table}"


def test_the_acceptance_lengths_are_those_that_the_report_printed() -> None:
    report = (ROOT / "app" / "demo" / "README.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in report.splitlines() if line.startswith("| ")]
    printed = {row[1]: row[4] for row in rows if row[2] == "200"}
    wanted = "{math} tokens a step for math, {code} for code and {copy} for copy".format(**printed)
    assert wanted in PAGES["performance.md"], wanted


def field_table() -> list[tuple[str, str]]:
    """Return rows (fields, treatment) for the documentation: the honoured fields, then the refused ones."""
    never = {"best_of"}  # A field of schemas.py, so that a wrong value is named, though it may only be 1.
    both = set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields) - never
    rows = [(_named(both), "honoured")]
    for path, model in (("/v1/chat/completions", ChatCompletionRequest), ("/v1/completions", CompletionRequest)):
        rows.append((_named(set(model.model_fields) - both - never), f"honoured by {path}"))
    return rows + left_out_rows(("verbosity",)) + refused_rows(REFUSALS)


def response_field_table() -> list[tuple[str, str]]:
    """Return the rows of the fields that /v1/responses alone has."""
    own = set(ResponsesRequest.model_fields) - set(SamplingRequest.model_fields)
    refused = {"stream_options", *(refusal.field for refusal in RESPONSES)}
    left_out = left_out_rows([field for field in LEFT_OUT if "." in field])
    return [(_named(own - refused), "honoured"), *left_out, *refused_rows(RESPONSES)]


def left_out_rows(fields: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"`{field}`", f"passes with a warning: {LEFT_OUT[field].why.partition(': ')[2]}") for field in fields]


def refused_rows(table: Sequence[Refusal]) -> list[tuple[str, str]]:
    """Return a row for each reason, with the fields that are refused for it."""
    rows = []
    refused: dict[str, list[Refusal]] = {}
    for refusal in table:
        refused.setdefault(
            refusal.why.removeprefix(f"`{refusal.field}`: ").replace(f"`{refusal.field}`", "them"), []
        ).append(refusal)
    for why, refusals in refused.items():
        treatment = refusals[0].why if len(refusals) == 1 else why[0].upper() + why[1:]
        rows.append((_named([refusal.field for refusal in refusals]), treatment))
    return rows


def _named(fields: Sequence[str] | set[str]) -> str:
    return ", ".join(f"`{field}`" for field in (sorted(fields) if isinstance(fields, set) else fields))


def test_the_table_of_request_fields_is_the_codes_own() -> None:
    table = markdown(("fields", "what happens"), ("---",) * 2, *field_table())
    assert f"\n\n{table}\n\n" in PAGES["api.md"], f"put this into docs/api.md:\n{table}"


def test_the_table_of_the_fields_of_responses_is_the_codes_own() -> None:
    table = markdown(("fields", "what happens"), ("---",) * 2, *response_field_table())
    assert f"\n\n{table}\n\n" in PAGES["api.md"], f"put this into docs/api.md:\n{table}"


FIGURES = README.partition("\n## Figures")[2].partition("\n## ")[0]


def cells_of(rows: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def test_the_real_pairs_figures_are_rows_that_the_bench_wrote() -> None:
    """README's table has greedy rows of the table that `make bench` puts into docs/performance.md."""
    written = PAGES["performance.md"].partition("<!-- bench -->\n")[2].partition("<!-- /bench -->")[0]
    names, _, *measured = cells_of("\n".join(line for line in written.splitlines() if line.startswith("|")))
    rows = [dict(zip(names, row, strict=True)) for row in measured]
    greedy = {(row["text"], row["concurrency"]): row for row in rows if row["temperature"] == "0"}
    shown = cells_of(FIGURES.partition("\n|---|---|---|---|---|\n")[2].partition("\n\n")[0])
    assert {requests for _, requests, *_ in shown} == {"1", "4", "16"}
    for text, requests, *figures in shown:
        row = greedy[text, requests]
        assert figures == [row["plain tok/s"], row["auto tok/s"], row["auto / plain"]]


def test_the_speeds_of_the_readme_are_those_of_the_gpus_page() -> None:
    """A cell of README's table is the closed speed of the same way and concurrency on the H200."""
    speeds = cells_of(PAGES["h200.md"])
    closed = {(row[0], row[1]): row[5] for row in speeds if len(row) == 7 and row[1].isdecimal()}
    rows = cells_of(FIGURES.partition("\n|---|---|---|---|\n")[2].partition("\n\n")[0])
    assert [row[0] for row in rows] == ["1", "8", "32"] and "acceptance drawn" in FIGURES
    for requests, *shown in rows:
        assert shown == [closed[way, requests] for way in ("plain", "whole blocks", "`auto`")]


@pytest.mark.parametrize("name", ["README.md", "api.md", "migrating.md"])
def test_every_flag_that_it_names_exists(name: str) -> None:
    flags = set(serve_parser()._option_string_actions) | OTHER_COMMANDS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGES[name])) <= flags


@pytest.mark.parametrize("name", PAGES)
def test_every_file_and_make_target_that_it_names_exists(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`(?:[\w=/:.]+ )?make ([a-z-]+)", PAGES[name])):
        assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.MULTILINE), target
    for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", PAGES[name]):
        assert (FILES[name].parent / path).exists(), path


@pytest.mark.parametrize("name", PAGES)
def test_every_anchor_that_it_links_to_is_a_heading(name: str) -> None:
    for path, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", PAGES[name]):
        page = FILES[name].parent / path if path else FILES[name]
        headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{path}#{anchor}"
