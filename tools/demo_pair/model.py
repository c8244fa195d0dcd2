"""A Qwen3 target and its DFlash draft as trained, with parameters named as in the published files.

Attention is written out as matmul, softmax, matmul: on a CPU its backward pass is several times faster than SDPA's.
Everything is fp32: without AMX, bf16 is no faster on a CPU.
Shapes: B sequences, T tokens, H hidden, N key/value heads, G query heads for each, D head size, A anchors, S block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_QUERIES = 128
"""Queries that attend together. Scores of later keys than theirs are never computed."""


@dataclass(frozen=True)
class Shape:
    vocab: int = 2560
    hidden: int = 192
    layers: int = 5
    kv_heads: int = 2
    groups: int = 2
    head_dim: int = 128
    mlp: int = 384
    rope_theta: float = 100000.0
    eps: float = 1e-6
    max_positions: int = 2048
    block: int = 16
    draft_layers: int = 3
    taps: tuple[int, ...] = (0, 1, 2, 3)
    head: str = "dflash"
    """Kind of draft: "dflash", "dflash2" with convolutions and a selector, or "dspark" with a Markov head."""
    conv_group: int = 16
    rank: int = 64


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_tables(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[..., D]` fp32 for `positions` `[...]`, in the half-rotation layout of Llama and Qwen3."""
    frequencies = shape.rope_theta ** (
        -torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    )
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n, self.g, self.d = shape.kv_heads, shape.groups, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, self.n * self.g * self.d, bias=False)
        self.k_proj = nn.Linear(shape.hidden, self.n * self.d, bias=False)
        self.v_proj = nn.Linear(shape.hidden, self.n * self.d, bias=False)
        self.o_proj = nn.Linear(self.n * self.g * self.d, shape.hidden, bias=False)
        self.q_norm = Norm(self.d, shape.eps)
        self.k_norm = Norm(self.d, shape.eps)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `[B, T, H]` -> `[B, N, G, T, D]`, scaled. cos and sin broadcast against `[B, T, N, G, D]`."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.n, self.g, self.d)))
        return (rotate(q, cos, sin) * self.d**-0.5).permute(0, 2, 3, 1, 4)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Map `[B, T, H]` -> two of `[B, N, T, D]`. cos and sin broadcast against `[B, T, N, D]`."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.n, self.d)))
        v = self.v_proj(x).unflatten(-1, (self.n, self.d))
        return rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)

    def output(self, o: Tensor) -> Tensor:
        """Map `[B, N, G, T, D]` -> `[B, T, H]`."""
        return self.o_proj(o.permute(0, 3, 1, 2, 4).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Layer of target and draft without the attention itself, which each of them has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)


class TargetLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` `[B, T, H]`, cos and sin `[T, D]`; causal."""
        a = self.input_layernorm(x)
        q = self.self_attn.query(a, cos[:, None, None], sin[:, None, None])
        k, v = self.self_attn.key_value(a, cos[:, None], sin[:, None])
        o = torch.cat([_attend(rows, k, v, i * _QUERIES) for i, rows in enumerate(q.split(_QUERIES, 3))], 3)
        x = x + self.self_attn.output(o)
        return x + self.mlp(self.post_attention_layernorm(x))


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Map the queries `[B, N, G, Q, D]` from position `first` on to `[B, N, G, Q, D]`. They see no later key."""
    rows = q.shape[3]
    k, v = k[:, :, : first + rows], v[:, :, : first + rows]
    scores = (q.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, (-1, rows))
    hidden = torch.ones(rows, first + rows, dtype=torch.bool, device=q.device).triu(first + 1)
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (probabilities.flatten(2, 3) @ v).unflatten(2, (-1, rows))


class BlockConv(nn.Module):
    """DFlash2's convolution over a row and the one before it in its block. It begins as the identity."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.groups = shape.hidden // shape.conv_group, shape.conv_group
        self.base_kernel = nn.Parameter(torch.zeros(2, 2, shape.hidden))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(shape.hidden, 4 * self.groups[0], bias=False)

    def kernels(self, normed: Tensor) -> Tensor:
        """Map `[B, A, S, H]` -> `[B, A, S, 2 sides, 2 taps, H]`."""
        change = self.kernel_projection(normed).unflatten(-1, (2, 2, -1))
        return self.base_kernel + change.repeat_interleave(self.groups[1], -1)

    def forward(self, z: Tensor, kernels: Tensor, side: int) -> Tensor:
        """Map `[B, A, S, H]` -> the same, by the kernels of one side."""
        before = F.pad(z[:, :, :-1], (0, 0, 1, 0))
        return kernels[..., side, 0, :] * z + kernels[..., side, 1, :] * before


class CandidateSelector(nn.Module):
    """DFlash2's scores of pairs of tokens, by the row's hidden state. They begin as 0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(shape.vocab, shape.rank) * shape.rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab, shape.rank))
        self.hidden_projection = nn.Linear(shape.hidden, shape.rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Map hidden states `[N, H]` and the tokens before theirs `[N]` -> scores of all tokens `[N, V]`."""
        return (self.predecessor_codebook[before] * self.hidden_projection(hidden)) @ self.successor_codebook.T


class MarkovHead(nn.Module):
    """DSpark's scores of pairs of tokens. They begin as 0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, shape.vocab, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Map as `CandidateSelector` does, for any hidden states."""
        return self.markov_w2(self.markov_w1(before))


class DraftLayer(Layer):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if shape.head == "dflash2":
            self.attention_conv, self.mlp_conv = BlockConv(shape), BlockConv(shape)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        anchors: Tensor,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """`x` `[B, A*S, H]`, `context` `[B, T, H]` (after hidden_norm), `anchors` `[B, A]` positions.

        A block sees the features strictly before its anchor and all rows of the block.
        """
        a, count = self.input_layernorm(x), anchors.shape[1]
        convolved = "attention_conv" in self._modules
        if convolved:
            blocks = a.unflatten(1, (count, -1))
            kernels = self.attention_conv.kernels(blocks)
            a = self.attention_conv(blocks, kernels, 0).flatten(1, 2)
        block_cos, block_sin = block_rope
        context_cos, context_sin = context_rope
        length = context.shape[1]
        q = self.self_attn.query(a, block_cos[:, :, None, None], block_sin[:, :, None, None])
        k_own, v_own = self.self_attn.key_value(a, block_cos[:, :, None], block_sin[:, :, None])
        k_context, v_context = self.self_attn.key_value(context, context_cos[:, None], context_sin[:, None])
        rows = x.shape[1] // count
        q_blocks = q.unflatten(3, (count, rows))
        k_own, v_own = k_own.unflatten(2, (count, rows)), v_own.unflatten(2, (count, rows))
        to_context = (q.flatten(2, 3) @ k_context.transpose(-1, -2)).unflatten(2, (-1, count, rows))
        hidden = torch.arange(length, device=x.device) >= anchors[:, None, None, :, None, None]
        to_context = to_context.masked_fill(hidden, -torch.inf)
        to_own = q_blocks @ k_own.unsqueeze(2).transpose(-1, -2)
        probabilities = torch.cat((to_context, to_own), -1).softmax(-1)
        p_context, p_own = probabilities.split((length, rows), -1)
        o = (p_context.flatten(2, 4) @ v_context).unflatten(2, (-1, count, rows)) + p_own @ v_own.unsqueeze(2)
        out = self.self_attn.output(o.flatten(3, 4))
        if not convolved:
            x = x + out
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.attention_conv(out.unflatten(1, (count, -1)), kernels, 1).flatten(1, 2)
        blocks = self.post_attention_layernorm(x).unflatten(1, (count, -1))
        kernels = self.mlp_conv.kernels(blocks)
        out = self.mlp(self.mlp_conv(blocks, kernels, 0))
        return x + self.mlp_conv(out, kernels, 1).flatten(1, 2)


class _Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TargetLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


class Target(nn.Module):
    """Qwen3ForCausalLM with a tied head; the state dict is the published file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Stack(shape)
        _initialise(self)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map token ids `[B, T]` -> hidden after the final norm `[B, T, H]`, features `[B, T, n_taps * H]`.

        `positions` `[T]` are 0, 1, ... unless given.
        """
        cos, sin = rope_tables(
            self.shape, torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        )
        x = self.model.embed_tokens(ids)
        taps = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin)
            if i in self.shape.taps:
                taps.append(x)
        return self.model.norm(x), torch.cat(taps, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[..., H]` -> `[..., V]` in fp32."""
        return F.linear(hidden, self.model.embed_tokens.weight)


class Draft(nn.Module):
    """The DFlash draft, without embedding and head; the state dict is the published file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.draft_layers))
        self.norm = Norm(shape.hidden, shape.eps)
        _initialise(self)
        if shape.head == "dflash2":
            self.candidate_selector = CandidateSelector(shape)
        elif shape.head == "dspark":
            self.markov_head = MarkovHead(shape)

    def pairs(self, hidden: Tensor, before: Tensor) -> Tensor | float:
        """Return the scores `[N, V]` that tokens have after those `before` theirs `[N]`, or 0 without such a head."""
        if self.shape.head == "dflash2":
            return self.candidate_selector(hidden, before)
        if self.shape.head == "dspark":
            return self.markov_head(hidden, before)
        return 0.0

    def forward(
        self, features: Tensor, anchors: Tensor, block_embeddings: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Map features `[B, T, n_taps * H]`, anchors `[B, A]`, block embeddings `[B, A, S, H]` -> `[B, A, S, H]`.

        `positions` `[T]` of the features are 0, 1, ... unless given.
        """
        context = self.hidden_norm(self.fc(features))
        size = block_embeddings.shape[2]
        if positions is None:
            positions = torch.arange(features.shape[1], device=features.device)
        rows = positions[anchors].unsqueeze(-1) + torch.arange(size, device=features.device)
        block_rope = rope_tables(self.shape, rows.flatten(1))
        context_rope = rope_tables(self.shape, positions)
        x = block_embeddings.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, anchors, block_rope, context_rope)
        return self.norm(x).unflatten(1, (-1, size))


def _initialise(model: nn.Module) -> None:
    """Scale matrices by their input width. Those that write to the residual stream start at zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "kernel_projection.weight")):
            nn.init.zeros_(parameter)
        elif "embed_tokens" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
