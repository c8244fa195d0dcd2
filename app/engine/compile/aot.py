"""A function of tensors, compiled by g++ and kept.

A small model's step is hundreds of operators of a few microseconds, most of which is calling them. torch.export writes
down what the same Python code does to tensors, with the sizes left open, and torch's inductor makes C++ of it, for g++.
That takes a minute; the results are kept and used again as long as nothing of it changes.
"""

import contextlib
import hashlib
import importlib
import os
import platform
import secrets
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.engine.backend.torch import TorchBackend
from app.engine.compile.backend import Exported
from app.engine.compile.cache import load_package
from app.engine.models.kv_pool import KvPool

_SOURCES = Path(__file__).parents[1]


class Compiled:
    """`function` of the tensors that it is given, of the weights that `seq_ids` hold, and of KV pools, compiled.

    `settings` have all numbers in `function` that are no tensors, and `open_sizes` has for each example of an argument
    the dimensions that differ from call to call.
    """

    def __init__(
        self,
        name: str,
        settings: object,
        function: Callable[..., Any],
        seq_ids: Sequence[object],
        pools: Sequence[Tensor],
        examples: Sequence[Tensor],
        open_sizes: Sequence[Sequence[int]],
        folder: Path,
    ) -> None:
        inductor = importlib.import_module("torch._inductor")
        places = list(_tensors_of(seq_ids))
        weights = list({id(place.tensor): place.tensor for place in places}.values())
        numbers = {id(weight): i for i, weight in enumerate(weights)}
        backends = [(owner, owner._backend) for owner in _objects_of(seq_ids) if hasattr(owner, "_backend")]

        class Step(torch.nn.Module):
            def forward(self, arguments: list[Tensor], weights: list[Tensor], pools: list[Tensor]) -> Any:
                for owner, _ in backends:
                    owner._backend = Exported(torch.device("cpu"))
                for place in places:
                    place.put(weights[numbers[id(place.tensor)]])
                try:
                    return function(pools, *arguments)
                finally:
                    for place in places:
                        place.put(place.tensor)
                    for owner, backend in backends:
                        owner._backend = backend

        package = folder / f"{name}-{_digest(settings, [*examples, *weights, *(pool[:1] for pool in pools)])}.pt2"

        def compile_it() -> None:
            sizes = [dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in open_sizes]
            pool_sizes = [{0: torch.export.Dim.DYNAMIC}] * len(pools)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exported = torch.export.export(
                    Step(),
                    (list(examples), weights, list(pools)),
                    dynamic_shapes=(sizes, [None] * len(weights), pool_sizes),
                    strict=False,
                )
                if exported.constants:  # they would be what they are now for whoever finds the package
                    raise RuntimeError(f"{name}: {', '.join(exported.constants)} would be compiled in")
                unfinished = package.with_suffix(f".{secrets.token_hex(4)}.pt2")
                # Headers that are compiled beforehand save seconds, and leave hundreds of MB in /tmp for ever.
                headers = ("cpp_cache_precompile_headers", "aot_inductor.precompile_headers")
                with inductor.config.patch(dict.fromkeys(headers, False)):
                    inductor.aoti_compile_and_package(exported, package_path=str(unfinished))
            unfinished.replace(package)

        if not package.exists():
            compile_it()
        try:
            self._run = load_package(package)
        except RuntimeError:  # of another system's libraries, or broken
            package.unlink(missing_ok=True)
            compile_it()
            self._run = load_package(package)
        self._kept = [*weights, *pools]
        # It would refuse sizes of 1, for what was exported with 2: that those work,
        # tests/devices/compile/test_compiled.py says.
        os.environ.pop("AOTI_RUNTIME_CHECK_INPUTS", None)

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        results: list[Tensor] = self._run([*arguments, *self._kept])
        return results


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an object holds a tensor."""

    holder: dict[str, Any]
    name: str
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        self.holder[self.name] = tensor


def _tensors_of(seq_ids: Sequence[object]) -> Iterator[_Place]:
    for owner in _objects_of(seq_ids):
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                yield _Place(vars(owner), name, value)


def _objects_of(seq_ids: Sequence[object]) -> Iterator[Any]:
    """The models' own parts, each once: what hangs on them, but not the backend, nor KV, nor configurations."""
    seen: set[int] = set()
    waiting = list(seq_ids)
    while waiting:
        owner = waiting.pop()
        if isinstance(owner, list | tuple):
            waiting += owner
        elif _is_part(owner) and id(owner) not in seen:
            seen.add(id(owner))
            yield owner
            waiting += vars(owner).values()


def _is_part(value: object) -> bool:
    ours = type(value).__module__.startswith("app.engine.")
    return ours and not isinstance(value, TorchBackend | KvPool) and not is_dataclass(value)


def _digest(settings: object, tensors: Sequence[Tensor]) -> str:
    """Of all that decides what is compiled: settings and shapes, the engine's own code, PyTorch and the compiler, the
    processor, and the threads that loops are cut for."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout
    what = hashlib.sha256(f"{settings!r} {torch.__version__} {torch.get_num_threads()} {os.cpu_count()}".encode())
    what.update(version + _processor())
    for source in sorted(_SOURCES.rglob("*.py")):
        what.update(source.read_bytes())
    what.update(repr([(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]).encode())
    return what.hexdigest()[:16]


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def _processor() -> bytes:
    """What -march=native looks at."""
    told = (b"model name", b"flags", b"Features", b"CPU part")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"\n".join(sorted({line for line in lines if line.startswith(told)}))
    return platform.processor().encode()
