"""Filters and penalties are those of Transformers: of the plain loops of `reference`, and through the engine."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from app.messages import Request
from tests.exhaustive.live import load_transformers
from tests.fast.engine.flat_request import flat_request
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.planted import make_engine
from tests.fast.engine.reference import Sampling, adjusted, filtered


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def asking(request_id: str, prompt_len: int, **asked: Any) -> Request:
    rng = Random(prompt_len)
    return flat_request(request_id, tuple(rng.randrange(97) for _ in range(prompt_len)), 24, **asked)


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(top_k=7), TopKLogitsWarper(7)),
        (Sampling(top_k=1), TopKLogitsWarper(1)),
        (Sampling(top_k=500), TopKLogitsWarper(500)),
        (Sampling(top_p=0.3), TopPLogitsWarper(0.3)),
        (Sampling(top_p=0.95), TopPLogitsWarper(0.95)),
        (Sampling(min_p=0.05), MinPLogitsWarper(0.05)),
        (Sampling(min_p=1.0), MinPLogitsWarper(1.0)),
    ],
)
def test_the_oracle_filters_as_transformers_does(sampling: Sampling, warper: Callable[..., Tensor]):
    logits = normal(40, 60)
    for row, warped in zip(logits, warper(None, logits.clone()), strict=True):
        assert filtered(row.tolist(), sampling).kept.tolist() == warped.isfinite().tolist()


def test_the_oracle_repeats_penalties_as_transformers_does():
    logits = normal(1, 20)
    prompt, emitted = [3, 4, 4, 9], [9, 11, 3]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + emitted]), logits.clone())[0]
    ours = adjusted(logits[0].tolist(), Sampling(repetition_penalty=1.7), prompt, emitted)
    torch.testing.assert_close(torch.tensor(ours), theirs)


@pytest.mark.parametrize("min_tokens", [0, 15])
@pytest.mark.parametrize("penalty", [0.8, 1.0, 1.3])
def test_greedy_text_with_a_repetition_penalty_is_what_transformers_generates(tmp_path, penalty, min_tokens):
    pair = make_pair(tmp_path, seed=3, block_size=8, max_position_embeddings=128)
    engine, target = make_engine(pair, max_num_seqs=4), load_transformers(pair.target)
    stops = frozenset(range(0, 97, 5))
    requests = [
        asking(str(n), n, repetition_penalty=penalty, stop_token_ids=stops, min_tokens=min_tokens) for n in range(1, 13)
    ]
    emitted = engine.core.run(requests)
    for request in requests:
        prompt = torch.tensor([request.token_ids])
        whole = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            repetition_penalty=penalty,
            min_new_tokens=min_tokens or None,
            max_new_tokens=request.max_tokens,
            eos_token_id=sorted(stops),
            pad_token_id=0,
        )
        assert emitted[request.request_id] == whole[0, len(request.token_ids) :].tolist()
    assert min(map(len, emitted.values())) > min_tokens
