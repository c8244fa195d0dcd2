"""A hybrid target written once more to be obviously right: the recurrence token by token, one sequence, no rollback.

It shares no code with the engine, and is called as Transformers' Qwen3_5ForCausalLM is. tests/exhaustive holds one
against the other.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.fast.engine.reference import Output


class Delta(NamedTuple):
    """State of a recurrent layer of one sequence."""

    matrix: Tensor
    """[Nv, Dk, Dv]"""
    inputs: Tensor
    """The last three inputs of the convolution, [3, C]."""


class HybridReference:
    """Qwen3.5 over one sequence at a time, in fp32 or fp64."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        config = config | config.get("text_config", {})
        files = sorted(Path(folder).glob("*.safetensors"))
        tensors = {name: x for file in files for name, x in load_file(file).items()}
        self.config = SimpleNamespace(**config)
        self.weights = {
            name.removeprefix("model.").removeprefix("language_model."): tensor.to(dtype)
            for name, tensor in tensors.items()
        }
        self.embedding = self.weights["embed_tokens.weight"]
        self.head = self.embedding if config["tie_word_embeddings"] else self.weights["lm_head.weight"]

    def get_input_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.embedding)

    def get_output_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.head)

    @torch.no_grad()
    def __call__(
        self,
        rows: Tensor,
        past_key_values: list[Any] | None = None,
        use_cache: bool = True,
        output_hidden_states: bool = False,
    ) -> Output:
        """Run the rows [1, T] that come after those whose memory is in `past_key_values`."""
        x = F.embedding(rows[0], self.embedding)
        past = past_key_values or [None] * self.config.num_hidden_layers
        hidden_states, cache = [x], []
        for layer, kind in enumerate(self.config.layer_types):
            name = f"layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm")
            if kind == "linear_attention":
                out, memory = self._delta_net(normed, f"{name}.linear_attn", past[layer])
            else:
                out, memory = self._attention(normed, f"{name}.self_attn", past[layer])
            x = x + out
            y = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + (self._experts if f"{name}.mlp.gate.weight" in self.weights else self._mlp)(y, f"{name}.mlp")
            hidden_states.append(x)
            cache.append(memory)
        hidden_states[-1] = self._norm(x, "norm")
        logits = F.linear(hidden_states[-1], self.head).float()
        return Output(logits[None], tuple(state[None] for state in hidden_states), cache)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

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

    def _delta_net(self, x: Tensor, name: str, past: Delta | None) -> tuple[Tensor, Delta]:
        config, weights = self.config, self.weights
        k_heads, v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        k_dim, v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, taps = k_heads * k_dim, weights[f"{name}.conv1d.weight"][:, 0]
        rate, bias = weights[f"{name}.A_log"].exp(), weights[f"{name}.dt_bias"]
        mixed = self._linear(x, f"{name}.in_proj_qkv")
        matrix, window = past or Delta(x.new_zeros(v_heads, k_dim, v_dim), x.new_zeros(3, mixed.shape[1]))
        outputs = []
        for t, u in enumerate(mixed):
            window = torch.cat([window, u[None]])
            q, k, v = F.silu((window * taps.t()).sum(dim=0)).split([keys, keys, v_heads * v_dim])
            window = window[1:]
            q, k = (y.view(k_heads, k_dim) for y in (q, k))
            q, k = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            q, k = (y.repeat_interleave(v_heads // k_heads, dim=0) for y in (q * k_dim**-0.5, k))
            decay = torch.exp(-rate * F.softplus(self._linear(x[t], f"{name}.in_proj_a") + bias))
            beta = torch.sigmoid(self._linear(x[t], f"{name}.in_proj_b"))
            matrix = matrix * decay[:, None, None]
            d = beta[:, None] * (v.view(v_heads, v_dim) - torch.einsum("hkv,hk->hv", matrix, k))
            matrix = matrix + torch.einsum("hk,hv->hkv", k, d)
            outputs.append(torch.einsum("hkv,hk->hv", matrix, q))
        o = torch.stack(outputs)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weights[f"{name}.norm.weight"]
        gate = F.silu(self._linear(x, f"{name}.in_proj_z"))
        return self._linear(o.flatten(1) * gate, f"{name}.out_proj"), Delta(matrix, window)

    def _attention(
        self, x: Tensor, name: str, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        config, dim = self.config, self.config.head_dim
        first = past[0].shape[1] if past else 0
        positions = torch.arange(first, first + len(x))
        q, gate = self._linear(x, f"{name}.q_proj").view(len(x), -1, 2 * dim).split(dim, dim=-1)
        k, v = (self._linear(x, f"{name}.{part}_proj").view(len(x), -1, dim).transpose(0, 1) for part in "kv")
        q = self._turned(self._norm(q.transpose(0, 1), f"{name}.q_norm"), positions)
        k = self._turned(self._norm(k, f"{name}.k_norm"), positions)
        if past:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        group = config.num_attention_heads // config.num_key_value_heads
        scores = q @ k.repeat_interleave(group, dim=0).transpose(1, 2) * dim**-0.5
        scores = scores.masked_fill(torch.arange(k.shape[1]) > positions[:, None], -torch.inf)
        o = (scores.softmax(dim=-1) @ v.repeat_interleave(group, dim=0)).transpose(0, 1) * torch.sigmoid(gate)
        return self._linear(o.flatten(1), f"{name}.o_proj"), (k, v)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE of the first dims of each head [heads, T, D]."""
        rope = self.config.rope_parameters
        dim = int(self.config.head_dim * rope["partial_rotary_factor"])
        frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * (1 + self.weights[f"{name}.weight"])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])
