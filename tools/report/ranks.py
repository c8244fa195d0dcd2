"""Sums between the devices of this host: how long one takes, eagerly and in a graph, and the order of its additions. On
NPUs also one between two calls of attention in a graph.

Each rank is a process: `python -m tools.report.ranks WHAT DEVICE SIZE RANK STORE SECONDS`. See
app/check/collectives.py.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from app.check import collectives
from app.check.collectives import HIDDEN, Case, local_rows, measured_sum, seconds_each
from app.engine.comm.comm import Comm
from app.engine.device.base import AttentionMask, Backend
from app.engine.device.comparison import TOLERANCE, Inputs, Paged
from app.engine.device.factory import make_backend
from app.engine.errors import UnsupportedError
from app.engine.npu.error_codes import explain
from app.engine.npu.rules import AIV, EXPANSION_MODE
from tools.report.part import NotTriedError, Options, Part, Result
from tools.report.timing import graph_apart, seconds_in_a_graph

COMMAND = (sys.executable, "-P", "-m", "tools.report.ranks")
SIZES = (2, 4, 8)
SECONDS = {"npu": 600.0, "cuda": 60.0}
"""Time for all sums of one number of ranks. Communicators of a first run on NPUs take a minute."""


def parts(options: Options) -> list[Part]:
    """Return a part for 2, 4 and 8 ranks, as far as there are devices."""
    sums = [Part(f"{size} ranks", partial(summed, options, size)) for size in SIZES]
    beside = Part("2 ranks, attention in the graph", partial(with_attention, options))
    return [beside, *sums] if options.kind == "npu" else sums


def with_attention(options: Options, command: Sequence[str] = (*COMMAND, "attention")) -> Result:
    """Say if graphs of two ranks can be served, whose attention is updated between sums."""
    _check_ranks(options, 2)
    mode = f"{EXPANSION_MODE}={os.environ.get(EXPANSION_MODE, AIV)}"
    try:
        (case,) = collectives.measured(options.device, 2, SECONDS[options.kind], command)
    except RuntimeError as error:
        meaning = f" ({said})" if (said := explain(str(error))) else ""
        found = f"With {mode} it fails: {error}{meaning}. Give another {EXPANSION_MODE}, or serve with --enforce-eager."
        return {"found": found, "passed": False}
    verdict = "right" if case["passed"] else "WRONG: give another mode, or serve with --enforce-eager; it is"
    return {"found": f"With {mode} the result is {verdict}, to {case['error_of_largest']:.4g}.", **case}


def _check_ranks(options: Options, size: int) -> None:
    """Raise NotTriedError where there are too few devices."""
    try:
        make_backend(options.device).check_ranks(size)
    except UnsupportedError as error:
        raise NotTriedError(str(error)) from None


def summed(options: Options, size: int) -> Result:
    _check_ranks(options, size)
    cases = collectives.measured(options.device, size, SECONDS[options.kind], (*COMMAND, "sums"))
    first, last = cases[0], cases[-1]
    bits = "depend" if not all(case["same_bits_alone"] for case in cases) else "do not depend"
    passed = [case.pop("passed") for case in cases]
    return {
        "found": f"a sum of {first['rows']} row takes {first['eager_us']:.4g} us, of {last['rows']} rows "
        f"{last['eager_us']:.4g} us; the bits of a row {bits} on the other rows",
        "passed": all(passed),
        "cases": cases,
    }


@torch.inference_mode()
def measure(backend: Backend, comm: Comm, rows: Sequence[int], hidden: int = HIDDEN) -> list[Case]:
    """Return the cases of `check`, with what the bits of a sum depend on, and its time in a graph."""
    local = local_rows(backend, comm, max(rows), hidden)
    first_row = comm.all_reduce(local[:1].clone()).clone()
    return [
        measured_sum(backend, comm, local[:count].clone()) | _bits(backend, comm, local[:count].clone(), first_row)
        for count in rows
    ]


@torch.inference_mode()
def attend_beside_sums(backend: Backend, comm: Comm, rows: Sequence[int]) -> list[Case]:
    """Return the error of attention, a sum and attention in a graph, over replays with new lengths, against the same
    code launched eagerly. On some versions the capture fails, or the replay hangs (vllm-ascend's issue 13688)."""
    at = Inputs(backend, backend.defaults.dtype, backend.defaults.dtype)
    mask = AttentionMask(causal=True)
    call = Paged([(16, 300), (16, 300)], 32, 8, 128, mask, backend.defaults.page_size)(at)

    def run() -> tuple[Tensor, ...]:
        return (replace(call, q=comm.all_reduce(call()))(),)

    graph = backend.capture(run, [call.meta])
    errors = []
    for kv_lens in ([300, 129], [16, 257]):
        meta = replace(call.meta, host_seq_lens=kv_lens)
        call.meta.plans = {mask: backend.plan_attention(meta, mask, 4)}
        (wanted,) = run()
        graph.replay()
        errors.append(float((graph.outputs[0].float() - wanted.float()).abs().max() / wanted.float().abs().max()))
    error = max(errors)
    taken = seconds_each(backend, graph.replay, calls=1, repeats=10)
    return [{"replay_us": 1e6 * taken, "error_of_largest": error, "passed": error < TOLERANCE}]


MEASURES: dict[str, collectives.Measure] = {"sums": measure, "attention": attend_beside_sums}


def main(what: str, *arguments: str) -> int:
    return collectives.main(arguments, MEASURES[what])


def _bits(backend: Backend, comm: Comm, local: Tensor, first_row: Tensor) -> Case:
    """Say whether the bits of the sum of all ranks' `local` [R, H] depend on anything but its numbers.

    `first_row` [1, H] is the sum of the first rows only.
    """
    parts = comm.all_gather(local).clone()
    in_order = parts[0].clone()
    for part in parts[1:]:
        in_order += part
    total = comm.all_reduce(local.clone()).clone()
    again = [comm.all_reduce(local.clone()).clone() for _ in range(3)]
    totals = comm.all_gather(total).clone()
    graph = _from_a_graph(backend, comm, parts[comm.rank])
    return {
        "captured_us": graph and 1e6 * graph[0],
        "same_bits_again": all(torch.equal(total, other) for other in again),
        "same_bits_captured": graph and torch.equal(total, graph[1]),
        "same_bits_alone": torch.equal(total[:1], first_row),
        "same_bits_on_all_ranks": all(torch.equal(total, other) for other in totals),
        "added_in_order_of_ranks": torch.equal(total, in_order),
    }


def _from_a_graph(backend: Backend, comm: Comm, local: Tensor) -> tuple[float, Tensor] | None:
    """Return seconds of a sum among others in a graph, and the sum itself, or None for a device without graphs."""
    if not backend.captures:
        return None
    input = local.clone()

    def once() -> tuple[Tensor, ...]:
        input.copy_(local)
        return (comm.all_reduce(input),)

    graph = graph_apart(backend, once)
    graph.replay()
    total = graph.outputs[0].clone()
    return seconds_in_a_graph(backend, lambda: comm.all_reduce(input)), total


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # the interpreter's exit may hang
