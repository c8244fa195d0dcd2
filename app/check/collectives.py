"""Sums between devices of this host: `python -m app.check.collectives DEVICE SIZE RANK STORE SECONDS`.

`measured` starts a process for each rank, which writes `{"cases"}` or `{"error"}` to stdout as one line of JSON. Output
of libraries goes to stderr. Checked over Gloo and on stub libraries; not run on several devices.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from app.engine.comm.comm import Comm, Meeting
from app.engine.device.base import Backend
from app.engine.device.comparison import TOLERANCE
from app.engine.device.factory import make_backend

COMMAND = (sys.executable, "-P", "-m", "app.check.collectives")
ROWS = (1, 16, 64, 512, 4096)
"""Rows of a sum: one decoding sequence, blocks of 1, 4 and 32, and a chunk of a prompt."""
FEW_ROWS = ROWS[:3]
HIDDEN = 4096  # of Qwen3-8B

Case = dict[str, Any]
Measure = Callable[[Backend, Comm, Sequence[int]], list[Case]]


def measured(device: str, size: int, seconds: float, command: Sequence[str] = COMMAND) -> list[Case]:
    """Return what rank 0 of `size` ranks measures from `device` on.

    Raises RuntimeError with the words of a rank that fails, or that has not ended within `seconds`.
    """
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        numbers = str(Path(folder) / "ranks"), str(max(1, int(seconds)))
        processes = [
            subprocess.Popen([*command, device, str(size), str(rank), *numbers], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            codes = [process.poll() for process in processes]
            while None in codes and not any(codes) and time.monotonic() < ends:
                time.sleep(0.05)
                codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
        said = [process.communicate()[0].strip() for process in processes]
    for rank, code in enumerate(codes):
        if code:
            raise RuntimeError(f"rank {rank}: {_error(said[rank]) or f'its process ended with exit code {code}'}")
    if None in codes:
        raise RuntimeError(f"rank {codes.index(None)} of {size} has not ended within {seconds:.0f} s")
    cases: list[Case] = json.loads(said[0].splitlines()[-1])["cases"]
    return cases


def measure(backend: Backend, comm: Comm, rows: Sequence[int], hidden: int = HIDDEN) -> list[Case]:
    """Return a case for each number of rows. All ranks make the same calls."""
    local = local_rows(backend, comm, max(rows), hidden)
    return [measured_sum(backend, comm, local[:count].clone()) for count in rows]


def local_rows(backend: Backend, comm: Comm, rows: int, hidden: int) -> Tensor:
    """Return random numbers [rows, hidden] that differ between ranks."""
    generator = torch.Generator().manual_seed(comm.rank)
    return torch.randn(rows, hidden, generator=generator).to(backend.device, backend.defaults.dtype)


@torch.inference_mode()
def measured_sum(backend: Backend, comm: Comm, local: Tensor) -> Case:
    """Return the error of an all-reduce of each rank's `local` [R, H], and the time of one that is launched eagerly."""
    exact = comm.all_gather(local).cpu().double().sum(0)
    total = comm.all_reduce(local.clone())
    error = float((total.cpu().double() - exact).abs().max() / exact.abs().max())
    eager = seconds_each(backend, lambda: comm.all_reduce(local), calls=4, repeats=10)
    return {"rows": len(local), "eager_us": 1e6 * eager, "error_of_largest": error, "passed": error < TOLERANCE}


def seconds_each(backend: Backend, run: Callable[[], object], calls: int, repeats: int) -> float:
    """Return seconds of one `run` by the host's clock, launching included.

    It is the median over `repeats` of `calls` that are queued together, and waited for with a copy after them.
    """
    last = torch.zeros(1, device=backend.device)
    run()
    backend.start_download(last)()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            run()
        backend.start_download(last)()
        taken.append((time.perf_counter() - started) / calls)
    return median(taken)


def _error(said: str) -> str:
    """Return the error in the last line of a rank, or nothing. Libraries may have written before."""
    try:
        return str(json.loads(said.splitlines()[-1])["error"])
    except (ValueError, LookupError):
        return ""


def main(arguments: Sequence[str], measure: Measure = measure) -> int:
    device, size, rank, store, seconds = arguments
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        try:
            backend = make_backend(device, rank=int(rank))
            comm = backend.join(Meeting(int(rank), int(size), Path(store), int(seconds)))
            answer: dict[str, Any] = {"cases": measure(backend, comm, FEW_ROWS if backend.memory_is_host else ROWS)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=lines, flush=True)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # A process group may hang when the interpreter exits.
