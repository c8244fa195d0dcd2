"""A GGUF file's header is read, or refused in a sentence: no length in it is believed before it is checked."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.checkpoint import gguf
from app.engine.checkpoint.gguf import GgufTensor, read_header
from app.engine.errors import UnsupportedError

F32, Q8_0 = 0, 8
UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return u64(len(content)) + content


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


KEYS = [
    key("general.architecture", STRING, text("llama")),
    key("llama.block_count", UINT32, u32(2)),
    key("tokenizer.ggml.tokens", ARRAY, u32(STRING) + u64(3) + text("a") + text("") + text("größe")),
    key("sizes", ARRAY, u32(UINT8) + u64(4) + bytes([1, 2, 3, 255])),
    key("flags", ARRAY, u32(7) + u64(2) + b"\x00\x01"),
    key("eps", 6, struct.pack("<f", 0.5)),
    key("on", 7, b"\x01"),
]
TENSORS = [tensor("a.weight", [32, 3], F32, 0), tensor("b.weight", [64, 2], Q8_0, 384)]


def contents(
    keys: list[bytes] = KEYS,
    tensors: list[bytes] = TENSORS,
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    counts: tuple[int, int] | None = None,
    weights: int = 384 + 2 * 2 * 34,
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = magic + version + u64(num_tensors) + u64(num_keys) + b"".join(keys + tensors)
    return header + bytes(-len(header) % 32) + bytes(weights)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], str]:
    """Returns what is said of a file with these contents."""

    def of(content: bytes) -> str:
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(UnsupportedError) as caught:
            read_header(tmp_path / "model.gguf")
        said = str(caught.value)
        assert said.startswith(str(tmp_path / "model.gguf ")) and len(said) < 1000
        return said

    return of


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_places_of_tensors_are_read(tmp_path: Path, version: int) -> None:
    content = contents(version=u32(version))
    (tmp_path / "model.gguf").write_bytes(content)
    header = read_header(tmp_path / "model.gguf")
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "tokenizer.ggml.tokens": ["a", "", "größe"],
        "sizes": [1, 2, 3, 255],
        "flags": [False, True],
        "eps": 0.5,
        "on": True,
    }
    start = len(content) - 384 - 2 * 2 * 34
    assert header.tensors == {
        "a.weight": GgufTensor("a.weight", [3, 32], "F32", start, 384),
        "b.weight": GgufTensor("b.weight", [2, 64], "Q8_0", start + 384, 136),
    }


def test_weights_begin_and_are_aligned_as_the_file_says(tmp_path: Path) -> None:
    keys = [key("general.alignment", UINT32, u32(8))]
    content = contents(keys, [tensor("a", [2], F32, 0), tensor("b", [2], F32, 8)], weights=16)
    (tmp_path / "model.gguf").write_bytes(content)
    places = [place.offset for place in read_header(tmp_path / "model.gguf").tensors.values()]
    assert places[0] % 8 == 0 and places[1] == places[0] + 8


HUGE = 2**60
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("empty", {"magic": b"", "version": b"", "keys": [], "tensors": [], "weights": 0}, "is no GGUF file"),
    ("another format", {"magic": b"\x80\x02}q"}, "is no GGUF file: it begins with b'\\x80\\x02}q'"),
    ("LFS pointer", {"magic": b"version https://git-lfs.github.com/spec/v1\n"}, "is a Git LFS pointer"),
    ("version 1", {"version": u32(1)}, "is of GGUF version 1, and 2 and 3 are read"),
    ("version 4", {"version": u32(4)}, "is of GGUF version 4"),
    ("big-endian", {"version": struct.pack(">I", 3)}, "is big-endian"),
    ("2^60 tensors", {"counts": (HUGE, 0)}, f"says it has {HUGE} tensors, and at most 65536 are read"),
    ("2^60 keys", {"counts": (0, HUGE)}, f"says it has {HUGE} metadata keys"),
    ("more keys than there are", {"counts": (2, 5000)}, ""),
    ("key of 2^40", {"keys": [u64(2**40)]}, "is cut off at byte"),
    ("string of 2^40", {"keys": [text("a") + u32(STRING) + u64(2**40)]}, "is cut off at byte"),
    ("array of 2^40 u8", {"keys": [text("a") + u32(ARRAY) + u32(UINT8) + u64(2**40)]}, "is cut off at byte"),
    ("array of 2^64 strings", {"keys": [text("a") + u32(ARRAY) + u32(STRING) + u64(2**64 - 1)]}, "is cut off at byte"),
    ("nested arrays", {"keys": [text("a") + (u32(ARRAY) + u32(ARRAY) + u64(1)) * 99]}, "an array of arrays"),
    ("unknown value", {"keys": [key("a", 13, b"")]}, "metadata of the unknown type 13: 'a'"),
    ("unknown element", {"keys": [key("a", ARRAY, u32(13) + u64(1))]}, "an array of the unknown type 13: 'a'"),
    ("key twice", {"keys": KEYS + KEYS[:1]}, "has the metadata key 'general.architecture' twice"),
    ("not UTF-8", {"keys": [key("a", STRING, text(b"\xff\xfe"))]}, "has a string that is not UTF-8"),
    ("token not UTF-8", {"keys": [key("a", ARRAY, u32(STRING) + u64(1) + text(b"\xc3"))]}, "not UTF-8"),
    ("tensor twice", {"tensors": [TENSORS[0], TENSORS[0]]}, "has the tensor 'a.weight' twice"),
    ("0 dims", {"tensors": [tensor("a", [], F32, 0)]}, "'a' of 0 dimensions"),
    ("9 dims", {"tensors": [tensor("a", [1] * 9, F32, 0)]}, "'a' of 9 dimensions, and 1 to 4 are known"),
    ("2^31 dims", {"tensors": [text("a") + u32(2**31)]}, "dimensions"),
    ("a dim of 0", {"tensors": [tensor("a", [32, 0], F32, 0)]}, "'a' of shape [0, 32]"),
    ("dims of 2^63", {"tensors": [tensor("a", [2**63] * 4, F32, 0)]}, "is cut off: it has the tensor 'a'"),
    ("parts of a block", {"tensors": [tensor("a", [33], Q8_0, 0)]}, "in rows of Q8_0 blocks of 32 weights"),
    ("F64", {"tensors": [tensor("norm", [8], 28, 0)]}, "'norm' of type F64, which is not supported; supported: F32"),
    ("NVFP4", {"tensors": [tensor("a", [64], 40, 0)]}, "'a' of type NVFP4"),
    ("unknown type", {"tensors": [tensor("a", [64], 42, 0)]}, "'a' of type 42, which is not supported"),
    ("offset past the end", {"tensors": [tensor("a", [32], F32, 2**40)]}, "is cut off: it has the tensor 'a'"),
    ("offset of 2^64 - 64", {"tensors": [tensor("a", [32], F32, 2**64 - 64)]}, "is cut off: it has the tensor 'a'"),
    ("misaligned", {"tensors": [tensor("a", [8], F32, 4)]}, "which is no multiple of 32"),
    ("overlapping", {"tensors": [TENSORS[0], tensor("b", [8], F32, 352)]}, "inside of another"),
    ("alignment 0", {"keys": [key("general.alignment", UINT32, u32(0))]}, "general.alignment 0, which must be a power"),
    ("alignment 33", {"keys": [key("general.alignment", UINT32, u32(33))]}, "general.alignment 33"),
    ("alignment text", {"keys": [key("general.alignment", STRING, text("x"))]}, "general.alignment 'x'"),
]


@pytest.mark.parametrize(("given", "said"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_a_damaged_or_hostile_file_is_refused_in_a_sentence_and_costs_nothing(
    refused: Callable[[bytes], str], given: dict[str, Any], said: str
) -> None:
    content = contents(**given)
    tracemalloc.start()
    assert said in refused(content)
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_a_file_cut_off_anywhere_is_refused(refused: Callable[[bytes], str]) -> None:
    whole = contents()
    for end in range(8, len(whole)):
        assert "cut off" in refused(whole[:end]), end


def test_a_file_cut_off_while_it_is_read_is_refused(
    refused: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(
        gguf.os, "pread", lambda stream, count, at: pread(stream, min(count, 100), at) if at < 200 else b""
    )
    assert "was cut off at byte 200 while it was read" in refused(contents())


def test_a_header_that_no_model_has_is_not_kept_in_memory(
    refused: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_MAX_HEADER", 1 << 20)
    assert "has a header of over 1 MiB" in refused(contents([key("a", STRING, text(bytes(1 << 20)))]))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_changed_byte_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(contents())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "changed.gguf"
    file.write_bytes(content)
    try:
        header = read_header(file)
    except UnsupportedError:
        return
    assert all(place.offset + place.nbytes <= len(content) for place in header.tensors.values())


@pytest.mark.parametrize("kind", ["missing", "folder", "FIFO", "dangling link"])
def test_what_is_no_file_is_refused_and_not_opened(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.gguf"
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "dangling link":
        file.symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(UnsupportedError, match="is no file"):
        read_header(file)


def test_the_types_have_the_sizes_that_ggml_gives_them() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for kind, (name, block, size) in gguf.BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType(kind)] == (block, size) and GGMLQuantizationType(kind).name == name
    known = {kind.value: kind.name for kind in GGMLQuantizationType if kind.value not in gguf.BLOCKS}
    assert known == gguf.UNREAD
