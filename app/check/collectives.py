"""Collectives between devices of this host: `python -m app.check.collectives DEVICE SIZE RANK STORE SECONDS`.

Each rank is a process of its own, started by `measured`. It writes `{"cases"}` or `{"error"}` to stdout as one line of
JSON. Output of libraries goes to stderr. Checked over Gloo and on stub libraries; not run on several devices.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.check.timing import seconds_each
from app.engine.comm.comm import Comm
from app.engine.comm.process_group import Meeting
from app.engine.device.base import Backend
from app.engine.device.factory import make_backend

COMMAND = (sys.executable, "-P", "-m", "app.check.collectives")
ROWS = (1, 16, 64, 512, 4096)
"""Rows of a sum: one decoding sequence, blocks of 1, 4 and 32, and a chunk of a prompt."""
FEW_ROWS = ROWS[:3]
HIDDEN = 4096
"""Hidden size of Qwen3-8B."""
CALLS = 20
"""Sums in a graph that is timed, as in ten layers."""
TOLERANCE = 2e-2
"""Largest error of a bfloat16 sum as a share of the largest value; each addition rounds by 2^-9."""

Case = dict[str, Any]


def measured(device: str, size: int, seconds: float, command: Sequence[str] = COMMAND) -> list[Case]:
    """Return what rank 0 of `size` ranks measures from `device` on.

    Raises RuntimeError with the words of a rank that fails, or that has not ended within `seconds`.
    """
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "ranks")
        processes = [
            subprocess.Popen(
                [*command, device, str(size), str(rank), store, str(max(1, int(seconds)))],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < ends:
                if any(process.poll() for process in processes):
                    break
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


@torch.inference_mode()
def measure(backend: Backend, comm: Comm, rows: Sequence[int], hidden: int = HIDDEN) -> list[Case]:
    """Return a case for each number of rows. All ranks make the same calls."""
    generator = torch.Generator().manual_seed(comm.rank)
    own = torch.randn(max(rows), hidden, generator=generator).to(backend.device, backend.defaults.dtype)
    alone = comm.all_reduce(own[:1].clone()).clone()
    return [_case(backend, comm, own[:count].clone(), alone) for count in rows]


def _case(backend: Backend, comm: Comm, own: Tensor, alone: Tensor) -> Case:
    """Return latencies of the sum of all ranks' `own` [R, H], and if its bits depend on anything but its numbers.

    `alone` [1, H] is the sum of the first rows, made without others beside them.
    """
    parts = comm.all_gather(own).clone()
    in_order = parts[0].clone()
    for part in parts[1:]:
        in_order += part
    exact = parts.cpu().double().sum(0)
    total = comm.all_reduce(own.clone()).clone()
    again = [comm.all_reduce(own.clone()).clone() for _ in range(3)]
    of_ranks = comm.all_gather(total).clone()
    error = float((total.cpu().double() - exact).abs().max() / exact.abs().max())
    eager = seconds_each(backend, lambda: comm.all_reduce(own), calls=4, repeats=10)
    graph = _from_a_graph(backend, comm, parts[comm.rank])
    return {
        "rows": len(own),
        "eager_us": 1e6 * eager,
        "captured_us": graph and 1e6 * graph[0],
        "same_bits_again": all(torch.equal(total, other) for other in again),
        "same_bits_captured": graph and torch.equal(total, graph[1]),
        "same_bits_alone": torch.equal(total[:1], alone),
        "same_bits_on_all_ranks": all(torch.equal(total, other) for other in of_ranks),
        "added_in_order_of_ranks": torch.equal(total, in_order),
        "error_of_largest": error,
        "passed": error < TOLERANCE,
    }


def _from_a_graph(backend: Backend, comm: Comm, own: Tensor) -> tuple[float, Tensor] | None:
    """Return seconds of a sum among CALLS in a graph, and the sum itself, or None for a device without graphs."""
    if not backend.captures:
        return None
    place = own.clone()

    def first() -> tuple[Tensor, ...]:
        place.copy_(own)
        return (comm.all_reduce(place),)

    def many() -> tuple[Tensor, ...]:
        for _ in range(CALLS):
            comm.all_reduce(place)
        return ()

    graph = backend.capture(first, [])
    graph.replay()
    total = graph.outputs[0].clone()
    timed = backend.capture(many, [])
    return seconds_each(backend, timed.replay, calls=1, repeats=10) / CALLS, total


def _error(said: str) -> str:
    """Return the error in the last line of a rank, or nothing. Libraries may have written before."""
    try:
        return str(json.loads(said.splitlines()[-1])["error"])
    except (ValueError, LookupError):
        return ""


def main(arguments: Sequence[str]) -> int:
    device, *numbers = arguments
    size, rank, store, seconds = int(numbers[0]), int(numbers[1]), Path(numbers[2]), int(numbers[3])
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        try:
            backend = make_backend(device, rank=rank)
            comm = backend.join(Meeting(rank, size, store, seconds))
            answer: dict[str, Any] = {"cases": measure(backend, comm, FEW_ROWS if backend.memory_is_host else ROWS)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=lines, flush=True)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # A process group may wait for ever at the interpreter's own exit.
