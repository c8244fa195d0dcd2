"""The header of a GGUF file: metadata, and where its tensors are. Every length is checked against the file's.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import math
import os
import struct
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from app.engine.errors import UnsupportedError

GGUF_FILE = "dflash-target.gguf"
"""The weights and the config of a folder that was made of a GGUF file. Nobody else's file has this name: a folder may
have safetensors and a model.gguf, and the former are served."""
_VERSIONS = (2, 3)
_MAX_HEADER = 64 << 20
"""Five times the largest header that is published. Strings in memory are several times as large."""
_MAX_ITEMS = 1 << 16
"""The most metadata keys, and the most tensors. The largest models have a few thousand tensors."""
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
"""Types of metadata values. Scalars are named as in `struct` and `array`, where `?` is one byte."""
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""The types of tensors that are read, by number: name, weights in a block, and bytes of a block."""
UNREAD = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0"}
_AGAIN = "download it again"


class GgufTensor(NamedTuple):
    """A stored tensor: its name, its shape in torch's order, its type by ggml's name, and its bytes in the file."""

    name: str
    shape: list[int]
    type: str
    offset: int
    nbytes: int


class GgufHeader(NamedTuple):
    """What stands before the weights of a file. Values of metadata are Python's, and arrays are lists."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    file: Path


def read_header(file: Path) -> GgufHeader:
    """Return the header of a GGUF file. Raises UnsupportedError for a file that is damaged, hostile, or not GGUF."""
    if not file.is_file():  # reading a FIFO or a device may never end
        raise UnsupportedError(f"{file} is no file; give a GGUF file, or the folder of one")
    try:
        stream = os.open(file, os.O_RDONLY)
        try:
            return _Reader(file, stream).header()
        finally:
            os.close(stream)
    except OSError as error:
        raise UnsupportedError(f"{file} cannot be read: {error.strerror or error}") from None


class _Reader:
    """A place in a file, with the bytes before it and some after. They are not mapped: a file that is cut off under a
    mapping ends the process."""

    def __init__(self, file: Path, stream: int) -> None:
        self._file, self._stream, self._size = file, stream, os.fstat(stream).st_size
        self._read, self._at = bytearray(), 0

    def header(self) -> GgufHeader:
        self._start()
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for what, count in (("tensors", num_tensors), ("metadata keys", num_keys)):
            if count > _MAX_ITEMS:
                raise self._wrong(f"says it has {count} {what}, and at most {_MAX_ITEMS} are read; {_AGAIN}")
        metadata = dict[str, Any]()
        for _ in range(num_keys):
            if (key := self._string()) in metadata:
                raise self._wrong(f"has the metadata key {key!r:.200} twice; convert the model again")
            metadata[key] = self._value(key, self._scalar("I"))
        tensors = dict[str, GgufTensor]()
        for _ in range(num_tensors):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise self._wrong(f"has the tensor {tensor.name!r:.200} twice; convert the model again")
            tensors[tensor.name] = tensor
        return GgufHeader(metadata, self._placed(tensors, metadata.get("general.alignment", 32)), self._file)

    def _start(self) -> None:
        """Pass magic and version."""
        magic = os.pread(self._stream, 8, 0)
        if magic == b"version ":
            raise self._wrong("is a Git LFS pointer and not the weights; run `git lfs pull` in its folder")
        if magic[:4] != b"GGUF":
            raise self._wrong(f"is no GGUF file: it begins with {magic[:4]!r}; give a GGUF file or a model's folder")
        self._at = 4
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise self._wrong("is big-endian, and only little-endian files are read; convert the model again")
        if version not in _VERSIONS:
            raise self._wrong(f"is of GGUF version {version}, and 2 and 3 are read; convert the model again")

    def _value(self, key: str, kind: int) -> Any:
        """Return a value of metadata of this type."""
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._wrong(f"has metadata of the unknown type {kind}: {key!r:.200}; {_AGAIN}")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        if inner not in _SCALARS:
            what = "arrays, which no model needs" if inner == _ARRAY else f"the unknown type {inner}"
            raise self._wrong(f"has metadata that is an array of {what}: {key!r:.200}; {_AGAIN}")
        code = _SCALARS[inner]
        values = array("B" if code == "?" else code, self._bytes(struct.calcsize(f"<{code}") * count))
        return list(map(bool, values)) if code == "?" else values.tolist()

    def _tensor(self) -> GgufTensor:
        """Return the next tensor, whose offset is still that from the first byte of weights."""
        name, num_dims = self._string(), self._scalar("I")
        told = f"has the tensor {name!r:.200}"
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._wrong(f"{told} of {num_dims} dimensions, and 1 to {_MAX_DIMS} are known; {_AGAIN}")
        shape = [self._scalar("Q") for _ in range(num_dims)][::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in BLOCKS:
            known = ", ".join(name for name, _, _ in BLOCKS.values())
            raise self._wrong(f"{told} of type {UNREAD.get(kind, kind)}, which is not supported; supported: {known}")
        kind_name, block, block_bytes = BLOCKS[kind]
        if 0 in shape or shape[-1] % block:
            raise self._wrong(f"{told} of shape {shape}, in rows of {kind_name} blocks of {block} weights; {_AGAIN}")
        return GgufTensor(name, shape, kind_name, offset, math.prod(shape) // block * block_bytes)

    def _placed(self, tensors: dict[str, GgufTensor], alignment: Any) -> dict[str, GgufTensor]:
        """Return the tensors with offsets from the start of the file."""
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._wrong(f"has general.alignment {alignment!r:.200}, which must be a power of two; {_AGAIN}")
        start = end = -(-self._at // alignment) * alignment
        placed = {}
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            offset = start + tensor.offset
            told = f"has the tensor {tensor.name!r:.200}, of {tensor.nbytes} bytes, at {offset}"
            if offset % alignment or offset < end:
                what = "inside of another" if offset < end else f"which is no multiple of {alignment}"
                raise self._wrong(f"{told}, {what}; {_AGAIN}")
            end = offset + tensor.nbytes
            if end > self._size:
                raise self._wrong(f"is cut off: it {told}, and ends at {self._size}; {_AGAIN}")
            placed[tensor.name] = tensor._replace(offset=offset)
        return placed

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        self._need(size)
        (value,) = struct.unpack_from(f"<{code}", self._read, self._at)
        self._at += size
        return value

    def _string(self) -> str:
        content = self._bytes(self._scalar("Q"))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._wrong(
                f"has a string that is not UTF-8 before byte {self._at}; convert the model again"
            ) from None

    def _bytes(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return bytes(self._read[self._at - count : self._at])

    def _need(self, count: int) -> None:
        """Have `count` more bytes in memory."""
        end = self._at + count
        if end <= len(self._read):
            return
        if end > self._size:
            raise self._wrong(f"is cut off at byte {self._size}, and says that it goes on to byte {end}; {_AGAIN}")
        if end > _MAX_HEADER:
            raise self._wrong(f"has a header of over {_MAX_HEADER >> 20} MiB, which no model needs; {_AGAIN}")
        while len(self._read) < end:
            found = os.pread(self._stream, max(1 << 20, end - len(self._read)), len(self._read))
            if not found:
                raise self._wrong(f"was cut off at byte {len(self._read)} while it was read; {_AGAIN}")
            self._read += found

    def _wrong(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._file} {what}")
