"""`--compile` on a CPU: each model's forward, and the context KV, as one function of C++ each.

A small model's step is hundreds of operators of a few microseconds, most of which is calling them. torch.export writes
down what the same Python code does to tensors, with the sizes left open, and torch's inductor makes C++ of it, for g++.
That takes a minute; the results are kept and used again as long as nothing of it changes.
"""

import contextlib
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.engine.backend import AttnMeta, LayerKv, Rotation
from app.engine.cpu_backend import CpuBackend
from app.engine.dflash.drafter import DFlashDrafter
from app.engine.errors import UnsupportedError
from app.engine.kept_packages import kept_packages, load_package
from app.engine.kv_pool import KvPool
from app.engine.layers import StepRows
from app.engine.stages import Stages
from app.engine.torch_backend import Call, TorchBackend

_SOURCES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class OneCall:
    """A step's whole attention as one padded call, in tensors alone.

    `pages` [S, P] int32 hold a sequence's tokens, `mask` [S, 1, G * Q, L] is 0 where a row may look and -inf elsewhere,
    `places` [T] int64 are where the rows stand among the S * Q padded ones.
    """

    pages: Tensor
    mask: Tensor
    places: Tensor


class CompiledBackend(TorchBackend):
    """Plain operators, which inductor fuses by itself, over weights laid out as a CPU's."""

    lay_out = CpuBackend.lay_out
    keep_step_memory = CpuBackend.keep_step_memory
    fused_places = CpuBackend.fused_places

    def plan_attention(self, meta: AttnMeta, group: int) -> "Plan":
        """What operators one by one need, and OneCall where there is such a call."""
        calls = super().plan_attention(meta, group)
        whole = len(calls) == 1 and calls[0].num_pieces == len(meta.q_lens)
        return Plan(calls, _one_call(meta, calls[0], group) if whole else None)

    def attention(self, q_thd: Tensor, kv: LayerKv, meta: AttnMeta) -> Tensor:
        return self.attend(q_thd, kv, meta.plan.calls)


@dataclass(frozen=True, slots=True)
class Plan:
    calls: list[Call]
    one: OneCall | None


def _one_call(meta: AttnMeta, call: Call, group: int) -> OneCall:
    assert isinstance(call.pages, Tensor)
    mask = torch.zeros(call.num_pieces, 1, group * call.max_q, call.max_kv)
    if call.mask is not None:
        mask.masked_fill_(~call.mask, -torch.inf)
    places = torch.arange(call.num_pieces * call.max_q) if call.places is None else call.places
    return OneCall(call.pages.view(call.num_pieces, -1), mask, places)


class _Exported(CompiledBackend):
    """The same while torch.export watches: K and V of a layer are [slots, kv_heads, D], and a plan is OneCall."""

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slots: Tensor) -> None:
        kv.k.index_put_((slots,), k_thd)
        kv.v.index_put_((slots,), v_thd)

    def attention(self, q_thd: Tensor, kv: LayerKv, meta: AttnMeta) -> Tensor:
        one: OneCall = meta.plan
        heads, dim = q_thd.shape[1:]
        kv_heads, num_seqs = kv.k.shape[-2], one.pages.shape[0]
        group = heads // kv_heads
        max_q = one.mask.shape[2] // group
        q = q_thd.new_zeros(num_seqs * max_q, heads, dim).index_put((one.places,), q_thd)
        q = q.view(num_seqs, max_q, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(num_seqs, kv_heads, -1, dim)
        slots = one.pages.long().unsqueeze(2) * meta.page_size + torch.arange(meta.page_size)
        slots = slots.flatten(1)[:, : one.mask.shape[3]]
        k, v = (pool[slots].transpose(1, 2) for pool in (kv.k, kv.v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=one.mask)
        o = o.view(num_seqs, kv_heads, group, max_q, dim).permute(0, 3, 1, 2, 4).reshape(-1, heads, dim)
        return o[one.places]


class Compiled:
    """`function` of the tensors that it is given, of the weights that `owners` hold, and of KV pools, compiled.

    `settings` have all numbers in `function` that are no tensors, and `open_sizes` has for each example of an argument
    the dimensions that differ from call to call.
    """

    def __init__(
        self,
        name: str,
        settings: object,
        function: Callable[..., Any],
        owners: Sequence[object],
        pools: Sequence[Tensor],
        examples: Sequence[Tensor],
        open_sizes: Sequence[Sequence[int]],
        folder: Path,
    ) -> None:
        inductor = importlib.import_module("torch._inductor")
        places = list(_tensors_of(owners))
        weights = list({id(place.tensor): place.tensor for place in places}.values())
        numbers = {id(weight): i for i, weight in enumerate(weights)}
        backends = [(owner, owner._backend) for owner in _objects_of(owners) if hasattr(owner, "_backend")]

        class Step(torch.nn.Module):
            def forward(self, arguments: list[Tensor], weights: list[Tensor], pools: list[Tensor]) -> Any:
                for owner, _ in backends:
                    owner._backend = _Exported(torch.device("cpu"))
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
                unfinished = package.with_suffix(f".{os.getpid()}.pt2")
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

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        results: list[Tensor] = self._run([*arguments, *self._kept])
        return results


def compile_stages(
    stages: Stages, pools: Sequence[KvPool], dtype: torch.dtype, on_compiled: Callable[[int, int], None]
) -> None:
    """Have `stages`, and the drafter if it is DFlash's, run what is compiled wherever a step's attention is one call.

    Raises UnsupportedError where there is no compiler, and for another dtype than float32.
    """
    if dtype != torch.float32:
        raise UnsupportedError(f"--compile: --dtype {str(dtype).removeprefix('torch.')} is not supported yet")
    if not shutil.which(_compiler()):
        raise UnsupportedError(
            "--compile: there is no g++ here: install it, name another compiler in CXX, or leave it out"
        )
    drafter = stages.drafter if isinstance(stages.drafter, DFlashDrafter) else None
    total = 3 if drafter else 1
    on_compiled(0, total)
    with kept_packages() as folder:
        stages.forward = _Forward("target", stages.target, stages.forward, pools[0], folder, of_tokens=True)
        on_compiled(1, total)
        if drafter:
            drafter.forward = _Forward("draft", drafter.model, drafter.forward, pools[1], folder, of_tokens=False)
            on_compiled(2, total)
            drafter.write = _context(drafter, pools[1], folder)
            on_compiled(3, total)


class _Forward:
    """A model's forward: compiled where attention is one call, else `eager`."""

    def __init__(
        self, name: str, model: Any, eager: Callable[..., Any], pool: KvPool, folder: Path, *, of_tokens: bool
    ) -> None:
        self._eager = eager
        self._of_tokens = of_tokens
        decoder = getattr(model.config, "decoder", model.config)
        dim, kv_heads = decoder.head_dim, decoder.num_kv_heads
        group = decoder.num_heads // kv_heads
        taps = model.taps if of_tokens else ()
        page_size = pool.layers[0].k.shape[1]
        layers = [part.view(-1, kv_heads, dim) for kv in pool.layers for part in (kv.k, kv.v)]

        def forward(flat: list[Tensor], x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *one: Tensor) -> Any:
            meta = AttnMeta(x, x, x, [x.shape[0]], [], page_size, causal=True, plan=OneCall(*one))
            kv = [LayerKv(k, v) for k, v in zip(flat[::2], flat[1::2], strict=True)]
            return model.forward(x, StepRows((cos, sin), slots, [meta]), _Layers(kv))

        dtype = layers[0].dtype
        num_seqs, width, length = 2, 3, 5 * page_size - 1
        rows = num_seqs * width
        examples = [
            torch.zeros(rows, dtype=torch.int32) if of_tokens else torch.zeros(rows, decoder.hidden_size, dtype=dtype),
            *torch.zeros(2, rows, 1, dim, dtype=dtype).unbind(),
            torch.arange(rows, dtype=torch.int32),
            torch.zeros(num_seqs, -(-length // page_size), dtype=torch.int32),
            torch.zeros(num_seqs, 1, group * width, length),
            torch.arange(rows),
        ]
        open_sizes = [[0], [0], [0], [0], [0, 1], [0, 2, 3], [0]]
        self._compiled = Compiled(
            name, (model.config, taps, page_size), forward, [model], layers, examples, open_sizes, folder
        )

    def __call__(self, x: Tensor, rows: StepRows, pool: KvPool) -> Any:
        one = rows.groups[0].plan.one if len(rows.groups) == 1 else None
        if one is None:
            return self._eager(x, rows, pool)
        results = self._compiled(x, *rows.rotation, rows.slots, one.pages, one.mask, one.places)
        if not self._of_tokens:
            return results[0]
        return results[0], results[1] if len(results) > 1 else None  # features


def _context(drafter: DFlashDrafter, pool: KvPool, folder: Path) -> Callable[[Tensor, Rotation, Tensor], None]:
    context, decoder = drafter.context, drafter.decoder
    own_pool, layers = context.pool, [part.view(-1, *part.shape[2:]) for part in (pool.all_layers.k, pool.all_layers.v)]

    def write(
        flat: list[Tensor], features: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, first_slots: Tensor
    ) -> Tensor:
        context.pool = _AllLayers(LayerKv(*flat), first_slots)
        try:
            context.write(features, (cos, sin), slots)
        finally:
            context.pool = own_pool
        return slots

    width = drafter.model.fc.shape[1]
    rows = 6
    first_slots = pool.slots_in_all_layers(torch.zeros(1, dtype=torch.int32))
    examples = [
        torch.zeros(rows, width, dtype=layers[0].dtype),
        *torch.zeros(2, rows, 1, decoder.head_dim, dtype=layers[0].dtype).unbind(),
        torch.arange(rows, dtype=torch.int32),
        first_slots,
    ]
    open_sizes = [[0], [0], [0], [0], []]
    compiled = Compiled("context", drafter.model.config, write, [context], layers, examples, open_sizes, folder)

    def run(features: Tensor, rotation: Rotation, slots: Tensor) -> None:
        compiled(features, *rotation, slots, first_slots)

    return run


@dataclass(frozen=True, slots=True)
class _Layers:
    """A KvPool as a model's forward sees it."""

    layers: list[LayerKv]


@dataclass(frozen=True, slots=True)
class _AllLayers:
    """A KvPool as the context sees it."""

    all_layers: LayerKv
    first_slots: Tensor

    def slots_in_all_layers(self, slots: Tensor) -> Tensor:
        return (slots[:, None] + self.first_slots).flatten()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an object holds a tensor."""

    holder: dict[str, Any]
    name: str
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        self.holder[self.name] = tensor


def _tensors_of(owners: Sequence[object]) -> Iterator[_Place]:
    for owner in _objects_of(owners):
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                yield _Place(vars(owner), name, value)


def _objects_of(owners: Sequence[object]) -> Iterator[Any]:
    """The models' own parts, each once: what hangs on them, but not the backend, nor KV, nor configurations."""
    seen: set[int] = set()
    waiting = list(owners)
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
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    what = hashlib.sha256(f"{settings!r} {torch.__version__} {torch.get_num_threads()} {os.cpu_count()}".encode())
    what.update(compiler + _processor())
    for source in sorted(_SOURCES.rglob("*.py")):
        what.update(source.read_bytes())
    what.update(repr([(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]).encode())
    return what.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _processor() -> bytes:
    """What -march=native looks at."""
    told = (b"model name", b"flags", b"Features", b"CPU part")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"\n".join(sorted({line for line in lines if line.startswith(told)}))
    return platform.processor().encode()
