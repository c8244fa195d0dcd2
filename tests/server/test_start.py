"""Starts of the real server: commands as they are published elsewhere, and exit codes of those that cannot be used."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from app.engine.checkpoint.files import DEMO
from tests.fast.api.served import PATIENCE, until
from tests.server.demo import is_gone, ready

VLLMS = f"""{DEMO}/target --speculative-config '{{"method": "dflash", "model": "{DEMO}/draft",
    "num_speculative_tokens": 15}}' --attention-backend flash_attn --max-num-batched-tokens 32768"""
SGLANGS = f"""--model-path {DEMO}/target --speculative-algorithm DFLASH --speculative-draft-model-path {DEMO}/draft
    --speculative-num-draft-tokens 16 --tp-size 1 --attention-backend trtllm_mha --speculative-draft-attention-backend
    fa4 --mem-fraction-static 0.75 --mamba-scheduler-strategy extra_buffer --trust-remote-code"""


@pytest.mark.parametrize("command", [VLLMS, SGLANGS], ids=["vLLM", "SGLang"])
def test_a_command_of_dflashs_own_readme_serves_with_drafts(command: str) -> None:
    with ready(*shlex.split(command), "--served-model-name", "demo") as url:
        ask = {"model": "demo", "prompt": "1 2 3 4", "max_tokens": 16, "include_speculation": True}
        answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=PATIENCE).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert httpx.get(f"{url}/server_info", timeout=PATIENCE).json()["draft_block_size"] == 16


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--kv-cache-memory 10 --mamba-scheduler-strategy no_buffer", "one sequence of --max-model-len 2048 needs"),
        ("--device cuda:99", "--device cuda:99: this torch"),
    ],
)
def test_what_only_the_engine_can_refuse_exits_with_2_too(flags: str, said: str) -> None:
    command = [sys.executable, "-m", "app", "serve", "demo", "--port", "0", "--device", "cpu", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2 and last.startswith("error: ") and said in last
    noted = "--mamba-scheduler-strategy no_buffer: nothing to set, the device decides"
    assert (noted in done.stderr) is ("--mamba" in flags)


COMPILER = """#!/bin/sh
case "$1" in
--version) echo "g++ 99" ;;
*) echo $$ >> "$(dirname "$0")/compiling"; exec sleep 1000 ;;
esac
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_start_that_is_stopped_while_it_compiles_leaves_neither_a_folder_nor_a_compiler(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Without a cache that can be written, code is compiled in a temporary folder."""
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="dft-", dir="/tmp") as temporary:
        environment = {"CXX": str(compiler), "XDG_CACHE_HOME": "/proc/none", "TMPDIR": temporary}
        command = [sys.executable, "-m", "app", "serve", "demo", "--port", "0", "--device", "cpu"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | environment) as server:
            until(lambda: (tmp_path / "compiling").exists())
            assert list(Path(temporary).rglob("work-*"))
            server.send_signal(number)
            assert server.wait(PATIENCE) == 0
        assert not list(Path(temporary).iterdir())
    compilers = [int(pid) for pid in (tmp_path / "compiling").read_text().split()]
    until(lambda: all(is_gone(pid) for pid in compilers))
