"""Functions of tensors, compiled by g++ and kept.

A small model's step is hundreds of operators of a few microseconds, most of which is the call. torch.export traces the
same Python code with open sizes, and inductor makes C++ of it. That takes a minute, so packages are kept.
"""

import hashlib
import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.engine.compile.cache import load_package
from app.engine.cpu import attention
from app.engine.cpu.library import compiler, compiler_version, processor

_SOURCES = Path(__file__).parents[1]


def why_not() -> str:
    """Return why nothing can be compiled here, or "". Compiled forwards call the CPU's own operators."""
    if not shutil.which(compiler()):
        return "there is no g++ here: install it, name another compiler in CXX, or leave it out"
    return "" if attention.is_own(torch.float32) else f"{compiler()} cannot make this server's operators"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of tensors, of a model's weights and of KV pools, which g++ can compile.

    `settings` have all numbers in `function` that are no tensors. All dimensions of integer `examples`, and the first
    one of others, differ from call to call. Weights are inputs of the compiled code, so a package holds none.
    """

    name: str
    settings: object
    function: Callable[..., Any]
    model: nn.Module
    pools: Sequence[Tensor]
    examples: Sequence[Tensor]

    def package(self, folder: Path) -> Path:
        """Return the file that the compiled code has, or would have."""
        tensors = [*self.examples, *self.model.parameters(), *(pool[:1] for pool in self.pools)]
        return folder / f"{self.name}-{_digest(self.settings, tensors)}.pt2"

    def compile(self, folder: Path) -> None:
        """Write the package. The function's tensors are read only by their shapes."""
        inductor = importlib.import_module("torch._inductor")
        names = [f"model.{key}" for key, _ in self.model.named_parameters()]
        weights, pools = list(self.model.parameters()), list(self.pools)
        step = _Step(self.function, self.model)

        class Exported(nn.Module):
            def forward(self, arguments: list[Tensor], weights: list[Tensor], pools: list[Tensor]) -> Any:
                return torch.func.functional_call(step, dict(zip(names, weights, strict=True)), (pools, *arguments))

        dims = [1 if example.is_floating_point() else example.dim() for example in self.examples]
        sizes = [dict.fromkeys(range(count), torch.export.Dim.DYNAMIC) for count in dims]
        pool_sizes = [{0: torch.export.Dim.DYNAMIC}] * len(pools)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                Exported(),
                (list(self.examples), weights, pools),
                dynamic_shapes=(sizes, [None] * len(weights), pool_sizes),
                strict=False,
            )
            if exported.constants:  # a package that is found later would have the values of today
                raise RuntimeError(f"{self.name}: {', '.join(exported.constants)} would be compiled in")
            package = self.package(folder)
            unfinished = Path(tempfile.mkdtemp()) / package.name
            # Headers that are compiled beforehand save seconds, and leave hundreds of MB in /tmp for ever. Loops have
            # one thread, because OpenMP's wait for one another in busy loops.
            headers = ("cpp_cache_precompile_headers", "aot_inductor.precompile_headers")
            with inductor.config.patch(dict.fromkeys(headers, False) | {"cpp.threads": 1}):
                inductor.aoti_compile_and_package(exported, package_path=str(unfinished))
        unfinished.replace(package)  # so no other process sees half of it

    def load(self, folder: Path) -> "Compiled":
        """Return the compiled function. Raises RuntimeError if its package is missing, broken, or made for other
        libraries, and removes it."""
        package = self.package(folder)
        try:
            run = load_package(package)
        except RuntimeError:
            package.unlink(missing_ok=True)
            raise
        # The check would refuse sizes of 1, because 2 was exported; tests/devices/compile/test_compiled.py runs them.
        os.environ.pop("AOTI_RUNTIME_CHECK_INPUTS", None)
        return Compiled(run, [*self.model.parameters(), *self.pools])


class Compiled:
    """The compiled function of tensors, with the weights and pools that it keeps."""

    def __init__(self, run: Callable[..., Any], kept: list[Tensor]) -> None:
        self._run = run
        self._kept = kept

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        results: list[Tensor] = self._run([*arguments, *self._kept])
        return results


class _Step(nn.Module):
    """`function` as a module, whose weights are `model`'s."""

    def __init__(self, function: Callable[..., Any], model: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.model = model

    def forward(self, pools: list[Tensor], *arguments: Tensor) -> Any:
        return self.function(pools, *arguments)


def _digest(settings: object, tensors: Sequence[Tensor]) -> str:
    """Return a hash of all that decides the compiled code: settings and shapes, the engine's own sources, PyTorch and
    the compiler, and the processor."""
    what = hashlib.sha256(f"{settings!r} {torch.__version__} {os.cpu_count()}".encode())
    what.update(compiler_version() + processor())
    for source in sorted(path for kind in ("py", "cpp", "h") for path in _SOURCES.rglob(f"*.{kind}")):
        what.update(source.read_bytes())
    what.update(repr([(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]).encode())
    return what.hexdigest()[:16]
