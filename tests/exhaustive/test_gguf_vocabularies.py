"""Published vocabularies, of which llama.cpp has copies, make the ids that llama-server made of the golden texts.

The source is that of tools.lab.llama_cpp. It is downloaded once, 47 MB, into pytest's cache.
"""

import fcntl
import json
from pathlib import Path

import pytest
import tokenizers

from app.engine.checkpoint.gguf_text import text_files
from tests.golden.llama_tokens import REAL, digest, golden, real_metadata
from tools.lab.llama_source import LlamaCpp


@pytest.fixture(scope="module")
def vocabularies(pytestconfig: pytest.Config) -> Path:
    """Return the folder of llama.cpp's copies."""
    folder = Path(pytestconfig.cache.mkdir("llama.cpp"))
    llama = LlamaCpp(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        llama.download(print)
    return llama.source / "models"


@pytest.mark.parametrize("name", [name for name, file in REAL.items() if file])
def test_ids_of_a_published_vocabulary_are_llama_cpps(vocabularies: Path, name: str) -> None:
    metadata = real_metadata(vocabularies / f"ggml-vocab-{REAL[name]}.gguf", name)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(text_files(metadata)["tokenizer.json"]))
    found = [digest(tokenizer.encode(text, add_special_tokens=False).ids) for text in golden()["texts"]]
    assert found == golden()["real"][name]


@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2", "llama-spm"])
def test_ids_are_those_that_transformers_made_of_llama_cpps_own_texts(vocabularies: Path, name: str) -> None:
    file = vocabularies / f"ggml-vocab-{name}.gguf"
    texts = (file.parent / f"{file.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")[:-1]
    lines = (file.parent / f"{file.name}.out").read_text().splitlines()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(text_files(real_metadata(file, ""))["tokenizer.json"]))
    wrong = [
        text
        for text, line in zip(texts, lines, strict=True)
        if tokenizer.encode(text, add_special_tokens=False).ids != [int(word) for word in line.split()]
    ]
    assert len(texts) > 40 and wrong == []
