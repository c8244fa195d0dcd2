"""`--compile`: whether forwards can be compiled, the kept packages of earlier starts, and the compilation of others."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from app.config.engine import EngineConfig
from app.engine.cache_folder import own_folder
from app.engine.checkpoint.shapes import DecoderConfig
from app.engine.compile.aot import Compiled, why_not
from app.engine.compile.cache import compile_cache
from app.engine.compile.steps import CompiledForward, functions
from app.engine.device.base import Backend
from app.engine.errors import UnsupportedError
from app.engine.models.weights import Part, Weights
from app.engine.step.forward import Forward
from app.engine.step.runner import ModelRunner

logger = logging.getLogger(__name__)

TRACED_LEN = 128
"""Longest context of an engine that is only traced. Compiled code is the same for all lengths."""


def is_compiled(config: EngineConfig, backend: Backend, shape: DecoderConfig, dtype: torch.dtype) -> bool:
    """Return True if the forwards shall be compiled. "auto" leaves out what cannot be.

    Raises UnsupportedError if the user wants what cannot be compiled.
    """
    if not config.compile or not backend.compiles:
        return False
    reason = _obstacle(config, shape, dtype)
    if reason and config.compile is True:
        raise UnsupportedError(f"--compile: {reason}")
    if reason:
        logger.info("not compiled: %s", reason)
    return not reason


def _obstacle(config: EngineConfig, shape: DecoderConfig, dtype: torch.dtype) -> str:
    if config.compile == "auto" and config.enforce_eager:
        return "--enforce-eager"
    if config.tensor_parallel_size > 1:
        return f"--tensor-parallel-size splits what cannot be compiled ({config.target}); leave one of the two out"
    if config.batch_invariant:
        return "g++ chooses the order of sums; leave out --batch-invariant"
    for layers, are_there in (("experts", shape.moe), ("recurrent layers", shape.gated_delta)):
        if are_there:
            return f"a target with {layers} is not supported yet ({config.target})"
    if dtype != torch.float32:
        return f"--dtype {str(dtype).removeprefix('torch.')} is not supported yet"
    if reason := why_not():
        return reason
    if config.compile == "auto" and not own_folder("compiled"):
        return "no folder keeps what is compiled: set XDG_CACHE_HOME to a writable one of this user only"
    return ""


def use_compiled(
    runner: ModelRunner, config: EngineConfig, traced: Callable[[], Forward], on_compiled: Callable[[int, int], None]
) -> None:
    """Let a new runner's steps be of compiled functions: "auto" takes kept ones, and `--compile` makes missing ones."""
    if config.compile == "auto":
        compiled = load_kept(runner.forward)
    else:
        compiled = load_or_compile(runner.forward, traced, on_compiled)
    if compiled:
        take_up(runner, compiled)


def load_kept(forward: Forward) -> list[Compiled] | None:
    """Return the compiled functions of the forward, or None if one is missing or the folder cannot be used."""
    try:
        with compile_cache() as folder:
            return _loaded(forward, folder)
    except OSError as error:
        logger.warning("what earlier starts compiled cannot be read: %s", error)
        return None


def _loaded(forward: Forward, folder: Path) -> list[Compiled] | None:
    wanted = functions(forward)
    if not all(function.package(folder).exists() for function in wanted):
        return None
    try:
        return [function.load(folder) for function in wanted]
    except RuntimeError as error:
        logger.warning("what earlier starts compiled is made anew: %s", str(error).partition("\n")[0])
        return None


def load_or_compile(
    forward: Forward, traced: Callable[[], Forward], on_compiled: Callable[[int, int], None] = lambda *_: None
) -> list[Compiled]:
    """Return the compiled functions of the forward. Missing ones are compiled from its `traced` twin, after another
    process of this priority that compiles. `on_compiled` is called with (functions compiled, functions in all)."""
    with compile_cache() as folder:
        if found := _loaded(forward, folder):
            return found
        compile_missing(traced(), folder, on_compiled)
        return [function.load(folder) for function in functions(forward)]


def keep_compiled(traced: Forward) -> None:
    """Compile the functions of a forward that earlier starts have not kept, and keep them."""
    with compile_cache() as folder:
        compile_missing(traced, folder)


def compile_missing(traced: Forward, folder: Path, on_compiled: Callable[[int, int], None] = lambda *_: None) -> None:
    """Compile what the folder does not have, while no other process of the same priority does: one of a lower priority
    may be slow for hours on a busy machine."""
    wanted = functions(traced)
    on_compiled(0, len(wanted))
    with (folder / f"lock-{os.nice(0)}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process compiles: this one waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for done, function in enumerate(wanted, 1):
            if not function.package(folder).exists():
                function.compile(folder)
            on_compiled(done, len(wanted))


def take_up(runner: ModelRunner, compiled: Sequence[Compiled]) -> None:
    """Let the runner's next step be one of compiled functions. No step may be in flight, nor be built."""
    runner.forward.compiled = CompiledForward(runner.forward, compiled)
    runner.layout = replace(runner.layout, separate_prefill=False)


def traced_config(config: EngineConfig) -> EngineConfig:
    """Return the config of the smallest engine whose forwards are those of `config`."""
    length = min(TRACED_LEN, config.max_model_len or TRACED_LEN)
    config = replace(config, compile=False, device="cpu", dtype="float32", tune="off", max_model_len=length)
    return replace(config, max_num_seqs=1, max_num_batched_tokens=None, kv_cache_memory=None)


class Shapes:
    """Weights of an engine in float32, by their shapes. Their memory is not written, so they take none."""

    num_bytes = 0

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    @property
    def names(self) -> Iterable[str]:
        return self._weights.names

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if dtype == torch.int64:  # few, and they are checked
            return self._weights.get(name, *shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype or torch.float32)

    def skip(self, name: str) -> None:
        return

    def close(self) -> None:
        return
