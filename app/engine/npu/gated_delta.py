"""Decoding steps of recurrent layers by `npu_recurrent_gated_delta_rule` (N46), on states in bfloat16.

The operator runs the rows of a sequence one after the other. It begins with the state at the index of the first row,
and writes the state after each row to that row's index. A layer calls it twice: for the pending rows, after which the
state is that of the accepted ones, and for the step's own rows, whose states nobody keeps. A row that does not count
has no beta and no decay, so that the state keeps its bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device import gated_delta
from app.engine.device.gated_delta import Places
from app.engine.device.recurrent import GatedDeltaStep, GatedDeltaWeights, LayerState, whole_inputs

_CLOSE = 0.02
"""Difference from the composition's results, of the largest of them. A step of bfloat16 is 2^-8."""


class _Rows(NamedTuple):
    """A step's R rows in each of L layers: b pending ones of all S sequences, then W new ones of all."""

    windows: Tensor  # [L, R * K + S * (K - 1)]: inputs that the convolution reads for each row, and its next state
    lengths: tuple[Tensor, Tensor]  # of sequences, each [S] int32, in pending and in new rows
    states: tuple[Tensor, Tensor]  # the sequence of each pending and of each new row, int32


def _rows(step: GatedDeltaStep, places: Places) -> _Rows:
    num_seqs, counts, device = len(step.slots), [places.block, step.rows.shape[1]], step.inputs.device
    windows = places.windows.view(len(places.windows), num_seqs, sum(counts) + 1, -1)
    pending, new, last = windows.split_with_sizes([*counts, 1], dim=2)
    parts = [part.flatten(1) for part in (pending, new, last[..., 1:])]
    lengths = [torch.full((num_seqs,), count, dtype=torch.int32, device=device) for count in counts]
    states = [torch.arange(num_seqs * count, dtype=torch.int32, device=device) // count for count in counts]
    return _Rows(torch.cat(parts, dim=1), (lengths[0], lengths[1]), (states[0], states[1]))


def _shared_rows(step: GatedDeltaStep, places: Places) -> _Rows:
    """Return the rows that the first layer of a forward finds for all."""
    if step.shared is None:
        return _rows(step, places)
    if "rows" not in step.shared:
        step.shared["rows"] = _rows(step, places)
    rows: _Rows = step.shared["rows"]
    return rows


def commit_and_verify(step: GatedDeltaStep, normed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `Backend.commit_and_verify`, with `normed` as the l2norm.

    What is accepted is written before the step's own rows run. If they fail, the step that is repeated commits none.
    """
    memory, num_seqs, width = step.memory, *step.rows.shape
    num_heads, v_dim, k_dim = memory.matrix.shape[1:]
    channels, taps = memory.conv.shape[2], step.weights.taps
    keys, widths = (channels - num_heads * v_dim) // 2, [channels, num_heads, num_heads]
    places, layer = gated_delta.places_of(step)
    rows = _shared_rows(step, places)
    num_rows, num_pending = num_seqs * (places.block + width), num_seqs * places.block

    new = whole_inputs(step)[step.rows]
    inputs = gated_delta.inputs_of(step, new, places).index_select(0, rows.windows[layer])
    windows, last_inputs = inputs.split_with_sizes([num_rows * len(taps), num_seqs * (len(taps) - 1)])
    mixed, b, a = (windows.view(num_rows, len(taps), -1) * taps).sum(dim=1).split_with_sizes(widths, dim=1)
    beta = b.sigmoid().to(torch.bfloat16)
    log_decay = F.softplus(a + step.weights.dt_bias) * step.weights.rates[:, 1, 0]
    mixed = F.silu(mixed).to(torch.bfloat16)
    q, k = normed(mixed[:, : 2 * keys].view(num_rows, 2, -1, k_dim).transpose(0, 1).contiguous())
    v = mixed[:, 2 * keys :].contiguous().view(num_rows, num_heads, v_dim)

    own = memory.matrix[step.slots]
    if places.is_new is not None:
        own.masked_fill_(places.is_new[:, None, None, None], 0.0)

    def run(part: int, these: slice) -> Tensor:
        return torch_npu.npu_recurrent_gated_delta_rule(
            q[these],
            k[these],
            v[these],
            own,
            beta=beta[these],
            g=log_decay[these],
            scale=k_dim**-0.5,
            actual_seq_lengths=rows.lengths[part],
            ssm_state_indices=rows.states[part],
        )

    run(0, slice(num_pending))
    memory.matrix[step.next_slots] = own
    memory.conv[step.next_slots] = last_inputs[:, :channels].view(num_seqs, -1, channels)
    memory.num_tokens[step.next_slots] = step.starts.to(torch.int32)
    memory.pending.flatten(0, 1)[places.kept] = new.flatten(0, 1)
    return run(1, slice(num_pending, None))[step.places].float()


def trial_step(config: GatedDeltaConfig, block_size: int, device: torch.device) -> GatedDeltaStep:
    """Return a step of two sequences' blocks, on states in bfloat16. One commits half a block, and the other is new."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, torch.bfloat16)

    heads, channels = config.num_v_heads, config.channels
    memory = LayerState(
        normal(3, heads, config.v_head_dim, config.k_head_dim),
        normal(3, config.conv_kernel - 1, channels),
        normal(3, block_size, config.input_width),
        torch.full((3,), 40, dtype=torch.int32, device=device),
    )
    gates, slots = torch.full((heads,), -1.0, device=device), torch.tensor([1, 2]).to(device)
    rows = torch.arange(2 * block_size).to(device)
    return GatedDeltaStep(
        normal(2 * block_size, config.input_width),
        GatedDeltaWeights.of(normal(channels, config.conv_kernel), gates, gates),
        memory,
        slots,
        slots,
        starts=torch.tensor([40 + (block_size + 1) // 2, 0], dtype=torch.int32).to(device),
        counts=torch.full((2,), block_size, dtype=torch.int32, device=device),
        rows=rows.view(2, block_size),
        places=rows,
    )


def fault(config: GatedDeltaConfig, block_size: int, device: torch.device, normed: Callable[[Tensor], Tensor]) -> str:
    """Return how a step of a layer of these sizes differs from the composition's, or ""."""
    ways, results = (commit_and_verify, gated_delta.commit_and_verify), []
    try:
        for verify in ways:
            step = trial_step(config, block_size, device)
            results.append((verify(step, normed), step.memory.matrix.float()))
        for found, right in zip(*results, strict=True):
            error = float((found - right).abs().max() / right.abs().max())
            if not error <= _CLOSE:
                return f"its results differ by {error:.1%}"
    except RuntimeError as refused:
        return str(refused)
    return ""
