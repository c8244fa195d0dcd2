"""Engines whose ranks are processes, for tests.

A program calls `start`, and is rank 0 of one engine after another or a follower. Every rank notes a digest of what it
verified in each step.
"""

import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from app.config.engine import EngineConfig
from app.engine.load.engine import Engine, build_engine
from app.engine.ranks import follower
from app.engine.ranks.leader import Followers
from app.engine.step.inputs import StepInputs
from app.engine.step.runner import ModelRunner, PendingStep
from app.messages import Request
from app.wire import encode_config

Job = tuple[EngineConfig, list[Request]]
PATIENCE = 1500


class Result(NamedTuple):
    """Result of a job, and the digests of each rank."""

    run: Any
    digests: list[list[str]]


def run_on_ranks(jobs: Sequence[Job], folder: Path, program: str, **environment: str) -> list[Result]:
    """Return the results of jobs, one after another, each on as many processes as its config says.

    `program` is a module that calls `start`.
    """
    (path := folder / "jobs").write_bytes(pickle.dumps(list(jobs)))
    done = subprocess.run(
        [sys.executable, "-m", program, str(path)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [Result(*each) for each in pickle.loads((folder / "results").read_bytes())]


def start(program: str, run: Callable[[Engine, list[Request]], Any]) -> None:
    """Run jobs by `run` on rank 0, or follow the one that started this `program`."""
    if sys.argv[1].isdecimal():
        note_digests(Path(sys.argv[2].removeprefix("ipc://")).parent / f"digests-{sys.argv[1]}")
        follower.main()
    else:
        main(Path(sys.argv[1]), program, run)


def main(jobs: Path, program: str, run: Callable[[Engine, list[Request]], Any]) -> None:
    results = []
    for number, (config, requests) in enumerate(pickle.loads(jobs.read_bytes())):
        (folder := jobs.parent / str(number)).mkdir()
        note_digests(folder / "digests-0")
        command = (sys.executable, "-m", program)
        size = config.tensor_parallel_size
        followers = Followers(encode_config(config) + "\n", size, folder, leave, command)
        found = run(build_engine(config, join=followers.join), requests)
        digests = digests_of(folder, size)
        followers.close()
        dist.destroy_process_group()
        results.append((found, digests))
    (jobs.parent / "results").write_bytes(pickle.dumps(results))


def digests_of(folder: Path, size: int) -> list[list[str]]:
    """Return the digests of all ranks, once each has noted the last step of rank 0."""
    end = time.monotonic() + PATIENCE
    while True:
        digests = [(folder / f"digests-{rank}").read_text().split() for rank in range(size)]
        if len({len(each) for each in digests}) == 1 or time.monotonic() > end:
            return digests
        time.sleep(0.05)


def leave(reason: str) -> None:
    print(reason, flush=True)
    os._exit(1)


LAUNCH: Callable[..., PendingStep] = ModelRunner.launch


def note_digests(path: Path) -> None:
    """Add a line to `path` for each step of this process."""

    def launch(runner: ModelRunner, inputs: StepInputs) -> PendingStep:
        pending = LAUNCH(runner, inputs)
        with path.open("a") as file:
            print(hashlib.sha256(repr(pending.read()).encode()).hexdigest(), file=file)
        return pending

    patched: Any = ModelRunner
    patched.launch = launch
