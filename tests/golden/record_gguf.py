"""Recorder of what llama.cpp makes of models and weights.

`python -m tests.golden.record_gguf FOLDER` writes tests/golden/gguf. It has a file of each family by llama.cpp's
converter, and in blocks.json a few blocks of each type by its quantisers, with the SHA-256 of what they are in fp32.
FOLDER has llama.cpp's `source`, as `python -m tools.lab llama_cpp` unpacks it, and in `cmake` a shared ggml.
"""

import base64
import hashlib
import json
import subprocess
import sys
from ctypes import CDLL, CFUNCTYPE, POINTER, Structure, c_bool, c_char_p, c_int64, c_size_t, c_void_p
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from app.engine.checkpoint.gguf import BLOCKS
from tests.fast.engine.gguf_models import CONVERTED, ORIGINALS, QUANTISED, write_original
from tools.lab.llama_source import CONVERT

ROWS, COLUMNS = 2, 512
"""Of each type: four blocks of the largest size."""
ALL_WITH_GPT2S_VOCABULARY = """
from conversion.llama import LlamaModel
LlamaModel.set_vocab = TextModel._set_vocab_gpt2
runpy.run_path"""


class Traits(Structure):
    """`ggml_type_traits`, as far as it is read."""

    _fields_ = (
        ("name", c_char_p),
        ("block", c_int64),
        ("interleave", c_int64),
        ("size", c_size_t),
        ("is_quantised", c_bool),
        ("to_float", CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
    )


def address(array: np.ndarray) -> c_void_p:
    return array.ctypes.data_as(c_void_p)


def quantised(library: CDLL, kind: int) -> dict[str, str]:
    """Return random weights in a type, and the hash of what ggml dequantises them to."""
    _, block, size = BLOCKS[kind]
    weights = np.random.default_rng(kind).standard_normal((ROWS, COLUMNS), dtype=np.float32) / 16
    importance = np.ones(COLUMNS, dtype=np.float32)
    stored, wide = np.zeros((ROWS, COLUMNS // block * size), dtype=np.uint8), np.zeros_like(weights)
    sizes = (c_int64(number) for number in (0, ROWS, COLUMNS))
    library.ggml_quantize_chunk(kind, address(weights), address(stored), *sizes, address(importance))
    to_float = library.ggml_get_type_traits(kind).contents.to_float
    to_float(address(stored), address(wide), c_int64(wide.size))
    assert np.abs(wide - weights).mean() < 0.05
    return {"blocks": base64.b64encode(stored).decode(), "sha256": hashlib.sha256(wide).hexdigest()}


def convert(source: Path, family: str, outtype: str) -> None:
    """Write the converter's file of a family's original."""
    script = CONVERT.replace("runpy.run_path", ALL_WITH_GPT2S_VOCABULARY, 1)
    with TemporaryDirectory() as folder:
        original = write_original(Path(folder), family, tokenizer=True)
        flags = ["--outtype", outtype, "--outfile", str(CONVERTED / f"{family}.gguf"), "--model-name", family]
        subprocess.run([sys.executable, "-c", script, str(source), str(original), *flags], check=True)


if __name__ == "__main__":
    llama_cpp = Path(sys.argv[1])
    CONVERTED.mkdir(exist_ok=True)
    for family, (_, outtype) in ORIGINALS.items():
        convert(llama_cpp / "source", family, outtype)
    library = CDLL(str(llama_cpp / "cmake" / "bin" / "libggml-base.so"))
    library.ggml_get_type_traits.restype = POINTER(Traits)
    found = {name: quantised(library, kind) for kind, (name, _, _) in BLOCKS.items() if name != "F32"}
    QUANTISED.write_text(json.dumps(found, indent=1) + "\n")
