"""Everything that only a GPU can tell about the CUDA backend, from one command: `python -m app.bench gpu-report`.

Every kernel against PyTorch's operators, graphs against eager code, tokens per second beside their floors, and how
attention might be launched better. Each section runs in a process of its own, and what it has told is written at once,
to gpu-report.json and gpu-report.md in the folder that --out names; gpu-report.png is drawn at the end, of the tokens
per second, if matplotlib is installed. It takes eight minutes at most: what would come later is left out, and named.
Needs a source tree, torch, triton, numpy and safetensors; no network and no weights. Exits with 1 if a check fails or
could not be made, with 2 where there is no GPU.
"""

import argparse
import asyncio
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from app.client.child_process import LineProcess
from app.doctor.report.cuda import page as gpu_report_page

SECONDS = 460.0
"""Of all sections; the rest of eight minutes is for what is running to be ended, and for the picture."""
START_SECONDS = 60.0
"""A section's process may take to name its parts."""
END_SECONDS = 10.0
INTERRUPTED = 130


class Section(NamedTuple):
    """`command` is followed by how many parts to skip, and by the seconds that are left. `part` and `whole` are what
    one part and all of it may take, in seconds."""

    command: tuple[str, ...]
    part: float
    whole: float


SECTIONS = {
    "device": (30.0, 60.0),
    "kernels": (45.0, 120.0),
    "equality": (90.0, 150.0),
    "speeds": (120.0, 240.0),
    "prefill": (30.0, 60.0),
    "attention": (60.0, 90.0),
}
"""Seconds of a part and of all, in the order of what matters most."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    missing = no_gpu(options.device)
    if missing:
        print(f"error: gpu-report needs a CUDA GPU and Triton: {missing}", file=sys.stderr)
        return 2
    try:
        report = write(sections(options), options.device, options.out)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(gpu_report_page.page(report))
    return int(gpu_report_page.failures(report) > 0)


def no_gpu(device: str) -> str | None:
    """Why there is none, None if there is one."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees none here"
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        return f"--device {device}, but there are {torch.cuda.device_count()}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def sections(options: argparse.Namespace) -> dict[str, Section]:
    wishes = json.dumps({key: value for key, value in vars(options).items() if key != "out"})
    command = (sys.executable, "-P", "-m", "app.doctor.report.cuda.section")
    return {name: Section((*command, name, wishes), *limits) for name, limits in SECTIONS.items()}


def write(sections: dict[str, Section], device: str, folder: Path, limit: float = SECONDS) -> dict[str, Any]:
    """Run the sections for `limit` seconds at most, and write what is known after each part of each."""
    from app.doctor.report import random_weights, simulated

    folder.mkdir(parents=True, exist_ok=True)
    print(f"writing gpu-report.json and gpu-report.md to {folder.resolve()}", file=sys.stderr, flush=True)
    report: dict[str, Any] = {
        "device": device,
        "versions": versions(),
        "banners": [random_weights.BANNER, simulated.BANNER],
        "sections": {},
        "left_out": [],
    }
    try:
        asyncio.run(_run(report, sections, folder, limit))
    finally:
        _save(report, folder)
        try:
            gpu_report_page.draw(report, folder / "gpu-report.png")
        except Exception as error:  # nothing but a picture
            print(f"no picture: {error}", file=sys.stderr)
    return report


async def _run(report: dict[str, Any], sections: dict[str, Section], folder: Path, limit: float) -> None:
    started = time.monotonic()
    for name, section in sections.items():
        begun = time.monotonic()
        if begun - started >= limit:
            report["left_out"].append(name)
            continue
        print(f"{begun - started:5.0f} s  {name}", file=sys.stderr, flush=True)
        found = report["sections"][name] = {"rows": [], "seconds": 0.0, "left_out": []}
        await _tell(report, found, section, min(begun + section.whole, started + limit), folder)
        found["seconds"] = time.monotonic() - begun
        _save(report, folder)


async def _tell(report: dict[str, Any], found: dict[str, Any], section: Section, ends: float, folder: Path) -> None:
    """Put into `found` what the parts of a section tell until it `ends`. Behind one that broke its process the others
    run in a new one."""
    names: list[str] | None = None
    done = 0
    while names is None or done < len(names):
        left = ends - time.monotonic()
        process = await LineProcess.start([*section.command, str(done), f"{left:.0f}"])
        try:
            first = await _line(process, min(START_SECONDS, left))
            if "parts" not in first:
                if time.monotonic() < ends:
                    found["error"] = first
                found["left_out"] = names[done:] if names else ["all of it"]
                return
            report["device"], names = first["device"], first["parts"]
            for name in names[done:]:
                told = await _line(process, min(section.part, ends - time.monotonic()))
                if "rows" not in told and time.monotonic() >= ends:
                    found["left_out"] = names[done:]
                    return
                done += 1
                found["rows"] += told["rows"] if "rows" in told else [{"part": name} | told]
                _save(report, folder)
                if told.get("over", True):
                    break
        finally:
            await _end(process)


async def _line(process: LineProcess, seconds: float) -> dict[str, Any]:
    """What it says next, or how it failed to."""
    line = await process.line(max(0.0, seconds))
    if not line.endswith(b"\n"):
        return {"passed": False, "failed": await _end(process)}
    said: dict[str, Any] = json.loads(line)
    return said


async def _end(process: LineProcess) -> str:
    """Why it says no more. One that waits in the device's driver may outlive being killed."""
    try:
        return await asyncio.wait_for(process.end(), END_SECONDS)
    except TimeoutError:
        return "could not be ended"


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "CUDA of torch": str(torch.version.cuda)}
    for name in ("torch", "triton", "numpy", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _save(report: dict[str, Any], folder: Path) -> None:
    """Whoever reads a file meanwhile finds all of it, as it is now or as it was before."""
    _replace(folder / "gpu-report.json", json.dumps(report, indent=1) + "\n")
    _replace(folder / "gpu-report.md", gpu_report_page.page(report))


def _replace(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-server bench gpu-report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda:0", metavar="cuda:N", help="[default: cuda:0]")
    parser.add_argument("--model", default="qwen3-8b", help="sizes of which model [default: qwen3-8b]")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32], metavar="N", help="[default: 1 32]")
    parser.add_argument("--prompt", type=int, default=512, metavar="TOKENS", help="[default: 512]")
    parser.add_argument("--answer", type=int, default=1024, metavar="TOKENS", help="[default: 1024]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[default: 3]")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), metavar="FOLDER", help="[default: gpu-report]")
    return parser
