"""Probes of a device and of the host that it is in: `python -m app.check.probes DEVICE [RANKS]`, started by
`check`.

The process writes the names of all probes to stdout as one line of JSON. A line follows for each probe in turn:
`{"name", "status", "found", "hint"}`. DEVICE is one that the settings know. Output of libraries goes to stderr.
"""

import importlib
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.engine.npu.error_codes import explain

if TYPE_CHECKING:
    from app.engine.device.base import Backend

OPERATORS = (
    "causal_attention",
    "bidirectional_attention",
    "sliding_attention",
    "write_kv",
    "rms_norm",
    "add_rms_norm",
    "rope",
    "gated_mlp",
    "moe",
)
MEMORY_SHARE = 0.9
"""The default of --memory-utilization."""
GIB = 1 << 30
RANKS_SECONDS = 240.0
"""Time for all ranks to meet and add up, less than a probe has."""

Status = Literal["ok", "warning", "failed", "not tried"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a probe in one line, and in `hint` what to do about a warning or a failure."""

    status: Status
    found: str
    hint: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warning(found: str, hint: str) -> Finding:
    return Finding("warning", found, hint)


def failed(found: str, hint: str) -> Finding:
    return Finding("failed", found, hint)


@dataclass(frozen=True, slots=True)
class Probe:
    """One question. It is not tried if a probe named in `needs` failed; `without` then says what is missing."""

    name: str
    ask: Callable[[], Finding]
    needs: tuple[str, ...] = ()
    without: str = ""


def main() -> int:
    device, *ranks = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        asked = probes(device, *map(int, ranks))
        print(json.dumps([probe.name for probe in asked]), file=lines, flush=True)
        for name, finding in run(asked):
            print(json.dumps({"name": name} | asdict(finding)), file=lines, flush=True)
    return 0


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
    """Return the probes of a device, each behind those that it needs. "auto" is the device that `serve` would take.

    Several `ranks` have a device each, from this one on, and a collective is tried between them.
    """
    settled = _settle(device)
    kind = settled.partition(":")[0]
    host: list[Probe] = []
    if kind == "npu":
        host = importlib.import_module("app.check.npu_host").probes(settled)
    elif kind == "cuda":
        host = [
            Probe("devices", partial(gpus, settled), ("torch",), "there is no such device"),
            Probe("compiler", compiler, ("torch",), "Triton cannot compile a launcher"),
        ]
    opened = cache(lambda: _open(settled))
    return [
        *([Probe("device", lambda: ok(f"auto is {settled} here"))] if device == "auto" else []),
        Probe("torch", partial(torch_build, kind), without="torch cannot be used"),
        *host,
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
    found = f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'} build"
    base = torch.__version__.partition("+")[0]
    if kind == "npu" and torch.version.cuda:
        return failed(
            f"{found}: torch_npu works with a CPU build only",
            f"pip install --index-url https://download.pytorch.org/whl/cpu torch=={base}",
        )
    if kind == "cuda" and not torch.version.cuda:
        return failed(f"{found}: it knows no GPUs", f"pip install torch=={base} from PyPI, which is a CUDA build")
    return ok(found)


def gpus(device: str) -> Finding:
    import torch

    count, index = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count} visible" + ("" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}")
    if index >= count:
        return failed(
            f"{device} is not among them: {found}",
            f"visible devices are counted from 0: cuda:0 to cuda:{count - 1}"
            if count
            else "`nvidia-smi` must list a GPU, and its driver must be recent enough for this torch",
        )
    return ok(f"{found}; {device} is {torch.cuda.get_device_name(index)}")


def compiler() -> Finding:
    """Find what Triton compiles a launcher with when a kernel is first launched: a C compiler, and Python.h."""
    if not importlib.util.find_spec("triton"):
        return warning("Triton is not installed: operators are PyTorch's, without graphs", "pip install triton")
    found = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if found is None or not shutil.which(found):
        return failed(
            "there is no C compiler" if found is None else f"CC={found} is not there",
            "install gcc (Debian and Ubuntu: apt-get install gcc libc6-dev), or name another compiler in CC",
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return failed(f"{found}, but no {header}", "install Python's headers (Debian and Ubuntu: python3-dev)")
    return ok(f"{found}, {header}")


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
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if opened.memory_is_host:
        return ok(found)
    if held >= MEMORY_SHARE * total:
        return failed(found, "others hold the device: end them, or choose another with --device")
    if held > (1 - MEMORY_SHARE) * total:
        return warning(
            found, f"{held / GIB:.1f} GiB are held by others and will be missing: end them, or see --memory-utilization"
        )
    return ok(found)


def all_reduce(opened: "Backend", device: str, ranks: int) -> Finding:
    """Let `ranks` processes add up, each on a device of its own."""
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


def _open(device: str) -> "Backend":
    from app.engine.device.factory import make_backend

    return make_backend(device)


def _settle(device: str) -> str:
    if device != "auto":
        return device
    try:
        import torch

        if torch.cuda.is_available():
            return "cuda"
    except Exception:  # the probe "torch" tells it
        pass
    return "npu" if any(Path("/dev").glob("davinci[0-9]*")) else "cpu"


if __name__ == "__main__":
    sys.exit(main())
