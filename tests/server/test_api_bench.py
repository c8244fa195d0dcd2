"""`python -m tools.lab api`: its scripted server says what it should, step by step, and the figures are put together
right. Tests do not judge their values."""

import argparse
import asyncio
import json
from pathlib import Path

import pytest
import zmq

from app.engine.checkpoint.files import DEMO
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokenizer
from tools.bench import traffic
from tools.bench.client import Answer, ServerError
from tools.bench.markdown import Table
from tools.lab import api, streaming
from tools.lab.__main__ import main
from tools.lab.publish import Verdict
from tools.lab.scripted import steps_of
from tools.lab.streaming import STOP, Clients, Moment, Round, Split, split

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux tells the CPU time of others")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "target")


@pytest.mark.parametrize(("tokens", "a_step", "sizes"), [(5, 1, [1] * 5), (9, 4, [1, 4, 4]), (8, 4, [1, 4, 3])])
def test_a_scripted_answer_has_its_tokens_in_steps_of_which_the_first_is_the_prefills(tokens, a_step, sizes):
    outputs = steps_of(["a", "b"], [10, 11, 12], tokens, a_step)
    assert len(outputs) == len(sizes)
    for name in ("a", "b"):
        deltas = [delta for output in outputs for delta in output.deltas if delta.request_id == name]
        assert [len(delta.token_ids) for delta in deltas] == [delta.steps[0].n_tokens for delta in deltas] == sizes
        assert [token for delta in deltas for token in delta.token_ids] == [10 + i % 3 for i in range(tokens)]
        assert [delta.finish_reason for delta in deltas] == [None] * (len(sizes) - 1) + ["length"]


def test_every_token_that_is_said_shows_at_once_whatever_clients_stop_at(tokenizer):
    detokenizer = Detokenizer(tokenizer.backend, STOP)
    assert all(detokenizer.push([token_id]) for token_id in streaming.prose(tokenizer))


@pytest.mark.parametrize("tokens_a_step", [1, 4])
@pytest.mark.parametrize("waits", [True, False])
def test_clients_get_every_token_from_the_real_server(tokenizer, tokens_a_step, waits):
    """That each answer has its tokens is what the clients see to. Of an engine that waits each step has its events."""
    said = streaming.prose(tokenizer)
    rounds = streaming.stream(said, 3, 1 + 40 * tokens_a_step, tokens_a_step, rounds=2, waits=waits)
    assert len(rounds) == 2
    for found in rounds:
        assert found.start.clock < found.first.clock < found.last.clock <= found.end.clock
        assert found.start.cpu <= found.first.cpu <= found.last.cpu <= found.end.cpu
        assert found.streaming.clock < found.whole.clock and found.streaming.cpu < found.whole.cpu
        assert found.events == 3 * 40 if waits else 3 <= found.events < 3 * 40


def test_a_row_tells_speed_by_the_clock_and_by_cpu_time_and_how_many_tokens_came_together(tokenizer):
    slow = Round(Moment(0, 0), Moment(1, 0.5), Moment(3, 1.5), Moment(4, 2.5), events=50)
    fast = Round(Moment(0, 0), Moment(1, 0.5), Moment(2, 1.5), Moment(3, 2.5), events=100)
    told = streaming.row([slow, fast, fast], 1000, 10, None)
    assert (told["tokens per second"], told["tokens per CPU second"], told["load"]) == ("1,000", "1,000", "100 %")
    assert (told["tokens an event"], told["µs a token"], told["µs a request"]) == ("10.0", "1000.0", "150000")
    assert told["SSE"] == told["sockets, HTTP, asyncio"] == "-"
    measured = split(tokenizer, streaming.prose(tokenizer), batch=4, tokens=33, tokens_a_step=4)
    assert all(seconds >= 0 for seconds in measured) and sum(measured) > 0
    parts = Split(*[1e-4] * 6)
    told = streaming.row([fast], 1000, 10, parts)
    assert told.keys() >= {"messages", "book", "detokenise", "stop", "parse", "SSE"}
    assert (told["SSE"], told["sockets, HTTP, asyncio"]) == ("100.00", "400.00")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (b'HTTP/1.1 503 No\r\n\r\n{"error": "still loading"}', "still loading"),
        (b'data: {"usage":{"completion_tokens":4}}\n\ndata: [DONE]\n\n', "an answer of 5 tokens ended with"),
    ],
)
def test_an_answer_that_is_not_what_the_engine_said_ends_the_bench(said, complaint):
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with zmq.Context() as context, context.socket(zmq.PUSH) as turn:
                await Clients(port, turn, lambda: 0.0, 1, 5, waits=True).run()

    with pytest.raises(ServerError, match=complaint):
        asyncio.run(run())


def test_shares_are_of_the_engines_time_and_a_failed_request_is_no_figure():
    answers = [Answer(0.0, chunks=[1.0, 2.0], tokens=10), Answer(0.0, chunks=[1.0, 2.0, 3.0], tokens=20)]
    row = api.share_row("math", [traffic.Round(answers, None)] * 2, api=0.006, engine=0.12)
    assert (row["added"], row["API µs a token"], row["engine µs a token"]) == ("5.0%", "100", "2000")
    assert (row["tokens a request"], row["tokens an event"], row["API µs a request"]) == ("15", "6.0", "1500")
    with pytest.raises(ServerError, match="math: it broke"):
        api.share_row("math", [traffic.Round([Answer(0.0, error="it broke")], None)], 1.0, 1.0)


def test_tables_verdicts_and_json_are_written(tmp_path, capsys):
    small = ["--connections", "2", "--steps", "4", "--tokens-a-step", "1,3", "--rounds", "1"]
    assert main(["api", "--parts", "streaming", *small, "--out", str(tmp_path)]) in (0, 1)
    printed = capsys.readouterr().out
    assert "| tokens a step | engine | tokens an event |" in printed and "over 2 connections, 3 a step" in printed
    told = json.loads((tmp_path / "api.json").read_text())
    rows = [(row["tokens a step"], row["engine"]) for row in told["tables"]["streaming"]]
    assert rows == [(1, "waits"), (1, "runs ahead"), (3, "waits"), (3, "runs ahead")] and len(told["verdicts"]) == 2


def test_the_share_of_a_run_of_the_demo_pair_has_a_row_for_each_text_and_one_for_all(tmp_path, capsys):
    small = ["--dataset", "demo:math", "--num-prompts", "2", "--concurrency", "2", "--rounds", "1"]
    assert main(["api", "--parts", "share", *small, "--max-tokens", "16", "--out", str(tmp_path)]) in (0, 1)
    rows = json.loads((tmp_path / "api.json").read_text())["tables"]["share"]
    assert [row["text"] for row in rows] == ["math", "all"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")][2:] == ["| math", "| all"]


@pytest.mark.parametrize("holds", [True, False])
def test_a_bound_that_was_missed_is_the_exit_code(monkeypatch, capsys, holds):
    def measured(options: argparse.Namespace, tell: object) -> tuple[Table, list[Verdict]]:
        return Table("start", "Start-up", "", [{"a": "b"}]), [Verdict("fast", holds, "so so")]

    monkeypatch.setitem(api.PARTS, "start", measured)
    assert main(["api", "--parts", "start"]) == (0 if holds else 1)
    assert f"- {'met' if holds else 'MISSED'}: fast (so so)" in capsys.readouterr().out


def test_a_part_that_does_not_exist_is_told_in_a_line(capsys):
    assert main(["api", "--parts", "streaming,stop"]) == 2
    assert "there is no part 'stop'" in capsys.readouterr().err
