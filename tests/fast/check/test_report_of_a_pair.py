"""The sections of a report about real weights: texts with drafts and without, by two ways, and a server."""

import json
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from app.engine.checkpoint.files import DEMO
from tools.bench import http, own_server
from tools.lab.in_process import Run
from tools.report import command, pair, server
from tools.report.part import Options, answer
from tools.report.sections import SECTIONS

torch.set_num_threads(1)
TARGET, DRAFT = (str(DEMO / name) for name in ("target", "draft"))
GIVEN = Options("cpu", real_pair=(TARGET, DRAFT))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "LENGTHS", {"prompts": (20, 60), "alone": (90, 200)})
    monkeypatch.setattr(pair, "QUESTIONS", 3)
    monkeypatch.setattr(pair, "MAX_TOKENS", 24)


def test_texts_with_drafts_are_compared_to_texts_without_by_both_ways(small: None) -> None:
    eager, graphs = map(answer, pair.parts(GIVEN))
    for part in (eager, graphs):
        assert part["status"] == "ok", part
        cases = {case["load"]: case for case in part["result"]["cases"]}
        assert {name: case["texts"] for name, case in cases.items()} == {
            "questions": 3, "prompts": 2, "alone": 2,
        }  # fmt: skip
        assert all(case["as plain"] == case["texts"] for case in cases.values()), "in float32"
        assert cases["questions"]["acceptance length"] > 2 and part["result"]["first difference"] is None
    assert [case["as eager"] for case in graphs["result"]["cases"]] == [3, 2, 2]
    assert eager["result"]["found"].startswith("acceptance length ")


@pytest.mark.parametrize(("at", "texts", "status"), [(2, 1, "failed"), (12, 1, "ok"), (12, 3, "failed")])
def test_early_and_many_differences_are_failures_and_few_late_ones_are_not(
    at: int, texts: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {str(i): list(range(20)) for i in range(4)}
    wrong = {name: [*text[:at], 99, *text[at + 1 :]] if int(name) < texts else text for name, text in right.items()}
    loads = ("questions", "prompts", "alone")
    found = {f"{load}, plain": Run(right) for load in loads} | {load: Run(right) for load in loads}
    found |= {"questions, plain and alone": Run(right), "alone": Run(wrong)}
    monkeypatch.setattr(pair.Pair, "_texts", lambda self, way: found)
    assert answer(pair.parts(GIVEN)[0])["status"] == status


def test_without_a_pair_its_sections_are_not_tried_and_say_what_to_give() -> None:
    for (part,) in (pair.parts(Options("npu")), server.parts(Options("npu"), inf)):
        found = answer(part)
        assert found["status"] == "not tried" and found["result"] == {"found": "give --real-pair TARGET DRAFT"}


def test_a_pair_is_two_folders_of_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "gsm8k.jsonl"
    questions.write_text('{"question": "1 + 1?", "answer": "2"}')
    options, _ = command.parse(["--device", "npu", "--real-pair", TARGET, DRAFT, "--dataset", str(questions)])
    assert (options.real_pair, options.dataset) == ([TARGET, DRAFT], str(questions))
    assert command.main(["--device", "npu", "--real-pair", TARGET, "x", "--out", str(tmp_path)]) == 2
    assert "error: --real-pair: x has no config.json\n" in capsys.readouterr().err
    assert command.main(["--device", "cuda", "--dataset", "gsm8k.jsonl"]) == 2
    assert "--dataset: only a report on an NPU takes this" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [(None, "no such file or directory"), ("{}", "line 1: ")])
def test_a_dataset_that_cannot_be_read_is_refused_before_anything_runs(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, out = tmp_path / "gsm8k.jsonl", tmp_path / "out"
    if content is not None:
        questions.write_text(content)
    given = ["--device", "npu", "--real-pair", TARGET, DRAFT, "--dataset", str(questions), "--out", str(out)]
    assert command.main(given) == 2 and not out.exists()
    error = capsys.readouterr().err
    assert error.startswith(f"error: --dataset: {questions}") and said in error


def test_a_server_of_the_pair_is_asked_by_the_bench_at_the_published_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def bench(arguments: list[str]) -> int:
        given = http.parser().parse_args(arguments)
        asked.append(given)
        chats = [json.loads(line)["messages"][0]["content"] for line in Path(given.dataset).read_text().splitlines()]
        assert len(set(chats)) == 16 and all(14_000 < len(chat) < 15_000 for chat in chats)
        (way,) = given.compare
        rows: list[dict[str, Any]] = [
            {"text": "t", "concurrency": n, f"{way} tok/s": "74"}
            | ({} if way == "plain" else {f"{way} accepted": "5.2"})
            for n in ("1", "16")
        ]
        requests: list[dict[str, Any]] = [
            {"concurrency": n, "tokens": 1500, "error": None} for n in ("1", "16") for _ in range(2)
        ]
        failed = {"concurrency": "16", "tokens": 0, "error": "HTTP 500"}
        results = {"tables": {"speed": rows, "latency": []}, "requests": [*requests, failed]}
        (given.out / "results.json").write_text(json.dumps(results))
        return 0

    monkeypatch.setattr(http, "main", bench)
    plain, drafted = (answer(part)["result"] for part in server.parts(GIVEN, inf))
    assert plain["found"] == "74 tok/s at 1 (1500 tokens an answer), 74 tok/s at 16 (1500 tokens an answer)"
    assert drafted["found"].endswith("74 tok/s at 16 (1500 tokens an answer, 5.2 accepted a step)")
    assert [case["answer tokens"] for case in drafted["cases"]] == [1500, 1500]
    for given in asked:
        assert (given.max_tokens, given.concurrency, given.num_prompts) == (1500, [1, 16], [2, 16])
        assert given.extra_body["ignore_eos"], "answers of one length"
    flags: list[list[str]] = [given.serve_args for given in asked]
    few = ["--max-num-seqs", "16", "--max-graphs", "8"]
    without_thinking = ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    assert flags[0] == [TARGET, "--device", "cpu", *few, *without_thinking]
    assert flags[1][len(flags[0]) :] == ["--num-speculative-tokens", "8", "--draft-model", DRAFT]


def test_a_server_that_is_late_is_gone_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended by the bench, because a server whose parent is killed holds the device while it ends."""
    processes: list[subprocess.Popen[bytes]] = []

    class Slow(own_server.ServerProcess):
        """A server that is never ready, and takes a while to end."""

        def __init__(self, variant: str, serve_args: Sequence[str]) -> None:
            slow = (
                "import signal, sys, time\ndef end(*_): time.sleep(0.5); sys.exit()\nsignal.signal(signal.SIGTERM, end)"
            )
            super().__init__(variant, [sys.executable, "-c", f"{slow}\nwhile True: time.sleep(0.1)"], 1)

        def __enter__(self) -> Self:
            assert all(process.poll() is not None for process in processes), "another server is still there"
            super().__enter__()
            processes.append(self.process)
            return self

    monkeypatch.setattr(http, "OwnServer", Slow)
    monkeypatch.setattr(server, "SECONDS", 2.0)
    plain, drafted = map(answer, server.parts(GIVEN, inf))
    assert plain["status"] == drafted["status"] == "failed" and len(processes) == 2
    assert "the bench measured nothing in 2 s" in plain["error"]["says"]
    assert all(process.returncode is not None for process in processes)
    assert own_server._END_SECONDS < server.END_SECONDS


def test_a_late_server_has_time_to_end_before_its_part_is_killed() -> None:
    assert SECTIONS["npu"]["server"].part_seconds > server.SECONDS + server.END_SECONDS
