"""The sections of a report about real weights: texts with drafts and without, by two ways, and a server."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.checkpoint.files import DEMO
from tools.bench import http
from tools.report import command, pair
from tools.report.engine import Run
from tools.report.part import Options, answer

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


def test_without_a_pair_its_sections_say_what_to_give() -> None:
    for parts in (pair.parts, pair.server_parts):
        ((part,),) = [parts(Options("npu"))]
        assert "give --real-pair TARGET DRAFT" in answer(part)["result"]["found"]


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
        rows = [{"text": "t", "concurrency": n, f"{given.compare[0]} tok/s": "74"} for n in ("1", "16")]
        (given.out / "results.json").write_text(json.dumps({"tables": {"speed": rows, "latency": []}}))
        return 0

    monkeypatch.setattr(http, "main", bench)
    plain, drafted = (answer(part)["result"] for part in pair.server_parts(GIVEN))
    assert plain["found"] == "74 tok/s at 1, 74 tok/s at 16" and len(drafted["cases"]) == 2
    for given in asked:
        assert (given.max_tokens, given.concurrency, given.num_prompts) == (1500, [1, 16], [2, 16])
    flags: list[list[Any]] = [given.serve_args for given in asked]
    assert flags[0] == [TARGET, "--device", "cpu"]
    assert flags[1][3:] == ["--num-speculative-tokens", "8", "--draft-model", DRAFT]
