"""Probes of a device and its host: `python -m app.check.probes DEVICE [RANKS]`, which `check` starts.

The process writes the names of all probes to stdout as one line of JSON. A line follows for each probe in turn:
`{"name", "status", "found", "hint"}`. DEVICE is one that the settings know. Output of libraries goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING

from app.engine.cpu import host_probes as cpu_host
from app.engine.cuda import host_probes as cuda_host
from app.engine.device.probe import Finding, Probe, failed, ok, warning
from app.engine.npu import host_probes as npu_host
from app.engine.npu.error_codes import explain
from app.engine.npu.torch_build import CPU_INDEX, has_npu

if TYPE_CHECKING:
    from app.engine.device.base import Backend

OPERATORS = (
    "causal_attention bidirectional_attention sliding_attention write_kv rms_norm add_rms_norm rope linear gated_mlp "
    "moe qkv_into_kv context_into_kv commit_and_verify commit_prompts embed_blocks positions_and_slots verify "
    "advance_by_accepted"
).split()
"""Names of the cases in app/check/operators.py, which imports torch."""
MEMORY_SHARE = 0.9
"""The default of --memory-utilization."""
GIB = 1 << 30
RANKS_SECONDS = 240.0  # for all ranks to meet and add up, less than a probe has


def main(device: str, *ranks: str) -> None:
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        asked = probes(device, *map(int, ranks))
        print(json.dumps([probe.name for probe in asked]), file=lines, flush=True)
        for name, finding in run(asked):
            print(json.dumps({"name": name} | asdict(finding)), file=lines, flush=True)


def run(asked: Iterable[Probe]) -> Iterator[tuple[str, Finding]]:
    """Ask one probe after the other. A probe without what it needs is not tried; one that raises has failed."""
    missing: dict[str, str] = {}
    for probe in asked:
        without = next((missing[name] for name in probe.needs if name in missing), None)
        finding = Finding("not tried", without) if without else _ask(probe)
        if finding.status in ("failed", "not tried"):
            missing[probe.name] = without or probe.without
        yield probe.name, finding


def _ask(probe: Probe) -> Finding:
    try:
        return probe.ask()
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        return failed(f"{type(error).__name__}: {message}", explain(str(error)) or "report it with this output")


def probes(device: str, ranks: int = 1) -> list[Probe]:
    """Return the probes of a device, each after those that it needs. "auto" is the device that `serve` would take.

    Several `ranks` have a device each, from this one on, and a collective is tried between them.
    """
    settled = _settled(device)
    kind = settled.partition(":")[0]
    hosts: dict[str, Callable[[str], list[Probe]]] = {
        "cpu": cpu_host.probes,
        "cuda": cuda_host.probes,
        "npu": partial(npu_host.probes, ranks=ranks),
    }

    @cache
    def opened() -> "Backend":
        from app.engine.device.factory import make_backend

        return make_backend(settled)

    return [
        *([Probe("device", lambda: ok(f"auto is {settled} here"))] if device == "auto" else []),
        Probe("torch", partial(torch_build, kind), without="torch cannot be used"),
        *hosts[kind](settled),
        Probe("backend", lambda: backend(opened()), ("torch", "devices", "compiler"), "the backend cannot be opened"),
        Probe("memory", lambda: memory(opened()), ("backend",)),
        *(Probe(name, partial(_operator, opened, name), ("backend",)) for name in OPERATORS),
        *([Probe("all_reduce", lambda: all_reduce(opened(), settled, ranks), ("backend",))] if ranks > 1 else []),
    ]


def torch_build(kind: str) -> Finding:
    """Check that this torch can drive a "cpu", "cuda" or "npu"."""
    try:
        import torch
    except Exception as error:
        return failed(f"torch cannot be loaded: {str(error).strip().partition(chr(10))[0]}", "install torch again")
    build = f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'} build"
    base = torch.__version__.partition("+")[0]
    if kind == "npu" and torch.version.cuda:
        hint = f"pip install --index-url {CPU_INDEX} torch=={base}"
        return failed(f"{build}: torch_npu works with a CPU build only", hint)
    if kind == "cuda" and not torch.version.cuda:
        return failed(f"{build}: it knows no GPUs", f"pip install torch=={base} from PyPI, which is a CUDA build")
    return ok(build)


def backend(opened: "Backend") -> Finding:
    import torch

    defaults = opened.defaults
    dtype = str(defaults.dtype).removeprefix("torch.")
    if defaults.dtype.itemsize > torch.bfloat16.itemsize:
        reason = opened.why_not(torch.bfloat16)
        dtype += f", for checkpoints in bfloat16 too, because {reason}" if reason else ", or bfloat16 like a checkpoint"
    return ok(f"{type(opened).__name__} on {opened.device}, {dtype}, pages of {defaults.page_size} tokens")


def memory(opened: "Backend") -> Finding:
    free, total = opened.memory()
    held = total - free
    sizes = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if opened.memory_is_host:
        return ok(sizes)
    if held >= MEMORY_SHARE * total:
        return failed(sizes, "others hold the device: end them, or choose another with --device")
    if held > (1 - MEMORY_SHARE) * total:
        hint = f"{held / GIB:.1f} GiB are held by others and will be missing: end them, or see --memory-utilization"
        return warning(sizes, hint)
    return ok(sizes)


def all_reduce(opened: "Backend", device: str, ranks: int) -> Finding:
    """Try a sum over `ranks` processes, one for each device."""
    from app.check.collectives import measured

    opened.check_ranks(ranks)
    cases = measured(device, ranks, RANKS_SECONDS)
    wrong = [case["rows"] for case in cases if not case["passed"]]
    if wrong:
        return failed(f"the sum of {ranks} ranks is wrong for {wrong} rows", "report it with this output")
    times = [f"{case['rows']} rows in {case['eager_us']:.0f} us" for case in (cases[0], cases[-1])]
    return ok(f"{ranks} ranks add up {' and '.join(times)}")


def _operator(opened: Callable[[], "Backend"], name: str) -> Finding:
    from app.check import operators

    return operators.find(opened(), name)


def _settled(device: str) -> str:
    """Return the device that `serve` would take, or an NPU that it cannot use, because the probes say why."""
    try:
        from app.engine.device.factory import found_device

        found = found_device(device)
    except Exception:  # the probe "torch" tells it
        found = "cpu" if device == "auto" else device
    return "npu" if device == "auto" and found == "cpu" and has_npu() else found


if __name__ == "__main__":
    main(*sys.argv[1:])
