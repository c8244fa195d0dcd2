"""`python -m tools.bench` from its flags to its tables, against one real server; and its mistakes, told in a line."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config.error import ConfigError
from tests import ROOT
from tools.bench import flags, http, own_server
from tools.bench.__main__ import main
from tools.bench.cell import Cell
from tools.bench.client import ServerError
from tools.bench.command import guarded
from tools.bench.own_server import OwnServer, flags_of


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_server, "_END_SECONDS", 600.0)
        with OwnServer("dflash", ["demo", "--max-num-seqs", "8"]) as own:
            own.wait_until_ready(lambda text: None)
            yield own
    assert own.process.returncode == 0


def test_two_servers_are_compared_by_turns_and_everything_is_written(
    server: OwnServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = ["--base-url", f"one={server.url}/v1", "--base-url", f"two={server.url}"]
    load = ["--dataset", "demo:math", "--concurrency", "2", "--num-prompts", "3", "--max-rounds", "2"]
    assert main([*ways, *load, "--goodput", "ttft:60000", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    accepted = "one accepted | two accepted | two same text"
    assert f"| text | temperature | concurrency | one tok/s | two tok/s | two / one | {accepted} | rounds |" in printed
    assert "too wide to settle" in printed  # two rounds cannot tell
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["requests"]) == 2 * 2 * 3 and not any(row["error"] for row in results["requests"])
    (speeds,) = results["tables"]["speed"]
    assert float(speeds["one accepted"]) > 3 and speeds["two same text"] == "3 of 3"


def test_a_page_gets_its_table_and_keeps_the_rest(server: OwnServer, tmp_path: Path) -> None:
    ways = ["--base-url", f"one={server.url}", "--base-url", f"two={server.url}"]
    load = ["--concurrency", "1", "--num-prompts", "2", "--max-rounds", "1"]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    for _ in range(2):
        assert main([*ways, *load, "--into", str(page)]) == 0
        head, rows, tail = page.read_text().partition("| math | 0 | 1 | ")
        assert head.startswith("before\n<!-- bench -->\n\n`python -m tools.bench") and "old" not in head
        assert f"--into {page}`" in head and "| one tok/s | two tok/s | two / one |" in head
        assert rows and tail.endswith("\n\n<!-- /bench -->\nafter\n") and "too wide to settle" in tail


def test_a_page_without_a_place_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert main(["--into", str(page)]) == 2
    assert f"--into {page}: No such file" in capsys.readouterr().err
    page.write_text("<!-- bench -->\n")
    assert main(["--into", str(page)]) == 2
    assert "no place for a table" in capsys.readouterr().err and page.read_text() == "<!-- bench -->\n"


def test_made_up_texts_get_the_lengths_that_were_asked(
    server: OwnServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--input-len", "60", "--output-len", "12", "--request-rate", "50", "--num-prompts", "3"]
    assert main(["--base-url", server.url, *lengths, "--max-rounds", "1", "--out", str(tmp_path)]) == 0
    assert "ignore_eos" not in capsys.readouterr().out
    for row in json.loads((tmp_path / "results.json").read_text())["requests"]:
        assert row["tokens"] == 12 and 40 < row["prompt_tokens"] < 80 and row["arrivals"] == "50/s"


def test_sharegpts_lengths_are_drawn_and_fit_the_model(server: OwnServer, tmp_path: Path) -> None:
    """The demo pair has 2,048 positions, and a request that does not fit is refused. No draft knows these words."""
    load = ["--lengths", "sharegpt", "--concurrency", "4", "--num-prompts", "6", "--max-rounds", "1"]
    load += ["--extra-body", '{"speculate": false}']
    assert main(["--base-url", server.url, *load, "--out", str(tmp_path)]) == 0
    requests = json.loads((tmp_path / "results.json").read_text())["requests"]
    assert all(len({row[kind] for row in requests}) > 4 for kind in ("prompt_tokens", "tokens"))
    assert max(row["prompt_tokens"] + row["tokens"] for row in requests) <= 2048


def test_refused_requests_end_the_bench_with_the_servers_words(
    server: OwnServer, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--concurrency", "1", "--num-prompts", "1", "--extra-body", '{"logprobs": true}']
    assert main(["--base-url", server.url, *load]) == 1
    assert "every request to 127.0.0.1" in (said := capsys.readouterr().err) and "HTTP 400: " in said


def test_what_was_measured_before_a_server_failed_is_still_told(
    server: OwnServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = http.measure

    def measure(*arguments: Any) -> Cell:
        if arguments[3].concurrency > 1:
            raise ServerError("it is gone")
        return measured(*arguments)

    monkeypatch.setattr(http, "measure", measure)
    load = ["--concurrency", "1,2", "--num-prompts", "1", "--max-rounds", "1"]
    assert main(["--base-url", server.url, *load]) == 1
    told = capsys.readouterr()
    assert "| math | 0 | 1 |" in told.out and "error: it is gone" in told.err


def test_some_failed_requests_are_shown_and_end_with_1(
    server: OwnServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "one two"}\n' + json.dumps({"prompt": "word " * 3000}) + "\n")
    load = ["--dataset", str(asked), "--concurrency", "2", "--num-prompts", "2", "--max-rounds", "1"]
    assert main(["--base-url", server.url, *load, "--max-tokens", "4"]) == 1
    assert "asked, 2 at once: 2 requests to" in (told := capsys.readouterr().out) and "HTTP 400" in told


def test_a_published_evaluation_is_asked(server: OwnServer, tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    data.write_text('{"question": "What is 3 + 4?", "answer": "3 + 4 = <<3+4=7>>7\\n#### 7"}\n')
    load = ["--concurrency", "1", "--num-prompts", "1", "--max-rounds", "1", "--out", str(tmp_path)]
    assert main(["--base-url", server.url, "--dataset", str(data), *load]) == 0
    assert {row["dataset"] for row in json.loads((tmp_path / "results.json").read_text())["requests"]} == {"gsm8k"}


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("--base-url http://127.0.0.1:9", 1, "http://127.0.0.1:9 cannot be reached"),
        ("--dataset nowhere.jsonl", 2, "nowhere.jsonl: no such file"),
        ("--dataset demo:poetry", 2, "no domain 'poetry'"),
        ("--compare plain,fast", 2, "no variant 'fast'"),
        ("--compare plain,plain", 2, "a variant is there twice"),
        ("--base-url http://a --compare plain", 2, "--base-url names servers that run"),
        ("--base-url http://a --base-url http://a", 2, "need different names"),
        ("--serve-args=--port=1", 2, "--serve-args --port=1"),
        ("--compare plain --serve-args=--frobnicate", 1, "the server plain did not start: error: unknown flag"),
        ("--out /proc/x", 2, "--out /proc/x"),
        ("--concurrency 1,2 --num-prompts 4,5,6", 2, "--num-prompts 4,5,6: there are 2 loads"),
        ("--base-url http://a --serve-args=--x", 2, "start our own"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: str, code: int, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == code
    told = capsys.readouterr().err
    assert error in told and "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--concurrency 0", "not a whole number from 1 on"),
        ("--concurrency 1,x", "not a whole number from 1 on"),
        ("--tight nan", "not a number from 0 on"),
        ("--temperature 0,x", "not a number from 0 on"),
        ("--request-rate 0", "more than 0 requests a second"),
        ("--goodput speed:5", "none of ttft:MS"),
        ("--base-url localhost:1", "not URL or NAME=URL"),
        ("--extra-body [1]", "not a JSON object"),
        ("--dataset demo --input-len 5", "exclude each other"),
        ("--dataset demo --lengths sharegpt", "exclude each other"),
        ("--lengths sharegpt --output-len 5", "exclude each other"),
        ("--lengths sharegpt --len-spread 1", "--len-spread is of --input-len and --output-len"),
        ("--len-spread 1", "--len-spread is of --input-len and --output-len"),
        ("--input-len 5 --len-spread 1,2,3", "not a number for prompts and one for answers"),
        ("--lengths alpaca", "invalid choice"),
        ("eval", "unexpected argument eval"),
    ],
)
def test_flags_that_cannot_be_are_refused(arguments: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize("name", [[], ["http"], ["serve"]])
def test_help_lists_the_flags_by_every_name(name: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name, "--help"])
    assert "--base-url" in capsys.readouterr().out


def test_a_spread_is_of_prompts_and_answers_or_one_of_each() -> None:
    assert flags.spreads("0.5") == (0.5, 0.5) and flags.spreads("1.2,0") == (1.2, 0.0)


def test_variants_are_flags_of_serve() -> None:
    assert flags_of("plain") == ("--no-speculation",)
    assert flags_of("dflash") == ("--verify", "full")
    assert flags_of("k=4") == ("--verify", "4")
    assert flags_of("b=8") == ("--verify", "full", "--speculative-dflash-block-size", "8")
    with pytest.raises(ConfigError):
        flags_of("k=0")


def test_own_servers_end_with_whatever_ends_the_bench() -> None:
    with pytest.raises(KeyboardInterrupt), OwnServer("plain", []) as own:
        raise KeyboardInterrupt
    assert own.process.returncode is not None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own.url}/live", timeout=600)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_bench_that_is_killed_leaves_no_server() -> None:
    program = (
        "import sys, time\nfrom tools.bench.own_server import ServerProcess\n"
        "with ServerProcess('plain', [sys.executable, '-c', 'import time; time.sleep(600)'], 1) as server:\n"
        "    print(server.process.pid, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        server = Path(f"/proc/{int(bench.stdout.readline())}/cmdline")
        assert server.read_bytes()
        bench.kill()
    deadline = time.monotonic() + 60
    while server.exists() and server.read_bytes():  # a zombie has no command line
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("of_sigint", [signal.default_int_handler, signal.SIG_IGN], ids=["front", "background"])
def test_signals_and_troubles_become_exit_codes(capsys: pytest.CaptureFixture[str], of_sigint: Any) -> None:
    before, before_int = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, of_sigint)

    def told_to_end() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    def troubled() -> int:
        raise ServerError("it is gone", "look for it")

    try:
        assert guarded(told_to_end) == 130 and guarded(troubled) == 1
    finally:
        signal.signal(signal.SIGINT, before_int)
    assert capsys.readouterr().err == "interrupted\nerror: it is gone\nhint: look for it\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_bench_loads_no_torch() -> None:
    code = "import sys, tools.bench.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
