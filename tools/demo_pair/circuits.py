"""A start that can copy: the target's first layers begin as the circuits that copying needs.

A small model finds "look at the token before" and "look where this token stood last time" only after a long plateau;
two CPU cores have no time for it. So the first key/value head of layer 0 starts by looking one and two tokens back.
Those of layers 1 and 2 start as induction heads that match the last two tokens. Training is free to change all of it.
In the spirit of mimetic initialisation (Trockman & Kolter, arXiv 2305.09828).
"""

import torch
from torch import Tensor, nn

from tools.demo_pair.model import Shape, Target, TargetLayer, rope_tables

_EMBEDDING = 0.2
_FINAL_NORM = 0.15
_NEAR_PAIRS = 8  # the fastest rotary pairs tell neighbours apart
_FAR_PAIR = 30  # from here on, pairs turn slowly enough to compare content across the whole context
_ONE_TOKEN, _TWO_TOKENS = 40, 28  # dimensions that compare the last token, and the one before


@torch.no_grad()
def start_with_copying(target: Target) -> None:
    shape = target.shape
    embedding = target.model.embed_tokens.weight
    nn.init.normal_(embedding, std=_EMBEDDING)
    embedding[:, 0] = 4 * _EMBEDDING  # the same for every token: what a purely positional query reads
    target.model.norm.weight.fill_(_FINAL_NORM)
    one_back, two_back = _rotation(shape.hidden), _rotation(shape.hidden)
    _look_back(target.model.layers[0], shape, [one_back, two_back])
    for layer in target.model.layers[1:3]:
        _match_and_copy(layer, shape, one_back, two_back)


def _rotation(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0]


def _look_back(layer: TargetLayer, shape: Shape, written: list[Tensor]) -> None:
    """Make query head i look i + 1 tokens back and write the token there, turned by `written[i]`."""
    attention, size = layer.self_attn, shape.head_dim
    near = torch.cat((torch.arange(_NEAR_PAIRS), torch.arange(_NEAR_PAIRS) + size // 2))
    key = torch.zeros(size)
    key[:_NEAR_PAIRS] = 1.0
    attention.k_proj.weight[:size] = 0.0
    attention.k_proj.weight[:size, 0] = key
    attention.q_norm.weight[near] = attention.k_norm.weight[near] = 1.5
    for i, turn in enumerate(written):
        cos, sin = rope_tables(shape, torch.tensor(-(i + 1)))
        query = torch.cat((key[: size // 2] * cos[: size // 2], key[: size // 2] * sin[: size // 2]))
        attention.q_proj.weight[i * size : (i + 1) * size] = 0.0
        attention.q_proj.weight[i * size : (i + 1) * size, 0] = query
        read = _rotation(shape.hidden)[:size] if i == 0 else attention.v_proj.weight[:size].clone()
        attention.v_proj.weight[:size] = read
        attention.o_proj.weight[:, i * size : (i + 1) * size] = _EMBEDDING * turn @ read.T


def _match_and_copy(layer: TargetLayer, shape: Shape, one_back: Tensor, two_back: Tensor) -> None:
    """Make the first two query heads find the last two tokens' earlier place and write the token behind it."""
    attention, size = layer.self_attn, shape.head_dim
    one, two = _rotation(shape.hidden)[:_ONE_TOKEN], _rotation(shape.hidden)[:_TWO_TOKENS]
    for part in (one, two):
        part[:, 0] = 0.0
    pairs = torch.arange(_FAR_PAIR, size // 2)
    places = torch.cat((pairs, pairs + size // 2))
    key, query = torch.zeros(size, shape.hidden), torch.zeros(size, shape.hidden)
    key[places] = torch.cat((one @ one_back.T, two @ two_back.T))
    query[places] = torch.cat((one, two @ one_back.T))
    attention.q_norm.weight[places] = attention.k_norm.weight[places] = 1.5
    attention.k_proj.weight[:size] = key
    read = _rotation(shape.hidden)[:size]
    attention.v_proj.weight[:size] = read
    for i in range(shape.groups):
        attention.q_proj.weight[i * size : (i + 1) * size] = query
        attention.o_proj.weight[:, i * size : (i + 1) * size] = 2 * _EMBEDDING * read.T
