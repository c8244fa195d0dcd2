"""Everything that only a GPU can tell about the CUDA backend, from one command: `python -m app.bench gpu-report`.

Every kernel against PyTorch's operators, graphs against eager code, tokens per second beside their floors, and how
attention might be launched better. Writes gpu-report.json, gpu-report.md and gpu-report.png, section by section, in
less than eight minutes. Needs a source tree, torch, triton, transformers, numpy and safetensors; no network and no
weights. Exits with 1 if a check fails, with 2 where there is no GPU.
"""

import argparse
import importlib.util
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from app.bench import gpu_report_page
from app.bench.gpu_report_floor import Load

SECONDS = 420.0
"""No section begins later than this."""
Section = Callable[[], list[dict[str, Any]]]


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    missing = no_gpu(options.device)
    if missing:
        print(f"error: gpu-report needs a CUDA GPU and Triton: {missing}", file=sys.stderr)
        return 2
    torch.cuda.set_device(options.device)
    report = write(sections(options), torch.cuda.get_device_name(options.device), options.out)
    print(gpu_report_page.page(report))
    return int(gpu_report_page.failures(report) > 0)


def no_gpu(device: str) -> str | None:
    """Why there is none, None if there is one."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees none here"
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        return f"--device {device}, but there are {torch.cuda.device_count()}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def sections(options: argparse.Namespace) -> dict[str, Section]:
    """In the order of what matters most."""
    from app.bench import gpu_report_kernels as kernels
    from app.bench import gpu_report_runs as runs
    from app.engine.cuda.backend import CudaBackend

    backend = CudaBackend(torch.device(options.device))
    sizes = kernels.Sizes()
    cases = kernels.Cases(backend, sizes, torch.bfloat16)
    loads = [Load(concurrency, options.prompt, options.answer) for concurrency in options.concurrency]

    def seconds(run: Callable[[], object]) -> float:
        return kernels.seconds_in_a_graph(backend, run)

    return {
        "device": lambda: device_figures(seconds, backend.device),
        "kernels": lambda: kernels.checked(cases.all(), seconds),
        "equality": lambda: runs.equality("qwen3-0.6b", options.device),
        "speeds": lambda: runs.speeds(options.model, loads, options.device, options.rounds),
        "attention": lambda: kernels.attention_trials(backend, cases, sizes, seconds),
        "prefill": lambda: kernels.prefill_trials(backend, cases, seconds),
    }


@torch.inference_mode()
def device_figures(seconds: Callable[[Callable[[], object]], float], device: torch.device) -> list[dict[str, Any]]:
    source = torch.zeros(1 << 29, dtype=torch.bfloat16, device=device)
    copied = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds(lambda: copied.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / seconds(lambda: a @ b)
    return [{"what": "copy", "TB/s": rate / 1e12}, {"what": "matrix product of 8192", "TFLOP/s": flops / 1e12}]


def write(sections: dict[str, Section], device: str, folder: Path, limit: float = SECONDS) -> dict[str, Any]:
    """Run the sections, and write what is known after each. One that fails leaves the others alone."""
    from app.bench import random_weights, simulated

    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    report: dict[str, Any] = {
        "device": device,
        "versions": versions(),
        "banners": [random_weights.BANNER, simulated.BANNER],
        "sections": {},
        "left_out": [],
    }
    for name, run in sections.items():
        begun = time.perf_counter()
        if begun - started > limit:
            report["left_out"].append(name)
            continue
        print(f"{begun - started:5.0f} s  {name}", file=sys.stderr, flush=True)
        section: dict[str, Any] = {}
        try:
            section["rows"] = run()
        except Exception as error:  # whatever it is: the rest of the report is worth as much
            says = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            section["error"] = {"says": says, "traceback": traceback.format_exc()}
        section["seconds"] = time.perf_counter() - begun
        report["sections"][name] = section
        _save(report, folder)
    _save(report, folder)
    try:
        gpu_report_page.draw(report, folder / "gpu-report.png")
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    return report


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "CUDA of torch": str(torch.version.cuda)}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _save(report: dict[str, Any], folder: Path) -> None:
    (folder / "gpu-report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu-report.md").write_text(gpu_report_page.page(report), encoding="utf-8")


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
