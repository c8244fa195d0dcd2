"""Weights from the files of a checkpoint, by name and expected shape."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from app.engine.checkpoint.families import FAMILIES
from app.engine.checkpoint.files import Checkpoint, find_tensor
from app.engine.checkpoint.quantised import COMPANIONS, OTHER_PARTS, SCALES
from app.engine.checkpoint.quantised import DTYPES as QUANTISED_DTYPES
from app.engine.errors import UnsupportedError
from app.engine.load.scales import Scales
from app.engine.models.target import Target
from app.engine.models.weights import Part, Weights
from app.engine.quantised import FP4_BLOCK, PackedFp4, QuantisedWeight, Weight

_FRACTIONS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_KINDS = {
    torch.int64: ((torch.int32, torch.int64, torch.bool), ", not whole numbers"),
    torch.uint8: ((torch.uint8,), ", not bytes"),
}
"""Dtypes that a tensor asked for in a dtype may be stored in, and what is wrong with others. The rest are fractions."""

_PRODUCT = re.compile(r"layers\..*(_proj|in_proj_(qkvz?|z))\.weight")
_PACKED = re.compile(r"(?<=\.experts\.)\d+|\b(gate|up|[qkv])(?=_proj\.)|(?<=\.in_proj_)(qkv|z)\b")
_LEFT_OUT = re.compile(rf"{'|'.join(OTHER_PARTS)}|.*({'|'.join(COMPANIONS)}|quant_bias|_scales)$")
"""Names of products' weights; the part of a name in which weights of one pack differ, which are quantised together or
not at all; and names of what is not kept."""

OpenWeights = Callable[[Checkpoint, torch.device, torch.dtype, Callable[[int, int], None], Collection[str]], Weights]
"""Opens the weights of a checkpoint, for a device and a dtype. The function is called with (bytes read, total bytes),
and the collection has the stored dtypes that the device keeps."""


def target_class(model_type: str) -> type[Target]:
    """Return the class of a supported family."""
    module, name = FAMILIES[model_type].location.rsplit(".", 1)
    return cast(type[Target], getattr(import_module(f"app.engine.models.{module}"), name))


class CheckpointWeights:
    """The safetensors of one checkpoint, single or sharded, read straight to the device when asked for, or its GGUF
    file, dequantised while it is read. Raises UnsupportedError if they are not whole. `get` returns a quantised weight
    dequantised."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[int, int], None] = lambda *_: None,
        kept: Collection[str] = ("F8_E4M3",),
    ) -> None:
        """Stored numbers in float8 that are not `kept` on the device are widened before they come to it."""
        self._folder, self._device, self._dtype, self._on_progress = checkpoint.folder, device, dtype, on_progress
        self._files = checkpoint.tensors
        paths = {tensor.file for tensor in self._files.values()}
        self._kept, foreign = kept, {"F8_E4M3"} - set(kept)
        self._place = torch.device("cpu") if any(t.dtype in foreign for t in self._files.values()) else device
        self._open: dict[Path, Any]
        if checkpoint.gguf:
            from app.engine.load.gguf import GgufFile  # the package takes 50 ms, and few checkpoints need it

            self._open = {path: GgufFile(checkpoint.gguf, dtype) for path in paths}
            self._total = sum(math.prod(tensor.shape) for tensor in self._files.values()) * dtype.itemsize
        else:
            self._open = {path: safe_open(path, framework="pt", device=str(self._place)) for path in paths}
            self._total = sum(path.stat().st_size for path in paths)
        self._read, self._used = 0, set[str]()
        self._scales = Scales(checkpoint, self._files.keys(), self._stored, self._used)

    def __contains__(self, name: str) -> bool:
        stem = name.removesuffix(".quant_bias")
        return name in self._files if stem == name else self._scales.has_bias(f"{stem}.bias")

    def num_bytes(self, multiplies: Callable[[QuantisedWeight | PackedFp4], bool], *, to: torch.dtype | None) -> int:
        """Return `Weights.num_bytes`. A byte of mxfp4 has two numbers."""
        packs = defaultdict[str, list[tuple[int, int]]](list)
        for name, (_, _, shape, kind) in self._files.items():
            wide = narrow = math.prod(shape) * self._dtype.itemsize * (2 if name.endswith("_blocks") else 1)
            is_product = _PRODUCT.fullmatch(name) and len(shape) == 2
            if is_product and to and kind not in QUANTISED_DTYPES:
                rounded = QuantisedWeight.rounded(torch.empty(shape, dtype=self._dtype, device="meta"), to)
                narrow = rounded.nbytes if multiplies(rounded) else wide
            elif is_product and kind in QUANTISED_DTYPES:
                scales = (self._files.get(name.removesuffix("weight") + kind) for kind in SCALES)
                in_blocks = any(scale and scale.shape[1:] not in ([], [1]) for scale in scales)
                groups = shape[1] // math.gcd(shape[1], self._scales.block[1]) if in_blocks else 1
                data = torch.empty(shape, dtype=torch.float8_e4m3fn if kind == "F8_E4M3" else torch.int8, device="meta")
                weight = QuantisedWeight(data, torch.empty(shape[0], groups, device="meta"), self._dtype)
                narrow = weight.nbytes if multiplies(weight) else wide
            elif name.endswith("_blocks"):
                count, out, blocks, size = shape
                data, exponents = (
                    torch.empty(count, out, n, dtype=torch.uint8, device="meta") for n in (size * blocks, blocks)
                )
                packed = PackedFp4(data, exponents.mT, self._dtype, 0, blocks * FP4_BLOCK)
                narrow = packed.nbytes if multiplies(packed) else wide
            packs[_PACKED.sub("", name)].append((0, 0) if _LEFT_OUT.match(name) else (wide, narrow))
        return sum(sum(sizes[all(narrow < wide for wide, narrow in pack)] for sizes in pack) for pack in packs.values())

    def get(self, name: str, *shape: int, part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._dtype
        if (bias := self._scales.bias(name)) is not None:
            return (part.of(bias) if part else bias).to(self._device, dtype)
        path, _, _, kind = find_tensor(self._files, self._folder, name, shape)
        tensor = self._read_stored(name, shape, part)
        kinds, otherwise = _KINDS.get(dtype, (_FRACTIONS, ", not fractions"))
        if kind in QUANTISED_DTYPES and kinds is _FRACTIONS:
            return self._quantised(name, shape, part, tensor, dtype).dequantised().to(self._device)
        if tensor.dtype not in kinds:
            raise UnsupportedError(f"{path}: tensor {name} is {str(tensor.dtype).removeprefix('torch.')}{otherwise}")
        return tensor.to(self._device, dtype)

    def get_linear(self, name: str, *shape: int, part: Part | None = None) -> Weight:
        kind = find_tensor(self._files, self._folder, name, shape).dtype
        if kind not in QUANTISED_DTYPES:
            return self.get(name, *shape, part=part)
        weight = self._quantised(name, shape, part, self._read_stored(name, shape, part), self._dtype)
        if self._place != self._device and kind not in self._kept:
            return weight.dequantised().to(self._device)
        return QuantisedWeight(weight.data.to(self._device), weight.scales.to(self._device), self._dtype)

    def _quantised(
        self, name: str, shape: Sequence[int], part: Part | None, data: Tensor, dtype: torch.dtype
    ) -> QuantisedWeight:
        return QuantisedWeight(data.to(self._place), self._scales.of(name, shape, part).to(self._place), dtype)

    def _read_stored(self, name: str, shape: Sequence[int], part: Part | None) -> Tensor:
        """Return a stored tensor that a model asks for, or a part of it, and report the progress."""
        tensor = self._stored(name, part)
        if name not in self._used:
            self._read += tensor.nbytes if part is None else tensor.nbytes // tensor.shape[part.axis] * shape[part.axis]
        self._used.add(name)
        self._on_progress(self._read, self._total)
        return tensor

    def _stored(self, name: str, part: Part | None = None) -> Tensor:
        """Return a stored tensor, or a part of it."""
        path, stored_name, _, _ = self._files[name]
        if part is None:
            return cast(Tensor, self._open[path].get_tensor(stored_name))
        stored, before = self._open[path].get_slice(stored_name), (slice(None),) * part.axis
        read = [stored[(*before, slice(rows.start, rows.stop))] for rows in part.ranges]
        return read[0].contiguous() if len(read) == 1 else torch.cat(read, dim=part.axis)

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def skip(self, name: str) -> None:
        self._used.add(name)

    def close(self) -> None:
        """Close the files. Raises UnsupportedError if they hold a tensor that no model asked for."""
        self._open.clear()
        self._on_progress(self._total, self._total)
        if unused := sorted(set(self._files) - self._used):
            raise UnsupportedError(
                f"{self._folder}: {len(unused)} tensors do not belong to this architecture, such as {unused[0]}; "
                "leaving them out would be wrong"
            )
