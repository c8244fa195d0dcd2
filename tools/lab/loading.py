"""The time in which a CPU loads a checkpoint of random numbers from a warm page cache, against copying its files."""

import argparse
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from app.engine.checkpoint.families import target_config
from app.engine.device.factory import make_backend
from app.engine.load.loader import SafetensorsWeights, target_class
from tools.bench.command import out_folder
from tools.bench.flags import add_out_flag
from tools.bench.markdown import Table
from tools.lab.checkpoints import Kept
from tools.lab.publish import publish
from tools.lab.random_weights import TARGETS
from tools.parts import ToolParser

LAYER_BYTES = 0.1e9
"""About the bytes of one of the layers below in 16 bits."""
MEANING = (
    "The best of rounds by turns: the engine's own code loads the checkpoint, or one thread copies the files. Seconds "
    "of the CPU are of the copy, and of all threads of the load."
)


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    to = out_folder(options)
    layers = max(1, round(options.gb * 1e9 / LAYER_BYTES))
    raw: dict[str, Any] = TARGETS["qwen3-0.6b"] | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": layers, "vocab_size": 32000,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        kept = Kept(Path("loading"), Path(folder))
        target_class(raw["model_type"])(target_config(raw), kept, make_backend("cpu"))
        kept.close()
        files = sorted(Path(folder).glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)

        copied, loaded = [], []
        for _ in range(options.rounds):
            start = _clocks()
            for file in files:
                shutil.copyfile(file, Path(folder) / "copy")
            copied.append(_since(start))
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # a new one has no memory to use again
                loaded.append(process.submit(load, Path(folder), raw).result())
    (copy, copy_cpu), (loading, loading_cpu) = (
        [min(each) for each in zip(*both, strict=True)] for both in (copied, loaded)
    )
    row = {
        "GB": f"{size / 1e9:.1f}",
        "copied s": f"{copy:.1f}",
        "loaded s": f"{loading:.1f}",
        "loading / copying": f"{copy / loading:.0%}",
        "by rounds": ", ".join(f"{a[0] / b[0]:.0%}" for a, b in zip(copied, loaded, strict=True)),
        "CPU s": f"{copy_cpu:.1f}, {loading_cpu:.1f}",
    }
    table = Table("loading", "Loading", MEANING, [row])
    return publish("loading", arguments, [table], to)


def load(folder: Path, raw: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds, and those of the CPU, in which the engine's own code loads the checkpoint."""
    backend = make_backend("cpu")
    start = _clocks()
    weights = SafetensorsWeights(folder, backend.device, torch.bfloat16)
    target_class(raw["model_type"])(target_config(raw), weights, backend)
    weights.close()
    return _since(start)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    now = _clocks()
    return now[0] - start[0], now[1] - start[1]


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.lab loading", description=__doc__)
    made.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint [4]")
    made.add_argument("--rounds", type=int, default=3)
    add_out_flag(made, "loading.json")
    return made
