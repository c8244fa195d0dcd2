"""Figures out of raw timings, and the tables of them."""

import json
from pathlib import Path

import pytest

from tools.bench.cell import Cell, is_good
from tools.bench.client import Answer, Drafting
from tools.bench.formats import Prompt
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
    assert found.same_text("dflash") == 0.5
    assert sorted(found.times("dflash", "ttft")) == pytest.approx([0.1] * 6 + [0.2] * 6)
    assert len(found.times("plain", "itl")) == 6 * 12
    assert found.goodput("dflash", LIMITS) == pytest.approx((1 / 0.5, 0.5))


def test_the_tables_show_the_figures() -> None:
    shown = {table.name: table for table in tables([cell()], LIMITS)}
    assert list(shown) == ["speed", "acceptance", "positions", "same_text", "latency", "goodput"]
    assert shown["speed"].rows == [
        {
            "text": "sums",
            "concurrency": "2",
            "plain tok/s": "40",
            "dflash tok/s": "80",
            "dflash / plain": "2.00 (2.00-2.00)",
            "rounds": 6,
            "requests": 2,
            "failed": 0,
        }
    ]
    assert shown["acceptance"].rows == [{"text": "sums", "concurrency": "2", "dflash": "2.50"}]
    assert shown["positions"].rows == [{"text": "sums", "variant": "dflash", "at 1": "0.75", "at 2": "0.00"}]
    assert shown["same_text"].rows == [{"text": "sums", "concurrency": "2", "dflash": "50.0 %"}]
    assert shown["latency"].rows[1]["TTFT"] == "150 / 200 / 200"
    assert shown["goodput"].rows[0]["dflash"] == "2.00 (50 %)"
    assert "(last - first) / (tokens - 1)" in str(shown["latency"])
    assert "| sums | 2 | 40 | 80 | 2.00 (2.00-2.00) | 6 | 2 | 0 |" in str(shown["speed"])


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
    told = " | ".join(notes([found]))
    assert "peer had 50 % of the prompts' tokens in a cache" in told
    assert "2 answers of peer are shorter than asked: it ignores ignore_eos" in told
    assert "1 prompts came round again until there were 2" in told
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
