"""The method, written once more to be obviously right: one sequence, no pages, no cache of the draft's context.

Tests hold the engine against this file, so it shares no code with the engine. The target is written once more as well,
and is called as Transformers' Qwen3ForCausalLM is, so that either fits everywhere. tests/exhaustive holds one against
the other. The draft follows shared/DFLASH.md section 1 line by line.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

ContextKV = list[tuple[Tensor, Tensor]]
"""Per draft layer K (normed and rotated) and V of the context, each [kv_heads, n_context, head_dim]."""
Target = Any
"""A ReferenceTarget, or Transformers' Qwen3ForCausalLM."""


# Target


class Output(NamedTuple):
    """Result of a target, by Transformers' names."""

    logits: Tensor
    """[1, T, V]"""
    hidden_states: tuple[Tensor, ...]
    """The embeddings and the residual stream after each layer, [1, T, H]; the last one is normed."""
    cache: list[tuple[Tensor, Tensor]]


class ReferenceTarget:
    """Llama, Qwen2 or Qwen3, with experts stored one by one if any, over one sequence at a time, in the dtype given."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        folder = Path(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config |= config.get("text_config", {})
        tensors = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
        self.config = SimpleNamespace(**config)
        self.weights = {
            name.removeprefix("model.").removeprefix("language_model."): x.to(dtype) for name, x in tensors.items()
        }
        self.embedding = self.weights["embed_tokens.weight"]
        self.head = self.embedding if config["tie_word_embeddings"] else self.weights["lm_head.weight"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim", config["hidden_size"] // self.heads)
        self.eps = config["rms_norm_eps"]
        self.rope = Rope.of(config | {"head_dim": self.head_dim})

    def get_input_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.embedding)

    def get_output_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.head)

    @torch.no_grad()
    def __call__(
        self,
        rows: Tensor,
        cache: list[Any] | None = None,
        use_cache: bool = True,
        output_hidden_states: bool = False,
    ) -> Output:
        """Run the rows [1, T] that come after those whose K and V are in `cache`."""
        x = F.embedding(rows[0], self.embedding)
        hidden_states, new_cache = [x], []
        for layer in range(self.config.num_hidden_layers):
            name = f"layers.{layer}"
            past = cache[layer] if cache else None
            out, kv = self._mixed(self._norm(x, f"{name}.input_layernorm"), layer, past)
            x = x + out
            y = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + (self._experts if f"{name}.mlp.gate.weight" in self.weights else self._mlp)(y, f"{name}.mlp")
            hidden_states.append(x)
            new_cache.append(kv)
        hidden_states[-1] = self._norm(x, "norm")
        logits = F.linear(hidden_states[-1], self.head)
        return Output(logits[None], tuple(state[None] for state in hidden_states), new_cache)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _experts(self, x: Tensor, name: str) -> Tensor:
        """Row by row, the weighted sum of the MLPs that the router finds most likely."""
        chances = self._linear(x, f"{name}.gate").softmax(dim=-1, dtype=torch.float32)
        out = torch.zeros_like(x)
        for t, chosen in enumerate(chances.topk(self.config.num_experts_per_tok).indices.tolist()):
            total = chances[t, chosen].sum() if self.config.norm_topk_prob else 1.0
            for expert in chosen:
                out[t] += (chances[t, expert] / total).to(x.dtype) * self._mlp(x[t], f"{name}.experts.{expert}")
        return out

    def _mixed(self, x: Tensor, layer: int, past: Any) -> tuple[Tensor, Any]:
        return self._attention(x, f"layers.{layer}.self_attn", past)

    def _attention(
        self, x: Tensor, name: str, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Every row over all rows before it and itself; and K and V of all."""
        first = past[0].shape[1] if past else 0
        positions = torch.arange(first, first + len(x))
        q, k, v = (self._linear(x, f"{name}.{part}_proj").view(len(x), -1, self.head_dim) for part in "qkv")
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = (rotated(heads.transpose(0, 1), positions, self.rope) for heads in (q, k))
        v = v.transpose(0, 1)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        groups = self.heads // self.kv_heads
        scores = q @ k.repeat_interleave(groups, dim=0).transpose(1, 2) * self.head_dim**-0.5
        later = torch.arange(k.shape[1]) > positions[:, None]
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        out = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v.repeat_interleave(groups, dim=0)
        return self._linear(out.transpose(0, 1).reshape(len(x), -1), f"{name}.o_proj"), (k, v)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.weights[f"{name}.weight"], self.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, cast back, then the learned weight: Transformers' order."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Rope:
    """Turns of a head's first `dim` dims: pair i by position * frequencies[i], then times `factor`."""

    dim: int
    frequencies: Tensor
    factor: float
    adjacent_pairs: bool

    @staticmethod
    def of(config: dict[str, Any]) -> "Rope":
        given = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
        theta: float = given.get("rope_theta") or config["rope_theta"]
        dim: int = given.get("rope_dim") or config["head_dim"]
        plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        original = given.get("original_max_position_embeddings", config["max_position_embeddings"])
        kind, factor = given.get("rope_type", given.get("type", "default")), 1.0
        if kind == "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            for i, wave in enumerate((2 * math.pi / plain).tolist()):
                if wave > original / low:
                    plain[i] /= given["factor"]
                elif wave >= original / high:
                    s = (original / wave - low) / (high - low)
                    plain[i] *= (1 - s) / given["factor"] + s
        elif kind == "yarn":
            at = [
                dim * math.log(original / (2 * math.pi * given.get(name, default))) / (2 * math.log(theta))
                for name, default in (("beta_fast", 32), ("beta_slow", 1))
            ]
            low, high = (math.floor(at[0]), math.ceil(at[1])) if given.get("truncate", True) else at
            for i in range(dim // 2):
                slowed = min(1.0, max(0.0, (i - max(low, 0)) / (min(high, dim - 1) - max(low, 0))))
                plain[i] *= slowed / given["factor"] + (1 - slowed)
            factor = given.get("attention_factor") or 0.1 * math.log(given["factor"]) + 1
        elif kind != "default":
            raise NotImplementedError(kind)
        return Rope(dim, plain, factor, config.get("is_neox_style") is False)


def rotated(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Rotation of [heads, T, head_dim]; angles in float32, cos and sin cast to x's dtype."""
    angles = positions[:, None].float() * rope.frequencies
    cos, sin = (angles.cos() * rope.factor).to(x.dtype), (angles.sin() * rope.factor).to(x.dtype)
    x, rest = x[..., : rope.dim], x[..., rope.dim :]
    first, second = (x[..., 0::2], x[..., 1::2]) if rope.adjacent_pairs else x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    x = torch.stack(turned, dim=-1).flatten(-2) if rope.adjacent_pairs else torch.cat(turned, dim=-1)
    return torch.cat([x, rest], dim=-1)


def load_target(folder: Path | str, dtype: torch.dtype = torch.float32) -> ReferenceTarget:
    """The target without Transformers."""
    return ReferenceTarget(folder, dtype)


@torch.no_grad()
def teacher_forced(target: Target, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] in float32; row i is the target's prediction for position i + 1."""
    return target(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.no_grad()
def features(target: Target, token_ids: Sequence[int], taps: Sequence[int]) -> Tensor:
    """The residual stream after each tapped layer, side by side: [T, len(taps) * H].

    Raises ValueError for the last layer: Transformers' last `hidden_states` entry has already gone through the final
    norm, so it is not the residual stream.
    """
    last = target.config.num_hidden_layers - 1
    if any(not 0 <= tap < last for tap in taps):
        raise ValueError(f"taps {list(taps)} must lie in 0..{last - 1} to be read from hidden_states")
    hidden_states = target(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[tap + 1][0] for tap in taps], dim=-1)


# Draft


class ReferenceDraft:
    """A DFlash v1 draft in the dtype of its target.

    `block_size` overrides the checkpoint's (a smaller block is allowed). A draft file that brings `embed_tokens` or
    `lm_head` keeps its own. By its tensors it may have DFlash2's convolutions, its selector, or a Markov head of
    DSpark, whose formulas (shared/DRAFTS.md, 1.3 to 1.5) are loops over floats.
    """

    def __init__(self, folder: Path | str, target: Target, block_size: int | None = None) -> None:
        folder = Path(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if "transformer_layer_config" in config:
            config = config["transformer_layer_config"] | config
            config["target_layer_ids"] = [layers - 1 for layers in config["aux_hidden_state_layer_ids"]]
        config |= config.get("dflash_config", {}) | config.get("dspark_config", {})
        dflash = config
        self.target = target
        self.block_size: int = block_size or dflash["block_size"]
        self.mask_token_id: int = dflash["mask_token_id"]
        self.num_layers: int = config["num_hidden_layers"]
        self.taps: list[int] = dflash.get("target_layer_ids") or default_taps(
            self.num_layers, config["num_target_layers"]
        )
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.rope = Rope.of(config)
        kinds = config.get("layer_types") or ["full_attention"] * self.num_layers
        if config.get("use_swa") and "sliding_attention" not in kinds:
            kinds = ["sliding_attention"] * self.num_layers
        window = config.get("swa_window_size") or config.get("sliding_window")
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]
        if config.get("speculators_model_type") == "dflash2":
            config["is_causal"] = not config.get("sliding_window_non_causal", True)
        stated = [config[key] for key in ("is_causal", "causal", "causal_head") if config.get(key) is not None]
        self.causal = [(stated or [window is not None])[0] for window in self.windows]
        is_dspark = bool(config.get("markov_rank")) or config.get("architectures") == ["Qwen3DSparkModel"]
        is_dspark |= "dspark" in (config.get("projector_type"), config.get("speculators_model_type"))
        samples = config.get("sample_from_anchor", is_dspark and not config.get("dspark_bonus_anchor"))
        (method,) = config.get("speculators_config", {}).get("proposal_methods", [{}])
        samples = method.get("speculative_tokens", 99 * samples) >= self.block_size
        self.first = 0 if samples else 1
        self.top_k: int = config.get("selector_top_k", 16)
        self.multiplier: float = config.get("output_multiplier", 1.0)
        self.softcap: float | None = config.get("final_logit_softcapping")
        self.embedding_scale: float = config.get("input_embedding_scale", 1.0)

        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.offsets = tensors.pop("d2t", None)
        dtype = target.get_input_embeddings().weight.dtype
        self.weights = {name.removeprefix("model."): tensor.to(dtype) for name, tensor in tensors.items()}
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        tied = config.get("tie_word_embeddings") and "embed_tokens.weight" in self.weights
        head = self.embedding if tied else target.get_output_embeddings().weight.detach()
        self.head = self.weights.get("lm_head.weight", head)
        tables = ("candidate_selector.predecessor_codebook", "markov_head.markov_w1.weight")
        tables += ("candidate_selector.successor_codebook", "markov_head.markov_w2.weight")
        self.pair_tables = [self.weights[name] for name in tables if name in self.weights]
        mask_file = folder / "mask_embedding.pt"
        self.mask_row = torch.load(mask_file, weights_only=True)["embedding"] if mask_file.exists() else None

    # The pieces of section 1, in order.

    @torch.no_grad()
    def context_kv(self, features: Tensor) -> ContextKV:
        """K and V of the first context rows from their features [T, n_taps * H_target].

        They depend on the row's own feature and position only. No layer's input_layernorm touches them.
        """
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        positions = torch.arange(len(features))
        return [self._key_value(context, layer, positions) for layer in range(self.num_layers)]

    @torch.no_grad()
    def block_hidden(self, features: Tensor, anchor: int, n: int) -> Tensor:
        """Hidden states [b, H] after the final norm; row k stands at position n - 1 + k.

        `n` tokens are known, the last is the anchor; `features` [n - 1, n_taps * H_target] are of those before it.
        """
        assert len(features) == n - 1, f"{len(features)} features for {n} tokens: the anchor has none"
        context = self.context_kv(features)
        block_ids = torch.tensor([anchor] + [self.mask_token_id] * (self.block_size - 1))
        positions = torch.arange(n - 1, n - 1 + self.block_size)
        x = F.embedding(block_ids, self.embedding)
        if self.mask_row is not None:
            x = torch.cat((x[:1], self.mask_row.expand(self.block_size - 1, -1)))
        x = x * self.embedding_scale
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            normed, side = self._norm(x, f"{name}.input_layernorm"), f"{name}.attention_conv"
            out = self._attention(self._convolved(normed, normed, side, 0), layer, positions, context[layer])
            x = x + self._convolved(out, normed, side, 1)
            normed, side = self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp_conv"
            out = self._mlp(self._convolved(normed, normed, side, 0), f"{name}.mlp")
            x = x + self._convolved(out, normed, side, 1)
        return self._norm(x, "norm")

    def _convolved(self, z: Tensor, normed: Tensor, name: str, side: int) -> Tensor:
        """Rows [b, H] after one side's convolution, whose kernels come from the normed rows."""
        if f"{name}.base_kernel" not in self.weights:
            return z
        base = self.weights[f"{name}.base_kernel"].tolist()
        change = (normed @ self.weights[f"{name}.kernel_projection.weight"].T).tolist()
        groups = len(change[0]) // 4
        size = z.shape[1] // groups
        rows = z.tolist()
        out = []
        for p, row in enumerate(rows):
            kernels = [
                [base[side][tap][c] + change[p][(side * 2 + tap) * groups + c // size] for c in range(len(row))]
                for tap in (0, 1)
            ]
            before = rows[p - 1] if p else [0.0] * len(row)
            out.append([kernels[0][c] * row[c] + kernels[1][c] * before[c] for c in range(len(row))])
        return torch.tensor(out, dtype=z.dtype)

    @torch.no_grad()
    def block_logits(self, features: Tensor, anchor: int, n: int) -> Tensor:
        """Logits [b - 1, V] in float32: row k predicts the token at position n + k.

        They are of block rows 1 .. b - 1, or [b, V] of all rows of a draft that samples from the anchor.
        """
        rows = self.block_hidden(features, anchor, n)[self.first :]
        return F.linear(rows, self.head).float()

    def propose(self, features: Tensor, anchor: int, n: int) -> list[int]:
        """The b - 1 drafted tokens for positions n .. n + b - 2, or b of them from n on."""
        hidden = self.block_hidden(features, anchor, n)[self.first :]
        logits = F.linear(hidden, self.head).float()
        best = self._path(hidden, logits, anchor) if self.pair_tables else logits.argmax(dim=-1).tolist()
        return [self._of_target(token) for token in best]

    def _of_target(self, token: int) -> int:
        return token + (0 if self.offsets is None else int(self.offsets[token]))

    def _path(self, hidden: Tensor, logits: Tensor, anchor: int) -> list[int]:
        """The draft's tokens on the path, each the best of its row's `top_k` after the token before it."""
        before_table, after_table = self.pair_tables
        token, path = anchor, []
        state = torch.zeros(after_table.shape[1])
        for h, row in zip(hidden, logits.tolist(), strict=True):
            before = before_table[token]
            after_of = before
            if "candidate_selector.hidden_projection.weight" in self.weights:
                after_of = before * self._linear(h, "candidate_selector.hidden_projection")
            elif "markov_head.gate_proj.weight" in self.weights:
                after_of = before * self._linear(torch.cat((h, before)), "markov_head.gate_proj").sigmoid()
            elif "markov_head.joint_proj.weight" in self.weights:
                gate, new, out = self._linear(torch.cat((state, before, h)), "markov_head.joint_proj").chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                after_of = out.tanh()
            scores = {}
            for candidate in sorted(range(len(row)), key=lambda i: (-row[i], i))[: self.top_k]:
                unary = row[candidate] * self.multiplier
                if self.softcap:
                    unary = self.softcap * math.tanh(unary / self.softcap)
                pairs = zip(after_of.tolist(), after_table[candidate].tolist(), strict=True)
                scores[candidate] = unary + sum(a * b for a, b in pairs)
            path.append(max(scores, key=lambda candidate: scores[candidate]))
            token = self._of_target(path[-1])
        return path

    def _attention(self, x: Tensor, layer: int, positions: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """Every block row over the context and the block, as far as its layer lets it look."""
        name = f"layers.{layer}.self_attn"
        q = self._linear(x, f"{name}.q_proj").view(len(x), self.heads, self.head_dim)
        q = self._rope(self._norm(q, f"{name}.q_norm").transpose(0, 1), positions)
        k_block, v_block = self._key_value(x, layer, positions)
        k = torch.cat([context[0], k_block], dim=1).repeat_interleave(self.heads // self.kv_heads, dim=0)
        v = torch.cat([context[1], v_block], dim=1).repeat_interleave(self.heads // self.kv_heads, dim=0)
        scores = q @ k.transpose(1, 2) * self.head_dim**-0.5
        behind = positions[:, None] - torch.arange(k.shape[1])
        if self.causal[layer]:
            scores[:, behind < 0] = -math.inf
        if self.windows[layer] is not None:
            scores[:, behind.abs() >= self.windows[layer]] = -math.inf
        out = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
        return self._linear(out.transpose(0, 1).reshape(len(x), -1), f"{name}.o_proj")

    def _key_value(self, x: Tensor, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context rows and block rows alike: [T, H] -> K, V, each [kv_heads, T, head_dim]."""
        name = f"layers.{layer}.self_attn"
        k = self._linear(x, f"{name}.k_proj").view(len(x), self.kv_heads, self.head_dim)
        v = self._linear(x, f"{name}.v_proj").view(len(x), self.kv_heads, self.head_dim)
        k = self._rope(self._norm(k, f"{name}.k_norm").transpose(0, 1), positions)
        return k, v.transpose(0, 1)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj")
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotated(x, positions, self.rope)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.weights[f"{name}.weight"], self.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """One draft layer taps the middle; n tap evenly from 1 to N - 3, rounded."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


# Sampling


def mix(x: Any) -> Any:
    """A bijection of 32-bit words that spreads every input bit over the whole word; an int, or an array of uint64."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    x ^= x >> 16
    return x


def token_hashes(seed: int, position: int, vocab: int) -> list[int]:
    """The 32-bit hash of every token id, for the token at index `position` of a request with a 64-bit seed."""
    assert 0 <= seed < 2**64 and 0 <= position < 2**32
    state = mix((seed & 0xFFFFFFFF) ^ 0x9E3779B9)
    state = mix(state ^ (seed >> 32))
    state = mix(state ^ position)
    tokens = np.arange(vocab, dtype=np.uint64)
    return mix(np.uint64(state) ^ mix((tokens + np.uint64(0x85EBCA6B)) & np.uint64(0xFFFFFFFF))).tolist()


def gumbel_of(hashes: Sequence[int]) -> Tensor:
    """Gumbel(0, 1) noise in float32 from 32-bit hashes: 23 of their bits, so u is never 0 or 1."""
    u = ((torch.tensor(hashes, dtype=torch.int64) & 0x7FFFFF).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def gumbel(seed: int, position: int, vocab: int) -> Tensor:
    """The noise [V] for drawing the token with index `position` in the whole sequence (the prompt starts at 0)."""
    return gumbel_of(token_hashes(seed, position, vocab))


def perturbed(logits: Tensor, position: int, temperature: float, seed: int) -> Tensor:
    """Return the scores [V] in float32 whose argmax is chosen: the logits at T = 0, else logits / T + gumbel."""
    if temperature == 0:
        return logits.float()
    return logits.float() / temperature + gumbel(seed, position, len(logits))


def choose(logits: Tensor, position: int, temperature: float, seed: int) -> int:
    """The target's own token for `position`, given its logits [V] there."""
    return int(perturbed(logits, position, temperature, seed).argmax())


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters besides temperature and seed. The names are the request's own, the meanings vLLM's."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that must not be drawn before `min_tokens` were emitted."""


PLAIN = Sampling()


def adjusted(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], emitted: Sequence[int]) -> list[float]:
    """Additions, then penalties, token by token, counted from scratch. Python's floats."""
    out = []
    bias, counts, had = dict(sampling.logit_bias), Counter(emitted), {*prompt, *emitted}
    for token, logit in enumerate(logits):
        logit += bias.get(token, 0.0)
        if token in sampling.stop_token_ids and len(emitted) < sampling.min_tokens:
            logit = -math.inf
        if token in had:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * counts[token]
        if counts[token] > 0:
            logit -= sampling.presence_penalty
        out.append(logit)
    return out


class Filtered(NamedTuple):
    """Return for every token if it may be drawn, and its distance from the nearest edge that decides so.

    The distance is in logits for top-k and min-p, and a share of the mass for top-p.
    """

    kept: np.ndarray
    distance: np.ndarray


def filtered(logits: Sequence[float], sampling: Sampling) -> Filtered:
    """min-p, then top-k, then top-p, each over what the one before has left, of logits [V] over the temperature. Tokens
    that tie at an edge stay together, so there may be more than k."""
    x = np.array(logits, dtype=np.float64)
    kept, distance = np.ones(len(x), dtype=bool), np.full(len(x), np.inf)

    def cut(stays: np.ndarray, how_far: np.ndarray) -> None:
        # Inside, the nearest edge counts; a token outside is back when it passes the farthest of those it is behind.
        nonlocal kept, distance
        inside, outside = np.where(kept, distance, np.inf), np.where(kept, 0.0, distance)
        distance = np.where(
            kept & stays, np.minimum(inside, how_far), np.maximum(outside, np.where(stays, 0.0, how_far))
        )
        kept = kept & stays

    if sampling.min_p > 0:
        edge = x.max() + math.log(sampling.min_p)
        cut(x >= edge, np.abs(x - edge))
    if 0 < sampling.top_k < kept.sum():
        best = np.sort(x[kept])[::-1]
        last_in, first_out = best[sampling.top_k - 1], best[sampling.top_k]
        with np.errstate(invalid="ignore"):  # both may be -inf
            cut(x >= last_in, np.where(x >= last_in, x - first_out, last_in - x))
    if sampling.top_p < 1:
        mass = np.exp(x - x.max()) * kept
        mass /= mass.sum()
        better = _mass_of_better(x, mass)
        cut(better < sampling.top_p, np.abs(better - sampling.top_p))
        distance[x.argmax()] = np.inf  # the best always stays
    return Filtered(kept, np.nan_to_num(distance, nan=0.0, posinf=np.inf))


def _mass_of_better(x: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """For every token the mass of all tokens with higher logits."""
    values, place = np.unique(-x, return_inverse=True)
    of_value = np.bincount(place, weights=mass, minlength=len(values))
    return (np.cumsum(of_value) - of_value)[place]


class Decision(NamedTuple):
    """Grounds of one choice: `scores` [V], whose argmax among the tokens that filters keep is chosen."""

    scores: np.ndarray
    filters: Filtered

    @property
    def choice(self) -> int:
        return int(np.where(self.filters.kept, self.scores, -np.inf).argmax())

    def margin(self, token: int) -> float:
        """Return how far scores or edges must move until `token` is the choice.

        The filters must keep it. For each token with a higher score, the lead must be closed or an edge must pass it.
        """
        kept, distance = self.filters
        into = 0.0 if kept[token] else float(distance[token])
        ahead = (self.scores > self.scores[token]) & kept
        lead = np.minimum(self.scores[ahead] - self.scores[token], distance[ahead])
        return max(into, float(lead.max(initial=0.0)))


def decide(
    logits: Tensor, prompt: Sequence[int], emitted: Sequence[int], temperature: float, seed: int, sampling: Sampling
) -> Decision:
    """The target's own decision after `prompt` and `emitted`, given its logits [V] there."""
    if sampling != PLAIN:
        logits = torch.tensor(adjusted(logits.tolist(), sampling, prompt, emitted), dtype=torch.float64).float()
    scores = perturbed(logits, len(prompt) + len(emitted), temperature, seed).double().numpy()
    scaled = (logits if temperature == 0 else logits / temperature).tolist()
    return Decision(scores, filtered(scaled, PLAIN if temperature == 0 else sampling))


# Decoding


def greedy(target: Target, prompt: Sequence[int], max_tokens: int, eos: Collection[int] = ()) -> list[int]:
    """The new tokens of plain greedy decoding; a stop token is the last one returned."""
    return sampled(target, prompt, max_tokens, temperature=0.0, seed=0, eos=eos)


@torch.no_grad()
def sampled(
    target: Target,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    eos: Collection[int] = (),
    sampling: Sampling = PLAIN,
) -> list[int]:
    """The new tokens of plain decoding, one a step, with Transformers' KV cache."""
    new: list[int] = []
    rows, cache = torch.tensor([list(prompt)]), None
    while len(new) < max_tokens:
        out = target(rows, cache=cache, use_cache=True)
        token = decide(out.logits[0, -1], prompt, new, temperature, seed, sampling).choice
        new.append(token)
        if token in eos:
            break
        rows, cache = torch.tensor([[token]]), out.cache
    return new


class Step(NamedTuple):
    """One draft-and-verify step, counted as far as it was emitted."""

    n_tokens: int
    """Emitted: the accepted drafts, and the bonus unless a stop token came first."""
    n_verified: int
    """Drafts that the target looked at: width - 1."""
    n_accepted: int


class DFlashRun(NamedTuple):
    tokens: list[int]
    """All new tokens, with the first one, which prefill emits and no step counts."""
    steps: list[Step]

    @property
    def accepted(self) -> list[int]:
        return [step.n_accepted for step in self.steps]


def dflash_greedy(
    target: Target,
    draft: ReferenceDraft,
    prompt: Sequence[int],
    max_tokens: int,
    eos: Collection[int] = (),
    width: int | None = None,
) -> DFlashRun:
    """The whole method at T = 0. Target and draft run over the whole sequence in every step, so nothing is rolled back.

    A step verifies `width` rows (default and most: the block), never more than may still be emitted.
    """
    tokens = list(prompt)
    end = len(prompt) + max_tokens
    steps: list[Step] = []
    if max_tokens > 0:
        tokens.append(int(teacher_forced(target, tokens)[-1].argmax()))
    while len(tokens) < end and tokens[-1] not in eos:
        n = len(tokens)
        rows = min(width or draft.block_size, draft.block_size, end - n)
        drafts = draft.propose(features(target, tokens[:-1], draft.taps), tokens[-1], n)[: rows - 1]
        logits = teacher_forced(target, tokens + drafts)[n - 1 :]
        choices: list[int] = []
        for row in range(rows):
            choices.append(int(logits[row].argmax()))
            if choices[-1] in eos or row == len(drafts) or choices[-1] != drafts[row]:
                break
        accepted = sum(choice == drafted for choice, drafted in zip(choices, drafts, strict=False))
        steps.append(Step(len(choices), len(drafts), accepted))
        tokens += choices
    return DFlashRun(tokens[len(prompt) :], steps)


# Comparison


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index where two sequences differ, the shorter one's length if it is a prefix, None if equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def margin(
    target: Target,
    token_ids: Sequence[int],
    index: int,
    temperature: float,
    seed: int,
    other: int,
    sampling: Sampling = PLAIN,
    num_prompt: int = 0,
) -> float:
    """Return the target's margin at `index` of a whole sequence, teacher-forced in one pass.

    The first `num_prompt` tokens are the prompt. One run emitted `token_ids[index]`, and another `other`. The margin is
    how far scores or edges of filters must move until the worse of the two is the choice. Scores are logits at T = 0,
    and logits / T + gumbel in nats at T > 0, after penalties. If the two tokens are the best two, the margin is their
    gap. Otherwise it is larger, so a near tie of two others excuses no wrong token. A margin above 1e-4 fails in fp32.
    """
    prompt, emitted = token_ids[:num_prompt], token_ids[num_prompt:index]
    logits = teacher_forced(target, token_ids[:index])[-1]
    decision = decide(logits, prompt, emitted, temperature, seed, sampling)
    return max(decision.margin(token_ids[index]), decision.margin(other))
