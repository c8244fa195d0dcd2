"""Run every operator, the engine and tests of bandwidth on an NPU or a GPU of this host, and time them. The results
are in npu-report.json and npu-report.md, or in gpu-report.json and gpu-report.md.
Nothing leaves the host. The exit code is 0 if nothing failed, 1 if something did, and 2 if there is no GPU.
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.check import probes
from app.config.error import ConfigError
from app.config.parser import Parser
from app.engine.checkpoint.files import Role, find_folder
from app.engine.cuda import host_probes
from app.engine.errors import UnsupportedError
from tools.report import runner
from tools.report.part import MODELS, REAL_PAIR, Options
from tools.report.sections import SECTIONS

NAMES = (
    "demo",
    "qwen3-8b",
    "qwen3-4b",
    "qwen3-0.6b",
    "qwen3.5-0.8b",
    "qwen3-8b-fp8",
    "qwen3.8-27b-fp8",
    "qwen3-30b-a3b-fp8",
    "gpt-oss-20b",
)
"""Names of the laboratory's sizes."""
ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str]) -> int:
    """Write a report on an NPU or a GPU. Return 2 for a user's mistake, which is told in one line and a hint."""
    try:
        options, folder = parse(arguments)
        if options.kind == "cuda":
            check_gpu(options)
            find_pair(options.real_pair)
        return runner.report(options.device, folder, sections(options), **about(options))
    except OSError as error:
        hint = "give a folder that this user may write to, on a disk with room"
        return ConfigError(f"--out {folder}: {error.strerror or error}", hint).show()
    except ConfigError as error:
        return error.show()


def parse(arguments: Sequence[str]) -> tuple[Options, Path]:
    """Return the options and the folder of the report. Raises ConfigError; `--help` leaves the process."""
    parser = Parser(prog="python -m tools.report", description=__doc__)
    parser.add_argument("--device", required=True, metavar="DEVICE", help="npu | npu:N | cuda | cuda:N")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the files go [default: here, and ./gpu-report for a GPU]"
    )
    parser.add_argument(
        "--real-pair",
        nargs=2,
        metavar=("TARGET", "DRAFT"),
        default=[],
        help="folders of checkpoints; on a GPU a pair with SmolLM2's tokens, or its target's GGUF file, or smollm2",
    )
    about = "what the pair answers on an NPU, as `python -m tools.bench` takes it, like gsm8k.jsonl"
    parser.add_argument("--dataset", default="demo:math", metavar="DATA", help=f"{about} [default: demo:math]")
    load = parser.add_argument_group("load of the engines on a GPU")
    load.add_argument(
        "--model",
        dest="models",
        nargs="+",
        metavar="MODEL",
        default=list(MODELS),
        help=f"sizes of which models, in this order [default: {', '.join(MODELS)}]",
    )
    load.add_argument("--concurrency", type=count, nargs="+", metavar="N", default=[1, 8, 32], help="[default: 1 8 32]")
    load.add_argument("--prompt", type=count, metavar="TOKENS", default=512, help="[default: 512]")
    load.add_argument("--answer", type=count, metavar="TOKENS", default=256, help="[default: 256]")
    load.add_argument("--rounds", type=count, metavar="N", default=1, help="[default: 1]")
    parser.add_argument(
        "--sections",
        type=lambda names: [name.strip() for name in names.split(",") if name.strip()],
        metavar="A,B",
        default=[],
        help="in this order [default: all]",
    )
    parser.add_argument("--seconds", type=count, metavar="N", help="limit of all sections [default: 460 on a GPU]")
    given = vars(parser.parse_args(arguments))
    folder, options = given.pop("out"), Options(**given)
    made_up = [model for model in options.models if model != REAL_PAIR]
    if not options.real_pair:
        options = replace(options, models=made_up)
    elif REAL_PAIR not in options.models:
        options = replace(options, models=[*made_up, REAL_PAIR])
    if not re.fullmatch(r"(npu|cuda)(:\d+)?", options.device):
        raise ConfigError(
            f"--device {options.device}: a report is on npu or cuda, or on one of several like npu:1",
            "dflash-server check looks at other devices",
        )
    refused, other = ["dataset"], "an NPU"
    if options.kind == "npu":
        refused, other = ["models", "concurrency", "prompt", "answer", "rounds"], "a GPU"
        check_pair(options.real_pair)
        check_dataset(options.dataset)
    if changed := [flag(name) for name in refused if given[name] != parser.get_default(name)]:
        raise ConfigError(f"{', '.join(changed)}: only a report on {other} takes this", "leave it out")
    for model in options.models:
        if model not in (*NAMES, REAL_PAIR) and not Path(model).expanduser().is_file():
            raise ConfigError(
                f"--model {model}: there is neither such a name nor such a file",
                f"there are {', '.join(NAMES)}, or give the path of a config.json",
            )
    known = SECTIONS[options.kind]
    if unknown := [name for name in options.sections if name not in known]:
        raise ConfigError(f"--sections {','.join(unknown)}: there is none", f"there are {', '.join(known)}")
    return options, folder or Path("gpu-report" if options.kind == "cuda" else "")


def check_pair(folders: Sequence[str]) -> None:
    """Raise ConfigError unless all are folders of checkpoints."""
    for folder in folders:
        if not (Path(folder) / "config.json").is_file():
            hint = "give the folders of a target and of its draft, with config.json, weights and tokenizer"
            raise ConfigError(f"--real-pair: {folder} has no config.json", hint)


def check_dataset(wish: str) -> None:
    """Raise ConfigError unless the bench knows this dataset and can read its questions."""
    from tools.bench.prompts import named

    try:
        named(wish, 0)
    except ConfigError as error:
        raise ConfigError(f"--dataset: {error}", error.hint) from None


def find_pair(names: Sequence[str]) -> None:
    """Raise ConfigError unless a target and a draft, if they are given, can be read."""
    roles: tuple[Role, ...] = ("target", "draft")
    for name, role in zip(names, roles, strict=False):
        try:
            find_folder(name, role, has_tokenizer=False)
        except UnsupportedError as error:
            raise ConfigError(f"--real-pair: {error}") from None


def flag(name: str) -> str:
    """Return the flag that gives an option."""
    return "--model" if name == "models" else f"--{name.replace('_', '-')}"


def count(text: str) -> int:
    """Return a whole number from 1 on. Raises ValueError for anything else."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def sections(options: Options) -> dict[str, runner.Program]:
    """Return the program of each section that the options name, or of all sections of this kind of device."""
    known, found = SECTIONS[options.kind], {}
    for name in options.sections or known:
        command = (sys.executable, "-P", "-m", "tools.report.section", name, json.dumps(asdict(options)))
        found[name] = runner.Program(command, known[name].part_seconds, known[name].all_seconds)
    return found


def about(options: Options) -> dict[str, Any]:
    """Return the arguments of `runner.report` that depend on the kind of device, and the limit."""
    limit = {"limit": options.seconds} if options.seconds else {}
    if options.kind == "npu":
        return {"name": "npu-report", "host": (sys.executable, "-P", "-m", "app.check.probes")} | limit
    return {"name": "gpu-report", "limit": runner.GPU_SECONDS, "versions": versions()} | limit


def check_gpu(options: Options) -> None:
    """Raise ConfigError if no report on a GPU can be made here. It opens no device."""
    import torch

    torch_build, triton = probes.torch_build("cuda"), host_probes.compiler()
    if torch_build.status == "failed":
        found, hint = torch_build.found, torch_build.hint
    elif not torch.cuda.is_available():
        found = f"torch {torch.__version__} sees none here"
        hint = "`nvidia-smi` must list a GPU, and its driver must be recent enough for this torch"
    elif options.index >= (number := torch.cuda.device_count()):
        found, hint = f"--device {options.device}, but there are {number}", "they are counted from 0"
    elif triton.status != "ok":
        found, hint = triton.found, triton.hint
    else:
        return
    raise ConfigError(f"gpu-report needs a CUDA GPU, Triton and a C compiler: {found}", hint)


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "CUDA of torch": str(torch.version.cuda)}
    for name in ("torch", "triton", "numpy", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found | {"commit": commit()}


def commit() -> str:
    """Return the commit of a source tree that git knows, with "-dirty" if files were changed."""
    if not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
