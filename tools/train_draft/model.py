"""A DFlash draft as trained, without embedding and lm_head. Its state dict is the published file.

Attention is written out as matmul, softmax, matmul: on a CPU its backward pass is several times faster than SDPA's.
Under torch.autocast products are in bfloat16, and norms, RoPE, softmax and the residual stream stay in fp32.
Shapes: B sequences, T tokens, H hidden, N key/value heads, G query heads for each, D head size, A anchors, S block,
V the target's vocabulary, Vd the draft's, r the rank of the tables of pairs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.train_draft.shape import Shape

Rope = tuple[Tensor, Tensor]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope_tables(shape: Shape, positions: Tensor) -> Rope:
    """Return cos and sin `[..., D]` fp32 for `positions` `[...]`, in the half-rotation layout of Llama and Qwen3."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device).float() / shape.head_dim
    angles = positions.float().unsqueeze(-1) * (1.0 / shape.rope_theta**exponents)
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn `[B, T, heads, D]` by tables `[..., T, D]`."""
    cos, sin = (table.unsqueeze(-2) for table in rope)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n, self.g, self.d = shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.d, bias=False)
        self.k_proj = nn.Linear(shape.hidden, self.n * self.d, bias=False)
        self.v_proj = nn.Linear(shape.hidden, self.n * self.d, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.d, shape.hidden, bias=False)
        self.q_norm = Norm(self.d, shape.eps)
        self.k_norm = Norm(self.d, shape.eps)

    def key_value(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Map `[B, T, H]` -> two of `[B, N, T, D]`."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.n, self.d)))
        v = self.v_proj(x).unflatten(-1, (self.n, self.d))
        return rotate(k, rope).transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, block_rope: Rope, context_rope: Rope) -> Tensor:
        """Map the blocks' rows `[B, A*S, H]` over `context` `[B, T, H]` -> the same.

        A block sees the features strictly before its anchor `[B, A]` and all rows of the block.
        """
        blocks, length = (anchors.shape[1], x.shape[1] // anchors.shape[1]), context.shape[1]
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.d))), block_rope) * self.d**-0.5
        q = q.unflatten(2, (self.n, self.g)).permute(0, 2, 3, 1, 4)
        k_context, v_context = self.key_value(context, context_rope)
        k_own, v_own = (part.unflatten(2, blocks).unsqueeze(2) for part in self.key_value(x, block_rope))
        to_context = (q.flatten(2, 3) @ k_context.mT).unflatten(2, (-1, *blocks))
        hidden = torch.arange(length, device=x.device) >= anchors[:, None, None, :, None, None]
        to_context = to_context.masked_fill(hidden, -torch.inf)
        to_own = q.unflatten(3, blocks) @ k_own.mT
        probabilities = torch.cat((to_context, to_own), -1).softmax(-1, dtype=torch.float32)
        p_context, p_own = probabilities.split((length, blocks[1]), -1)
        o = (p_context.flatten(2, 4) @ v_context).unflatten(2, (-1, *blocks)) + p_own @ v_own
        return self.o_proj(o.permute(0, 3, 4, 1, 2, 5).flatten(3).flatten(1, 2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockConv(nn.Module):
    """DFlash2's convolution over a row and the one before it in its block. It begins as the identity."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.group = shape.conv_group
        self.base_kernel = nn.Parameter(torch.zeros(2, 2, shape.hidden))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = nn.Linear(shape.hidden, 4 * shape.hidden // self.group, bias=False)

    def kernels(self, normed: Tensor) -> Tensor:
        """Map `[B, A*S, H]` -> `[B, A*S, 2 sides, 2 taps, H]`."""
        change = self.kernel_projection(normed).unflatten(-1, (2, 2, -1))
        return self.base_kernel + change.repeat_interleave(self.group, -1)

    def forward(self, z: Tensor, kernels: Tensor, side: int, count: int) -> Tensor:
        """Map `[B, A*S, H]` in `count` blocks -> the same, by the kernels of one side."""
        before = F.pad(z.unflatten(1, (count, -1))[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)
        return kernels[..., side, 0, :] * z + kernels[..., side, 1, :] * before


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, block_rope: Rope, context_rope: Rope) -> Tensor:
        """Map `[B, A*S, H]` -> the same, by the arguments of `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, anchors, block_rope, context_rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class ConvolvedLayer(Layer):
    """DFlash2's layer, with a convolution before and after attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = BlockConv(shape), BlockConv(shape)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor, block_rope: Rope, context_rope: Rope) -> Tensor:
        normed, count = self.input_layernorm(x), anchors.shape[1]
        kernels = self.attention_conv.kernels(normed)
        rows = self.attention_conv(normed, kernels, 0, count)
        rows = self.self_attn(rows, context, anchors, block_rope, context_rope)
        x = x + self.attention_conv(rows, kernels, 1, count)
        normed = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(normed)
        rows = self.mlp(self.mlp_conv(normed, kernels, 0, count))
        return x + self.mlp_conv(rows, kernels, 1, count)


class CandidateSelector(nn.Module):
    """DFlash2's scores of pairs of tokens, by the row's hidden state. They begin as 0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(shape.vocab, shape.rank) * shape.rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(shape.draft_vocab, shape.rank))
        self.hidden_projection = nn.Linear(shape.hidden, shape.rank, bias=False)

    @property
    def successors(self) -> Tensor:
        return self.successor_codebook

    def state(self, hidden: Tensor, before: Tensor) -> Tensor:
        return F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)


class MarkovHead(nn.Module):
    """DSpark's scores of pairs of tokens, with a gate by the row's hidden state. They begin as 0."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, shape.draft_vocab, bias=False)
        self.gate_proj = nn.Linear(shape.hidden + shape.rank, shape.rank)
        nn.init.normal_(self.markov_w1.weight, std=shape.rank**-0.5)
        for begins_as_zero in (self.markov_w2.weight, self.gate_proj.weight, self.gate_proj.bias):
            nn.init.zeros_(begins_as_zero)

    @property
    def successors(self) -> Tensor:
        return self.markov_w2.weight

    def state(self, hidden: Tensor, before: Tensor) -> Tensor:
        table = self.markov_w1(before)
        return table * self.gate_proj(torch.cat((hidden, table), -1)).sigmoid()


class Draft(nn.Module):
    """The draft. `path` is its head of pairs of tokens, or None: a pair's score is the product of `path.state(hidden
    [N, H], before [N])` `[N, r]` and the later token's row of `path.successors` `[Vd, r]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        layer = ConvolvedLayer if shape.head == "dflash2" else Layer
        self.layers = nn.ModuleList(layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        _initialise(self)
        if shape.head == "dflash2":
            self.candidate_selector = CandidateSelector(shape)
        elif shape.head == "dspark":
            self.markov_head = MarkovHead(shape)

    @property
    def path(self) -> CandidateSelector | MarkovHead | None:
        heads = {"dflash2": "candidate_selector", "dspark": "markov_head"}
        return getattr(self, heads[self.shape.head]) if self.shape.head in heads else None

    def pairs(self, hidden: Tensor, before: Tensor) -> Tensor | float:
        """Return the scores `[N, Vd]` that tokens have after the target's tokens `before` `[N]`, by the hidden states
        `[N, H]` of their rows, or 0 without such a head."""
        if self.path is None:
            return 0.0
        return F.linear(self.path.state(hidden, before), self.path.successors)

    def forward(self, features: Tensor, anchors: Tensor, block_embeddings: Tensor) -> Tensor:
        """Map features `[B, T, taps * H]`, positions of anchors `[B, A]` and block embeddings `[B, A, S, H]` to hidden
        states `[B, A, S, H]` after the final norm, fp32. Row k predicts the k-th token after the anchor."""
        context = self.hidden_norm(self.fc(features))
        size = block_embeddings.shape[2]
        rows = anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)
        block_rope = rope_tables(self.shape, rows.flatten(1))
        context_rope = rope_tables(self.shape, torch.arange(features.shape[1], device=features.device))
        x = block_embeddings.flatten(1, 2).float()
        for layer in self.layers:
            x = layer(x, context, anchors, block_rope, context_rope)
        return self.norm(x).unflatten(1, (-1, size))


def _initialise(model: nn.Module) -> None:
    """Scale matrices by their input width. Those that write to the residual stream, or change kernels, are zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "kernel_projection.weight")):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
