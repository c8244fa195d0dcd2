"""The method, written once more to be obviously right: one sequence, no pages, no cache of the draft's context.

The proofs hold the engine against this file, so it shares no code with the engine. The target is Transformers'
Qwen3ForCausalLM; the draft follows shared/DFLASH.md section 1 line by line.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

ContextKV = list[tuple[Tensor, Tensor]]
"""Per draft layer K (normed and rotated) and V of the context, each [kv_heads, n_context, head_dim]."""


# Target


def load_target(folder: Path | str, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """The target through Transformers, with its eager attention."""
    disable_progress_bar()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", local_files_only=True)
    return model.eval()


@torch.no_grad()
def teacher_forced(target: Qwen3ForCausalLM, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] in float32; row i is the target's prediction for position i + 1."""
    return target(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.no_grad()
def features(target: Qwen3ForCausalLM, token_ids: Sequence[int], taps: Sequence[int]) -> Tensor:
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
    `lm_head` keeps its own. Raises NotImplementedError for variants outside v1.
    """

    def __init__(self, folder: Path | str, target: Qwen3ForCausalLM, block_size: int | None = None) -> None:
        folder = Path(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        dflash = config.get("dflash_config", {})
        self.target = target
        self.block_size: int = block_size or config.get("block_size") or dflash["block_size"]
        self.mask_token_id: int = dflash["mask_token_id"]
        self.num_layers: int = config["num_hidden_layers"]
        self.taps: list[int] = dflash.get("target_layer_ids") or default_taps(
            self.num_layers, config["num_target_layers"]
        )
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.rope_theta = _rope_theta(config)
        if "sliding_attention" in config.get("layer_types", ()):
            raise NotImplementedError("sliding layers")

        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        if any(name.endswith(".bias") for name in tensors) or "d2t" in tensors:
            raise NotImplementedError("biases, reduced vocabularies")
        dtype = target.get_input_embeddings().weight.dtype
        self.weights = {name.removeprefix("model."): tensor.to(dtype) for name, tensor in tensors.items()}
        self.embedding = self.weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.head = self.weights.get("lm_head.weight", target.get_output_embeddings().weight.detach())

    # The pieces of section 1, in order.

    @torch.no_grad()
    def context_kv(self, features: Tensor, start: int = 0) -> ContextKV:
        """K and V of context rows at positions start, start + 1, ... from their features [T, n_taps * H_target].

        They depend on the row's own feature and position alone. No layer's input_layernorm touches them.
        """
        context = self._norm(self._linear(features, "fc"), "hidden_norm")
        positions = torch.arange(start, start + len(features))
        return [self._key_value(context, layer, positions) for layer in range(self.num_layers)]

    @torch.no_grad()
    def block_hidden_over(self, context: ContextKV, anchor: int, n: int) -> Tensor:
        """Hidden states [b, H] after the final norm, of the block over given context K and V (n - 1 rows)."""
        block_ids = torch.tensor([anchor] + [self.mask_token_id] * (self.block_size - 1))
        positions = torch.arange(n - 1, n - 1 + self.block_size)
        x = F.embedding(block_ids, self.embedding)
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            x = x + self._attention(self._norm(x, f"{name}.input_layernorm"), layer, positions, context[layer])
            x = x + self._mlp(self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return self._norm(x, "norm")

    def block_hidden(self, features: Tensor, anchor: int, n: int) -> Tensor:
        """Hidden states [b, H] after the final norm; row k stands at position n - 1 + k.

        `n` tokens are known, the last is the anchor; `features` [n - 1, n_taps * H_target] are of those before it.
        """
        assert len(features) == n - 1, f"{len(features)} features for {n} tokens: the anchor has none"
        return self.block_hidden_over(self.context_kv(features), anchor, n)

    @torch.no_grad()
    def block_logits(self, features: Tensor, anchor: int, n: int) -> Tensor:
        """Logits [b - 1, V] in float32: row k predicts the token at position n + k (block rows 1..b-1)."""
        return F.linear(self.block_hidden(features, anchor, n)[1:], self.head).float()

    def propose(self, features: Tensor, anchor: int, n: int) -> list[int]:
        """The b - 1 drafted tokens for positions n .. n + b - 2."""
        return self.block_logits(features, anchor, n).argmax(dim=-1).tolist()

    def _attention(self, x: Tensor, layer: int, positions: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        """Every block row over all of the context and all of the block: no mask at all."""
        name = f"layers.{layer}.self_attn"
        q = self._linear(x, f"{name}.q_proj").view(len(x), self.heads, self.head_dim)
        q = self._rope(self._norm(q, f"{name}.q_norm").transpose(0, 1), positions)
        k_block, v_block = self._key_value(x, layer, positions)
        k = torch.cat([context[0], k_block], dim=1).repeat_interleave(self.heads // self.kv_heads, dim=0)
        v = torch.cat([context[1], v_block], dim=1).repeat_interleave(self.heads // self.kv_heads, dim=0)
        scores = q @ k.transpose(1, 2) * self.head_dim**-0.5
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
        """Half rotation of [heads, T, head_dim]; angles in float32, cos and sin cast to x's dtype."""
        half = self.head_dim // 2
        inv_freq = 1.0 / (self.rope_theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim))
        angles = positions[:, None].float() * inv_freq
        cos = torch.cat([angles, angles], dim=-1).cos().to(x.dtype)
        sin = torch.cat([angles, angles], dim=-1).sin().to(x.dtype)
        rotated = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + rotated * sin

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm in float32, cast back, then the learned weight: Transformers' order."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weights[f"{name}.weight"] * wide.to(x.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])


def default_taps(draft_layers: int, target_layers: int) -> list[int]:
    """One draft layer taps the middle; n tap evenly from 1 to N - 3, rounded."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    if config.get("rope_scaling") or parameters.get("rope_type", "default") != "default":
        raise NotImplementedError("rope scaling")
    return parameters.get("rope_theta") or config["rope_theta"]


# Sampling


def mix(x: int) -> int:
    """A bijection of 32-bit words that spreads every input bit over the whole word."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    x ^= x >> 16
    return x


def token_hashes(seed: int, position: int, vocab: int) -> list[int]:
    """The 32-bit hash of every token id, for the token at index `position` of a request with a 64-bit seed."""
    assert 0 <= seed < 2**64 and 0 <= position < 2**32
    state = mix((seed & 0xFFFFFFFF) ^ 0x9E3779B9)
    state = mix(state ^ (seed >> 32))
    state = mix(state ^ position)
    return [mix(state ^ mix((token + 0x85EBCA6B) & 0xFFFFFFFF)) for token in range(vocab)]


def gumbel_of(hashes: Sequence[int]) -> Tensor:
    """Gumbel(0, 1) noise in float32 from 32-bit hashes: 23 of their bits, so u is never 0 or 1."""
    u = (torch.tensor([h >> 9 for h in hashes], dtype=torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def gumbel(seed: int, position: int, vocab: int) -> Tensor:
    """The noise [V] for drawing the token with index `position` in the whole sequence (the prompt starts at 0)."""
    return gumbel_of(token_hashes(seed, position, vocab))


def perturbed(logits: Tensor, position: int, temperature: float, seed: int) -> Tensor:
    """What the choice at `position` is the argmax of, float32 [V]: the logits at T = 0, else logits / T + gumbel."""
    if temperature == 0:
        return logits.float()
    return logits.float() / temperature + gumbel(seed, position, len(logits))


def choose(logits: Tensor, position: int, temperature: float, seed: int) -> int:
    """The target's own token for `position`, given its logits [V] there."""
    return int(perturbed(logits, position, temperature, seed).argmax())


# Decoding


def greedy(target: Qwen3ForCausalLM, prompt: Sequence[int], max_tokens: int, eos: Collection[int] = ()) -> list[int]:
    """The new tokens of plain greedy decoding; a stop token is the last one returned."""
    return sampled(target, prompt, max_tokens, temperature=0.0, seed=0, eos=eos)


@torch.no_grad()
def sampled(
    target: Qwen3ForCausalLM,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    eos: Collection[int] = (),
) -> list[int]:
    """The new tokens of plain decoding, one a step, with Transformers' KV cache."""
    new: list[int] = []
    rows, cache = torch.tensor([list(prompt)]), None
    while len(new) < max_tokens:
        out = target(rows, past_key_values=cache, use_cache=True)
        token = choose(out.logits[0, -1], len(prompt) + len(new), temperature, seed)
        new.append(token)
        if token in eos:
            break
        rows, cache = torch.tensor([[token]]), out.past_key_values
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
    target: Qwen3ForCausalLM,
    draft: ReferenceDraft,
    prompt: Sequence[int],
    max_tokens: int,
    eos: Collection[int] = (),
    width: int | None = None,
    propose: Callable[[list[int]], list[int]] | None = None,
) -> DFlashRun:
    """The whole method at T = 0; see `dflash_sampled`."""
    return dflash_sampled(target, draft, prompt, max_tokens, 0.0, 0, eos=eos, width=width, propose=propose)


def dflash_sampled(
    target: Qwen3ForCausalLM,
    draft: ReferenceDraft,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float,
    seed: int,
    eos: Collection[int] = (),
    width: int | None = None,
    propose: Callable[[list[int]], list[int]] | None = None,
) -> DFlashRun:
    """The whole method. Target and draft run over the whole sequence anew in every step: nothing to roll back.

    A step verifies `width` rows (default and most: the block), never more than may still be emitted. `propose` maps
    all known tokens to b - 1 drafts, in place of the draft model.
    """
    tokens = list(prompt)
    end = len(prompt) + max_tokens
    steps: list[Step] = []
    if max_tokens > 0:
        tokens.append(choose(teacher_forced(target, tokens)[-1], len(tokens), temperature, seed))
    while len(tokens) < end and tokens[-1] not in eos:
        n = len(tokens)
        rows = min(width or draft.block_size, draft.block_size, end - n)
        if propose is not None:
            drafts = propose(tokens)[: rows - 1]
        else:
            drafts = draft.propose(features(target, tokens[:-1], draft.taps), tokens[-1], n)[: rows - 1]
        logits = teacher_forced(target, tokens + drafts)[n - 1 :]
        choices: list[int] = []
        for row in range(rows):
            choices.append(choose(logits[row], n + row, temperature, seed))
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
    target: Qwen3ForCausalLM, token_ids: Sequence[int], index: int, temperature: float, seed: int, other: int
) -> float:
    """How clearly the target decides at `index` of a whole sequence (prompt included), teacher-forced in one pass.

    One run emitted `token_ids[index]`, another emitted `other`. The value is how far the worse of the two lies below
    the best token, on the scale of `perturbed`: logits at T = 0, logits / T + gumbel (in nats) at T > 0. When they are
    the best two it is the gap of the best two; when one is neither, it is larger, so a wrong token finds no excuse in
    a near tie of two others. Differences with a margin above 1e-4 fail in fp32.
    """
    scores = perturbed(teacher_forced(target, token_ids[:index])[-1], index, temperature, seed)
    return float(scores.max() - torch.minimum(scores[token_ids[index]], scores[other]))
