"""The Gated DeltaNet layer (arXiv 2412.06464), which replaces attention. Its state rolls back with refused drafts."""

from typing import Any

import torch
from torch import Tensor, nn

from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep, GatedDeltaWeights, LayerState
from app.engine.models.layers import StepRows, frozen, held
from app.engine.models.recurrent_rows import PromptRows, SequenceRows
from app.engine.models.weights import LayerSource
from app.engine.quantised import Rows


class GatedDeltaNet(nn.Module):
    """Projections, short convolution, gates and delta rule in fp32, and gated norm. Ranks split the v heads, and have
    the q and k heads for these.

    A decoding step commits the accepted rows of the previous step, and verifies its rows without changing the state.
    The layer keeps the inputs of verified rows in the engine's dtype: what enters the convolution, and both gates. To
    commit rows it runs them again, because their inputs take a fraction of the memory of a state for each row.
    """

    def __init__(self, layer: LayerSource) -> None:
        super().__init__()
        shape, backend, hidden = layer.config.gated_delta, layer.backend, layer.config.hidden_size
        assert shape is not None, "a config with Gated DeltaNet layers has their sizes"
        keys, values = shape.num_k_heads * shape.k_head_dim, shape.num_v_heads * shape.v_head_dim

        def rows(name: str, *sizes: int, **blocks: tuple[int, ...]) -> Tensor:
            return layer.get(f"linear_attn.{name}", *sizes, split=0, **blocks)

        qkv = {"blocks": (keys, keys, values), "copies": (shape.k_copies, shape.k_copies, 1)}
        mixed = layer.linear("linear_attn.in_proj_qkv.weight", shape.channels, hidden, split=0, **qkv)
        z = layer.linear("linear_attn.in_proj_z.weight", values, hidden, split=0)
        gates = [rows(f"in_proj_{name}.weight", shape.num_v_heads, hidden) for name in "ba"]  # never quantised
        is_plain = isinstance(mixed, Tensor) or isinstance(z, Tensor)
        self.in_proj = held(backend.pack_linear(mixed, *gates, z) if is_plain else backend.pack_linear(mixed, z))
        self.gates = None if is_plain else frozen(backend.pack_weight(*gates))
        self.readers = (self.in_proj,) if self.gates is None else (self.in_proj, self.gates)
        self.out_proj = held(backend.pack_linear(layer.linear("linear_attn.out_proj.weight", hidden, values, split=1)))
        self.conv = frozen(rows("conv1d.weight", shape.channels, 1, shape.conv_kernel, **qkv).squeeze(1))
        self.a_log = frozen(rows("A_log", shape.num_v_heads))
        self.dt_bias = frozen(rows("dt_bias", shape.num_v_heads))
        self.norm = frozen(layer.get("linear_attn.norm.weight", shape.v_head_dim))
        self._widths = [shape.input_width if is_plain else shape.channels, values]
        self.weights = GatedDeltaWeights.of(self.conv, self.a_log, self.dt_bias)
        self._eps = layer.config.rms_norm_eps
        self._backend = backend
        self._project = layer.comm.reduced(backend.linear)

    def forward(self, x: Rows, rows: StepRows, memory: LayerState) -> Tensor:
        """Return the output projection [T, H] of normed rows x [T, H]."""
        backend, recurrent = self._backend, rows.recurrent
        assert recurrent is not None, "a step of a hybrid target has recurrent rows"
        inputs, z = backend.linear(x, self.in_proj).split_with_sizes(self._widths, dim=1)
        gates = None if self.gates is None else backend.linear(x, self.gates)
        parts, done = [], 0
        if recurrent.decodes is not None:
            done = len(recurrent.decodes.places)
            own = inputs[:done], None if gates is None else gates[:done]
            parts.append(self._verify(*own, recurrent.decodes, memory, rows.shared))
        if recurrent.prompts is not None:
            own = inputs[done:], None if gates is None else gates[done:]
            parts.append(self._commit(*own, recurrent.prompts, memory))
        o = torch.cat(parts) if len(parts) > 1 else parts[0]
        gated = backend.gated_norm(o, z, self.norm, self._eps, self.out_proj)
        return self._project(gated, self.out_proj)

    def _verify(
        self,
        inputs: Tensor,
        gates: Tensor | None,
        step: SequenceRows[Tensor],
        memory: LayerState,
        shared: dict[str, Any],
    ) -> Tensor:
        """Return outputs [R, Nv, Dv] of decoding rows, after the previous step's accepted rows are committed."""
        return self._backend.commit_and_verify(
            GatedDeltaStep(
                inputs,
                self.weights,
                memory,
                slots=step.slots,
                next_slots=step.next_slots,
                starts=step.starts,
                counts=step.counts,
                rows=step.rows,
                places=step.places,
                can_wait=self._backend.memory_is_host and not step.static,
                gates=gates,
                shared=shared,
            )
        )

    def _commit(self, inputs: Tensor, gates: Tensor | None, prompts: PromptRows[Tensor], memory: LayerState) -> Tensor:
        """Return outputs [R, Nv, Dv] of rows of prompts, all of which are committed to their next slots."""
        return self._backend.commit_prompts(
            GatedDeltaPrompts(
                inputs,
                self.weights,
                memory,
                slots=prompts.slots,
                next_slots=prompts.next_slots,
                split_slots=prompts.split_slots,
                starts=prompts.starts,
                splits=prompts.splits,
                query_start_loc=prompts.query_start_loc,
                parts=prompts.parts,
                are_new=prompts.are_new,
                can_wait=self._backend.memory_is_host,
                gates=gates,
            )
        )
