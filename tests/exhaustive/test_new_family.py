"""A new family of targets is a class and one line in the registry: here Llama, which has no norms of q and k."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.engine.errors import UnsupportedError
from app.engine.models.registry import TARGETS
from app.engine.models.target import Target
from app.messages import Request
from tests.fast.engine.lossless import make_engine, random_prompts
from tests.fast.engine.pairs import Pair, make_pair

torch.set_num_threads(1)


class Llama(Target):
    """Decoder without norms of q and k."""

    family = "dense Llama"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A draft beside a random Llama in the place of its Qwen3 target."""
    pair = make_pair(tmp_path, block_size=8)
    qwen3 = json.loads((pair.target / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
    torch.manual_seed(3)
    config = LlamaConfig(**{name: qwen3[name] for name in (*sizes, *more)}, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(pair.target)
    return pair


def wanted(pair: Pair, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Greedy tokens of Transformers, one forward each."""
    model, tokens = LlamaForCausalLM.from_pretrained(pair.target).eval(), list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("drafts", [True, False])
def test_one_line_lets_it_decode_what_transformers_decodes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    monkeypatch.setitem(TARGETS, "llama", Llama)
    engine = make_engine(pair.target, pair.draft if drafts else None, page_size=4, max_model_len=192, max_num_seqs=4)
    prompts = random_prompts(pair.vocab_size, 6)
    requests = [Request(f"r{i}", prompt.token_ids, prompt.max_tokens) for i, prompt in enumerate(prompts)]
    found = engine.core.run(requests)
    assert found == {
        request.request_id: wanted(pair, tuple(request.token_ids), request.max_tokens) for request in requests
    }


def test_without_its_line_it_is_refused_by_name(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="model_type 'llama' is not supported yet; supported: 'qwen3'"):
        make_engine(pair.target, None)
