"""A hybrid target written once more to be obviously right: the recurrence token by token, one sequence, no rollback.

It shares no code with the engine, and is called as Transformers' Qwen3_5ForCausalLM is. tests/exhaustive holds one
against the other.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fast.engine.hybrid_pairs import make_hybrid_pair
from tests.fast.engine.lossless import LUCKY, Subject, random_prompts
from tests.fast.engine.reference import ReferenceTarget, Rope, rotated


class Delta(NamedTuple):
    """State of a recurrent layer of one sequence."""

    matrix: Tensor
    """[Nv, Dk, Dv]"""
    inputs: Tensor
    """The last three inputs of the convolution, [3, C]."""


class HybridReference(ReferenceTarget):
    """Qwen3.5 over one sequence at a time, in fp32 or fp64."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype)
        rope = self.config.rope_parameters
        turned = {"rope_dim": int(self.head_dim * rope["partial_rotary_factor"])}
        self.rope = Rope.of(vars(self.config) | {"rope_parameters": rope | turned})

    def _mixed(self, x: Tensor, layer: int, past: Any) -> tuple[Tensor, Any]:
        if self.config.layer_types[layer] == "linear_attention":
            return self.delta_net(x, f"layers.{layer}.linear_attn", past)
        return self._attention(x, f"layers.{layer}.self_attn", past)

    def _experts(self, x: Tensor, name: str) -> Tensor:
        """Row by row, the weighted sum of the experts that the router finds most likely, and the shared one."""
        gate_up, down = (self.weights[f"{name}.experts.{part}_proj"] for part in ("gate_up", "down"))
        shares = self._linear(x, f"{name}.gate").softmax(dim=-1)
        out = torch.sigmoid(self._linear(x, f"{name}.shared_expert_gate")) * self._mlp(x, f"{name}.shared_expert")
        for t, chosen in enumerate(shares.topk(self.config.num_experts_per_tok).indices.tolist()):
            for expert in chosen:
                gate, up = (gate_up[expert] @ x[t]).chunk(2)
                share = shares[t, expert] / shares[t, chosen].sum()
                out[t] += share * (down[expert] @ (F.silu(gate) * up))
        return out

    def delta_net(self, x: Tensor, name: str, past: Delta | None) -> tuple[Tensor, Delta]:
        config, weights = self.config, self.weights
        k_heads, v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        k_dim, v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, taps = k_heads * k_dim, weights[f"{name}.conv1d.weight"][:, 0]
        rate, bias = weights[f"{name}.A_log"].exp(), weights[f"{name}.dt_bias"]
        mixed = self._linear(x, f"{name}.in_proj_qkv")
        matrix, window = past or Delta(x.new_zeros(v_heads, k_dim, v_dim), x.new_zeros(3, mixed.shape[1]))
        inputs = torch.cat([window, mixed])
        convolved = F.silu((inputs.unfold(0, 4, 1) * taps).sum(-1))
        q, k, v = convolved.split([keys, keys, v_heads * v_dim], dim=1)
        q, k = (y.view(-1, k_heads, k_dim) for y in (q, k))
        q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(v_heads // k_heads, dim=1)[:, :, None] for y in (q * k_dim**-0.5, k))
        v = v.view(-1, v_heads, 1, v_dim)
        decay = torch.exp(-rate * F.softplus(self._linear(x, f"{name}.in_proj_a") + bias))[:, :, None, None]
        beta = torch.sigmoid(self._linear(x, f"{name}.in_proj_b"))[:, :, None, None]
        outputs = []
        for t in range(len(x)):
            matrix = matrix * decay[t]
            matrix = matrix + k[t].transpose(1, 2) * (beta[t] * (v[t] - k[t] @ matrix))
            outputs.append(q[t] @ matrix)
        o = torch.stack(outputs)[:, :, 0]
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weights[f"{name}.norm.weight"]
        gate = F.silu(self._linear(x, f"{name}.in_proj_z"))
        return self._linear(o.flatten(1) * gate, f"{name}.out_proj"), Delta(matrix, inputs[-3:])

    def _attention(
        self, x: Tensor, name: str, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        config, dim = self.config, self.config.head_dim
        first = past[0].shape[1] if past else 0
        positions = torch.arange(first, first + len(x))
        q, gate = self._linear(x, f"{name}.q_proj").view(len(x), -1, 2 * dim).split(dim, dim=-1)
        k, v = (self._linear(x, f"{name}.{part}_proj").view(len(x), -1, dim).transpose(0, 1) for part in "kv")
        q = rotated(self._norm(q.transpose(0, 1), f"{name}.q_norm"), positions, self.rope)
        k = rotated(self._norm(k, f"{name}.k_norm"), positions, self.rope)
        if past:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        group = config.num_attention_heads // config.num_key_value_heads
        scores = q @ k.repeat_interleave(group, dim=0).transpose(1, 2) * dim**-0.5
        scores = scores.masked_fill(torch.arange(k.shape[1]) > positions[:, None], -torch.inf)
        o = (scores.softmax(dim=-1) @ v.repeat_interleave(group, dim=0)).transpose(0, 1) * torch.sigmoid(gate)
        return self._linear(o.flatten(1), f"{name}.o_proj"), (k, v)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * (1 + self.weights[f"{name}.weight"])


def hybrid_subject(folder: Path) -> Subject:
    """Six prompts and five tokens, so that drafts are accepted by luck."""
    pair = make_hybrid_pair(folder, **LUCKY)
    prompts = [
        replace(prompt, token_ids=prompt.token_ids[:40], max_tokens=min(prompt.max_tokens, 16))
        for prompt in random_prompts(5, 6)
    ]
    return Subject("hybrid", pair.target, pair.draft, prompts, HybridReference)
