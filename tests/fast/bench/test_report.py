"""Figures out of raw timings, and the tables of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.config.error import ConfigError
from tools.bench.cell import Cell, is_good
from tools.bench.client import Answer, Drafting
from tools.bench.formats import Prompt
from tools.bench.markdown import write_page
from tools.bench.paired import Claim, Comparison
from tools.bench.report import as_json, lengths, milliseconds, notes, tables
from tools.bench.traffic import Load, Round

LIMITS = {"ttft": 0.15, "tpot": 0.05}


def answer(sent: float, ttft: float, gaps: list[float], tokens: int, text: str = "4", **more: object) -> Answer:
    chunks = [sent + ttft]
    for gap in gaps:
        chunks.append(chunks[-1] + gap)
    fields: dict[str, object] = {"finish_reason": "stop", "prompt_tokens": 10, **more}
    return Answer(sent, chunks, chunks[-1], tokens=tokens, text=text, **fields)  # type: ignore[arg-type]


def drafting(steps: int, accepted: int) -> Drafting:
    counts: dict[tuple[str, int | None], float] = {("drafts", None): steps, ("accepted_tokens", None): accepted}
    return Drafting(counts | {("accepted_tokens_per_pos", 0): accepted / 2, ("accepted_tokens_per_pos", 1): 0})


def cell(concurrency: int = 2, rounds: int = 6) -> Cell:
    """A variant of 40 and one of 80 tokens a second. The second answers of each round differ."""
    plain = Round([answer(0.0, 0.1, [0.1] * 9, 10), answer(0.0, 0.1, [0.2] * 2 + [0.5], 30)], None)
    fast = Round([answer(0.0, 0.1, [0.2, 0.2], 10), answer(0.0, 0.2, [0.1, 0.2], 30, "5")], drafting(4, 6))
    played = {"plain": [plain] * rounds, "dflash": [fast] * rounds}
    speeds = {name: [turn.speed for turn in turns] for name, turns in played.items()}
    asked = [Prompt({"prompt": "2+2"}), Prompt({"prompt": "5?"})]
    comparison = Comparison(speeds, [Claim("dflash", "plain")])
    return Cell("sums", Load(concurrency), asked, played, comparison)


def test_a_request_is_good_only_if_it_keeps_every_limit() -> None:
    request = answer(0.0, 0.1, [0.2], 5)
    assert is_good(request, {"ttft": 0.1, "tpot": 0.051, "e2el": 0.31})
    assert not is_good(request, {"ttft": 0.09, "tpot": 0.051})
    assert not is_good(request, {"tpot": 0.04})
    assert is_good(answer(0.0, 0.1, [], 1), {"tpot": 0.0})  # a single token has no time per output token


def test_figures_of_a_cell() -> None:
    found = cell()
    assert (found.speed("plain"), found.speed("dflash")) == pytest.approx((40.0, 80.0))
    assert found.comparison.ratio(found.comparison.claims[0]).middle == pytest.approx(2.0)
    assert found.acceptance_length("dflash") == 2.5 and found.acceptance_length("plain") is None
    assert found.same_text("dflash") == "1 of 2"
    assert sorted(found.times("dflash", "ttft")) == pytest.approx([0.1] * 6 + [0.2] * 6)
    assert len(found.times("plain", "itl")) == 6 * 12
    assert found.goodput("dflash", LIMITS) == pytest.approx((1 / 0.5, 0.5))


def test_the_tables_show_the_figures() -> None:
    shown = {table.name: table for table in tables([cell()], LIMITS)}
    assert list(shown) == ["speed", "positions", "latency", "goodput"]
    assert shown["speed"].rows == [
        {
            "text": "sums",
            "temperature": "0",
            "concurrency": "2",
            "plain tok/s": "40",
            "dflash tok/s": "80",
            "dflash / plain": "2.00 (2.00-2.00)",
            "dflash accepted": "2.50",
            "dflash same text": "1 of 2",
            "rounds": 6,
            "requests": 2,
            "failed": 0,
        }
    ]
    assert shown["positions"].rows == [
        {"text": "sums", "temperature": "0", "variant": "dflash", "at 1": "0.75", "at 2": "0.00"}
    ]
    assert shown["latency"].rows[1]["TTFT"] == "150 / 200 / 200"
    assert shown["goodput"].rows[0]["dflash"] == "2.00 (50 %)"
    assert "(last - first) / (tokens - 1)" in str(shown["latency"])
    assert "| sums | 0 | 2 | 40 | 80 | 2.00 (2.00-2.00) | 2.50 | 1 of 2 | 6 | 2 | 0 |" in str(shown["speed"])


def test_a_text_is_the_same_if_it_is_in_every_round_and_did_not_fail() -> None:
    right, wrong = (answer(0.0, 0.1, [], 1, text) for text in "45")
    failed = answer(0.0, 0.1, [], 1, error="broken")
    played = {
        "plain": [Round([right] * 3, None)] * 2,
        "auto": [Round([right, *rest], None) for rest in ([wrong, failed], [right, right])],
    }
    found = Cell("sums", Load(3), [Prompt({"prompt": "2+2"})] * 3, played, Comparison({}, ()))
    assert found.same_text("auto") == "1 of 3" and found.same_text("plain") == "3 of 3"


def test_acceptance_by_position_is_of_one_temperature() -> None:
    greedy, sampled = cell(), replace(cell(rounds=1), load=Load(2, temperature=0.7))
    (positions,) = (table.rows for table in tables([greedy, sampled], {}) if table.name == "positions")
    assert [(row["text"], row["temperature"]) for row in positions] == [("sums", "0"), ("sums", "0.7")]


def test_notes_name_each_place_where_a_variant_is_slower_than_the_first() -> None:
    def at(speed: float, concurrency: int, temperature: float = 0.0) -> Cell:
        speeds = {"plain": [100.0] * 6, "auto": [speed] * 6}
        found = cell(concurrency)
        load, compared = replace(found.load, temperature=temperature), Comparison(speeds, [Claim("auto", "plain")])
        return replace(found, load=load, comparison=compared)

    cells = [at(120.0, 1), at(99.7, 2), at(95.0, 4), at(90.0, 16, 0.7)]
    places = "sums, 4 at once: 0.95 (0.95-0.95); sums, 16 at once, T 0.7: 0.90 (0.90-0.90)"
    assert notes(cells) == [f"auto is slower than plain in {places}"]


def test_a_page_has_places_by_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- bench -->\nold\n<!-- /bench -->\nb\n<!-- bench x -->\nold\n<!-- /bench x -->\nc\n")
    write_page(f"{page}#x", ["new", "notes"])
    kept, named = "<!-- bench -->\nold\n<!-- /bench -->\n", "<!-- bench x -->\n\nnew\n\nnotes\n\n<!-- /bench x -->\n"
    assert page.read_text() == f"a\n{kept}b\n{named}c\n"
    with pytest.raises(ConfigError, match="#y: it has no place for a table") as caught:
        write_page(f"{page}#y", ["new"])
    assert caught.value.hint == "a line <!-- bench y -->, and one <!-- /bench y -->"


def test_what_cannot_be_said_is_not_in_a_table() -> None:
    plain = Round([answer(0.0, 0.1, [0.1], 2)], None)
    alone = Cell("talk", Load(1), [Prompt({"prompt": "hi"})], {"peer": [plain]}, Comparison({"peer": [10.0]}, ()))
    assert [table.name for table in tables([alone], {})] == ["speed", "latency"]


def test_failures_are_counted_and_shown() -> None:
    asked = [Prompt({"prompt": "2+2"})] * 2
    broken = Round([answer(0.0, 0.1, [0.1], 2), Answer(0.0, last=1.0, error="HTTP 503: full", text="4")], None)
    comparison = Comparison({"peer": [1.0]}, ())
    found = Cell("sums", Load(2), asked, {"peer": [broken]}, comparison, {"peer": ["HTTP 503: full"]})
    assert tables([found], {})[0].rows[0]["failed"] == 2
    assert "sums, 2 at once: 2 requests to peer failed: HTTP 503: full" in notes([found])


def test_notes_say_what_makes_figures_mean_something_else() -> None:
    short = answer(0.0, 0.1, [0.1], 3, cached_tokens=5)
    one = Prompt({"prompt": "x"}, max_tokens=8, exact=True)
    played = {"peer": [Round([short, short], None)]}
    found = Cell("made up", Load(1), [one, one], played, Comparison({"peer": [1.0]}, ()))
    told = " | ".join(notes([found, replace(found, load=Load(1, temperature=0.7))]))
    assert "peer had 50 % of the prompts' tokens in a cache" in told
    assert "2 answers of peer are shorter than asked: it ignores ignore_eos" in told
    assert told.count("made up: 1 prompts came round again until there were 2") == 1
    few = cell(rounds=3)
    assert any("1 of 1 intervals are too wide to settle" in note for note in notes([few]))
    assert lengths([few]) == "12 answers; on average 10 tokens were asked and 20 answered"


def test_milliseconds_have_three_digits() -> None:
    assert [milliseconds(s) for s in (0.00123, 0.0123, 0.1234, 1.5)] == ["1.23", "12.3", "123", "1500"]


def test_json_has_every_request_with_its_chunks(tmp_path: Path) -> None:
    found = [cell()]
    results = json.loads(json.dumps(as_json(found, tables(found, {}), command="bench")))
    assert results["command"] == "bench" and results["machine"] and results["versions"]["dflash-server"]
    assert len(results["requests"]) == 2 * 6 * 2
    first = results["requests"][0]
    assert (first["variant"], first["round"], first["tokens"], first["text"]) == ("plain", 0, 10, "4")
    assert first["chunks"][:2] == [0.1, 0.2] and first["last"] == pytest.approx(1.0)
