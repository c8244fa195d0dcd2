"""Whichever rank of an engine dies or hangs, clients get a sentence, no process is left, and the next engine serves."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.fast.api.served import PATIENCE, until
from tests.server.demo import ENDLESS, ROOM, children, is_gone, process, ready

LEADER, FOLLOWER = "app.engine.process", "app.engine.ranks.follower"
FLAGS = ("--verify", "full", "--max-num-seqs", "2", *ROOM)
TWO = ("--tensor-parallel-size", "2", *FLAGS)
FOUR = ("--tensor-parallel-size", "4", *FLAGS)
"""More ranks than the demo pair has KV heads."""
SHORT = {"model": "demo", "prompt": "1 2 3 4", "min_tokens": 8, "max_tokens": 8}
HANG_SECONDS = 15
"""Seconds of the tests that wait for them, in which every step is done on a slow machine too."""


def processes() -> dict[int, int]:
    """Return the processes of the ranks that descend from this one, by rank."""
    found, own = dict[int, int](), [os.getpid()]
    for pid in own:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            own += children(pid)
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if FOLLOWER in words:
                found[int(words[words.index(FOLLOWER) + 1])] = pid
            elif LEADER in words:
                found[0] = pid
    return found


@pytest.mark.parametrize(
    ("size", "victim", "number", "said"),
    [
        (4, 3, signal.SIGKILL, "rank 3 was killed by SIGKILL, so the engine ends"),
        (2, 1, signal.SIGSTOP, f"no step result within {HANG_SECONDS} s"),
        (2, 0, signal.SIGKILL, "the engine process was killed by SIGKILL"),
        (2, 0, signal.SIGSTOP, f"no step result within {HANG_SECONDS} s"),
    ],
    ids=["last of four killed", "follower stopped", "rank 0 killed", "rank 0 stopped"],
)
def test_the_end_of_a_rank_under_load_is_told_and_the_next_engine_serves(
    size: int, victim: int, number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if victim and number == signal.SIGKILL:
        customize(tmp_path, monkeypatch, LAST_WORDS)
    timeout = HANG_SECONDS if number == signal.SIGSTOP else 10 * PATIENCE
    told_and_served_again(lambda ranks: os.kill(ranks[victim], number), said, size, "--step-timeout", f"{timeout}")


def customize(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let each process of a server run this code first."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))


LAST_WORDS = f"""
import sys

if "serve" in sys.orig_argv:
    from app.engine_client import link

    link._LAST_WORDS_SECONDS = {PATIENCE}
if "{LEADER}" in sys.orig_argv:
    from app.engine.ranks.leader import Followers

    wait = Followers.wait_for_end
    Followers.wait_for_end = lambda followers, seconds: wait(followers, {PATIENCE})
"""
"""The last words of a rank are waited for, because a slow machine tells of its end first."""
PLANTED = """
import sys
from pathlib import Path

if "app.engine.ranks.follower" in sys.orig_argv:
    from app.engine.step.runner import ModelRunner

    own, folder = ModelRunner.launch, Path(__file__).parent

    class Failed:
        def read(self):
            raise RuntimeError("CUDA error: planted")

    def launch(runner, inputs):
        if (folder / "raise").exists():
            (folder / "raise").unlink()
            raise ZeroDivisionError("planted")
        if (folder / "fail later").exists():
            (folder / "fail later").unlink()
            return Failed()
        return own(runner, inputs)

    ModelRunner.launch = launch
"""


@pytest.mark.parametrize(
    ("order", "told"), [("raise", "ZeroDivisionError: planted"), ("fail later", "RuntimeError: CUDA error: planted")]
)
def test_an_exception_in_a_follower_is_told_and_the_next_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, told: str
):
    """A device that fails behind the launch leaves rank 0 in a collective, and the follower with nothing to do."""
    customize(tmp_path, monkeypatch, LAST_WORDS + PLANTED)
    told = f"rank 1 ended with exit code 1: {told}, so the engine ends"
    told_and_served_again(lambda _: (tmp_path / order).touch(), told)


def told_and_served_again(end: Callable[[dict[int, int]], None], said: str, size: int = 2, *flags: str) -> None:
    """Assert that the stream in which `end` breaks a rank tells `said`, and that a new engine says the same text."""
    with (
        ready("demo", *(FOUR if size == 4 else TWO), *flags) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        whole = client.post("/v1/completions", json=SHORT).json()
        ranks = processes()
        assert ranks.keys() == set(range(size))
        with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
            events = response.iter_lines()
            assert next(events).startswith("data: ")
            end(ranks)
            rest = "\n".join(events)
        assert said in rest and "[DONE]" not in rest
        until(lambda: all(is_gone(pid) for pid in ranks.values()))
        until(lambda: client.get("/ready").status_code == 200)
        again = client.post("/v1/completions", json=SHORT).json()
        assert again["choices"][0]["text"] == whole["choices"][0]["text"]
        assert processes().keys() == set(range(size))
        last = processes()
    until(lambda: all(is_gone(pid) for pid in last.values()))
    assert not processes()


def test_a_follower_that_dies_without_work_is_told_too():
    with ready("demo", *TWO) as url:
        os.kill(processes()[1], signal.SIGKILL)
        until(lambda: "rank 1 was killed by SIGKILL" in httpx.get(f"{url}/ready", timeout=PATIENCE).text)
        until(lambda: httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 200)


def test_a_server_that_is_killed_leaves_no_rank_that_was_stopped():
    """A stopped process does not read that its parent is gone."""
    with process("demo", *TWO) as (_, server):
        ranks = processes()
        for pid in ranks.values():
            os.kill(pid, signal.SIGSTOP)
        server.kill()
        until(lambda: all(is_gone(pid) for pid in ranks.values()))
    assert ranks.keys() == {0, 1}


def test_sigterm_lets_four_ranks_finish_what_runs_and_leaves_none():
    ask = {"model": "demo", "prompt": "1 2 3 4", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with (
        process("demo", *FOUR, "--shutdown-timeout", f"{PATIENCE}") as (url, server),
        httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=PATIENCE) as response,
    ):
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        ranks = processes()
        server.send_signal(signal.SIGTERM)
        rest = "\n".join(events)
        assert server.wait(PATIENCE) == 0
    assert '"finish_reason":"length"' in rest and rest.rstrip().endswith("data: [DONE]")
    assert ranks.keys() == set(range(4))
    until(lambda: all(is_gone(pid) for pid in ranks.values()))


SLOW = """
import sys
import time

if "app.engine.process" in sys.orig_argv:
    from app.engine.load import engine

    engine.with_pages = lambda *_: time.sleep(1000)
"""


def test_a_setting_that_a_rank_refuses_before_rank_0_does_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    customize(tmp_path, monkeypatch, LAST_WORDS + SLOW)
    flags = "--device cpu --port 0 -tp 2 --kv-cache-memory 1MiB --max-model-len 2048".split()
    command = [sys.executable, "-m", "app", "serve", "demo", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: rank 1 ended with exit code 2: 1 MiB for KV hold")
