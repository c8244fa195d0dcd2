"""The Gated DeltaNet layer (arXiv 2412.06464), which replaces attention. Its state rolls back with refused drafts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device.base import Backend, GatedDeltaStep
from app.engine.device.gated_delta import delta_rule, last_rows, short_conv
from app.engine.models.layers import StepRows, frozen, held
from app.engine.models.recurrent_rows import SequenceRows
from app.engine.models.state_pool import LayerState, State
from app.engine.models.weights import LayerSource
from app.engine.quantised import Rows


class GatedDeltaNet(nn.Module):
    """Projections, recurrence and gated norm. Ranks split the v heads, and have the q and k heads for these."""

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
        self.recurrence = Recurrence(shape, backend, self.conv, self.a_log, self.dt_bias)
        self._eps = layer.config.rms_norm_eps
        self._backend = backend
        self._project = layer.comm.reduced(backend.linear)

    def forward(self, x: Rows, rows: StepRows, memory: LayerState) -> Tensor:
        """Return the output projection [T, H] of normed rows x [T, H]."""
        backend, recurrent = self._backend, rows.recurrent
        assert recurrent is not None, "a step of a hybrid target has recurrent rows"
        inputs, z = backend.linear(x, self.in_proj).split_with_sizes(self._widths, dim=1)
        if self.gates is not None:
            inputs = torch.cat((inputs, backend.linear(x, self.gates)), dim=1)
        parts, done = [], 0
        if recurrent.decodes is not None:
            done = len(recurrent.decodes.places)
            parts.append(self.recurrence.verify(inputs[:done], recurrent.decodes, memory))
        for chunk in recurrent.chunks:
            first, done = done, done + len(chunk.places)
            parts.append(self.recurrence.prefill(inputs[first:done], chunk, memory))
        o = backend.rms_norm(torch.cat(parts), self.norm, self._eps)
        gated = o.flatten(1) * F.silu(z.float())
        return self._project(gated.to(z.dtype), self.out_proj)


class Recurrence:
    """Short convolution, gates and delta rule of a layer, in fp32.

    A decoding step commits the accepted rows of the previous step, and verifies its rows without changing the state.
    The layer keeps the inputs of verified rows in the engine's dtype: what enters the convolution, and both gates. To
    commit rows it runs them again, because their inputs take a fraction of the memory of a state for each row.
    """

    def __init__(self, shape: GatedDeltaConfig, backend: Backend, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
        self._shape = shape
        self._backend = backend
        self._conv = conv
        self._a_log = a_log
        self._dt_bias = dt_bias

    def verify(self, inputs: Tensor, step: SequenceRows[Tensor], memory: LayerState) -> Tensor:
        """Return outputs [R, Nv, Dv] of decoding rows, after the previous step's accepted rows are committed."""
        return self._backend.commit_and_verify(
            GatedDeltaStep(
                inputs,
                conv_weight=self._conv,
                a_log=self._a_log,
                dt_bias=self._dt_bias,
                slots=step.slots,
                next_slots=step.next_slots,
                starts=step.starts,
                counts=step.counts,
                rows=step.rows,
                places=step.places,
                matrix=memory.matrix,
                conv=memory.conv,
                pending=memory.pending,
                num_tokens=memory.num_tokens,
                can_wait=self._backend.memory_is_host and not step.static,
            )
        )

    def prefill(self, inputs: Tensor, chunk: SequenceRows[Tensor], memory: LayerState) -> Tensor:
        """Return outputs [R, Nv, Dv] of rows of a prompt, all of which are committed to the chunk's next slot."""
        state, pending, counts = memory.at(chunk.slots, chunk.starts)
        if not self._backend.memory_is_host or counts.any():  # a checkpoint of a decoding sequence has pending rows
            state = self.advance(pending, counts, state)[1]
        o, state = self.advance(inputs[chunk.rows], chunk.counts, state)
        memory.write(chunk.next_slots, state, chunk.starts + chunk.counts)
        return o.flatten(0, 1)

    def advance(self, inputs: Tensor, counts: Tensor, state: State) -> tuple[Tensor, State]:
        """Return outputs [S, W, Nv, Dv] of inputs [S, W, C + 2 Nv], and the state after the first `counts` [S] rows.

        The other rows may hold anything, and their outputs have no meaning.
        """
        shape = self._shape
        is_row = (torch.arange(inputs.shape[1], device=counts.device) < counts[:, None])[..., None]
        inputs = torch.where(is_row, inputs, 0.0)
        mixed, b, a = inputs.split_with_sizes([shape.channels, shape.num_v_heads, shape.num_v_heads], dim=2)
        keys = shape.num_k_heads * shape.k_head_dim
        q, k, v = short_conv(state.conv, mixed, self._conv).tensor_split([keys, 2 * keys], dim=2)
        q, k = (part.unflatten(2, (shape.num_k_heads, -1)) for part in (q, k))
        # A row without decay and beta does not change the state.
        log_decay = torch.where(is_row, -self._a_log.exp() * F.softplus(a.float() + self._dt_bias), 0.0)
        beta = torch.where(is_row, b.float().sigmoid(), 0.0)
        o, matrix = delta_rule(q, k, v.unflatten(2, (shape.num_v_heads, -1)), log_decay, beta, state.matrix)
        return o, State(matrix, last_rows(state.conv, mixed, counts))
