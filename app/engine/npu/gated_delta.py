"""Decoding steps of recurrent layers by `npu_recurrent_gated_delta_rule` (N46), on states in bfloat16.

The operator runs the rows of a sequence one after the other. It begins with the state at the index of the first row,
and writes the state after each row to that row's index. A layer calls it twice: for the pending rows, after which the
state is that of the accepted ones, and for the step's own rows, whose states nobody keeps. A row that does not count
has no beta and no decay, so that the state keeps its bits.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from app.engine.checkpoint.shapes import GatedDeltaConfig
from app.engine.device import gated_delta
from app.engine.device.gated_delta import Places
from app.engine.device.recurrent import GatedDeltaStep, GatedDeltaWeights, LayerState, whole_inputs

Verify = Callable[[GatedDeltaStep], Tensor]

_CLOSE = 0.02
"""Difference from the composition's results, of the largest of them. A step of bfloat16 is 2^-8."""


def l2norm(x: Tensor) -> Tensor:
    """Return `device.gated_delta.l2norm` as an RMSNorm."""
    dim = x.shape[-1]
    return torch_npu.npu_rms_norm(x, _l2_weight(dim, x.device), gated_delta.L2_EPS / dim)[0]


@cache
def _l2_weight(dim: int, device: torch.device) -> Tensor:
    """Return the weight that makes an RMSNorm an l2norm. Made on the device: an upload would stall it."""
    return torch.full((dim,), dim**-0.5, device=device)


@cache
def _sequences(count: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the operator's lengths [S] of `count` sequences of `rows` each, and the sequence of each row, int32."""
    numbers = torch.arange(count * rows, dtype=torch.int32, device=device)
    return torch.full((count,), rows, dtype=torch.int32, device=device), numbers // rows


def _windows(step: GatedDeltaStep, places: Places) -> Tensor:
    """Return [L, R * K + S * (K - 1)]: `Places.windows` of the pending rows of all sequences, then of all their new
    rows, and then the convolution's next state."""
    counts = [places.block, step.rows.shape[1], 1]
    windows = places.windows.view(len(places.windows), len(step.slots), sum(counts), -1)
    pending, new, last = windows.split_with_sizes(counts, dim=2)
    return torch.cat([part.flatten(1) for part in (pending, new, last[..., 1:])], dim=1)


def commit_and_verify(step: GatedDeltaStep) -> Tensor:
    """Return `Backend.commit_and_verify`.

    What is accepted is written before the step's own rows run. If that call fails, the repeated step commits nothing
    again.
    """
    memory, num_seqs, width = step.memory, *step.rows.shape
    num_heads, v_dim, k_dim = memory.matrix.shape[1:]
    channels, taps = memory.conv.shape[2], step.weights.taps
    keys, widths = (channels - num_heads * v_dim) // 2, [channels, num_heads, num_heads]
    places, layer = gated_delta.places_of(step)
    windows = step.once("windows", lambda: _windows(step, places))[layer]
    num_rows, num_pending = num_seqs * (places.block + width), num_seqs * places.block

    new = whole_inputs(step)[step.rows]
    inputs = gated_delta.inputs_of(step, new, places).index_select(0, windows)
    windows, last_inputs = inputs.split_with_sizes([num_rows * len(taps), num_seqs * (len(taps) - 1)])
    mixed, b, a = (windows.view(num_rows, len(taps), -1) * taps).sum(dim=1).split_with_sizes(widths, dim=1)
    beta = b.sigmoid().to(torch.bfloat16)
    log_decay = F.softplus(a + step.weights.dt_bias) * step.weights.rates[:, 1, 0]
    mixed = F.silu(mixed).to(torch.bfloat16)
    q, k = l2norm(mixed[:, : 2 * keys].view(num_rows, 2, -1, k_dim).transpose(0, 1).contiguous())
    v = mixed[:, 2 * keys :].contiguous().view(num_rows, num_heads, v_dim)

    own = memory.matrix[step.slots]
    if places.is_new is not None:
        own.masked_fill_(places.is_new[:, None, None, None], 0.0)

    def run(count: int, these: slice) -> Tensor:
        lengths, states = _sequences(num_seqs, count, own.device)
        return torch_npu.npu_recurrent_gated_delta_rule(
            q[these],
            k[these],
            v[these],
            own,
            beta=beta[these],
            g=log_decay[these],
            scale=k_dim**-0.5,
            actual_seq_lengths=lengths,
            ssm_state_indices=states,
        )

    run(places.block, slice(num_pending))
    memory.matrix[step.next_slots] = own
    memory.conv[step.next_slots] = last_inputs[:, :channels].view(num_seqs, -1, channels)
    memory.num_tokens[step.next_slots] = step.starts.to(torch.int32)
    memory.pending.flatten(0, 1)[places.kept] = new.flatten(0, 1)
    return run(width, slice(num_pending, None))[step.places].float()


def trial_step(config: GatedDeltaConfig, block_size: int, device: torch.device) -> GatedDeltaStep:
    """Return a step of three blocks, on states in bfloat16. Half a block and one row are accepted, and one is new."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, torch.bfloat16)

    heads, channels = config.num_v_heads, config.channels
    memory = LayerState(
        normal(4, heads, config.v_head_dim, config.k_head_dim),
        normal(4, config.conv_kernel - 1, channels),
        normal(4, block_size, config.input_width),
        torch.full((4,), 40, dtype=torch.int32, device=device),
    )
    gates, slots = torch.full((heads,), -1.0, device=device), torch.tensor([1, 2, 3]).to(device)
    rows = torch.arange(3 * block_size).to(device)
    return GatedDeltaStep(
        normal(3 * block_size, config.input_width),
        GatedDeltaWeights.of(normal(channels, config.conv_kernel), gates, gates),
        memory,
        slots,
        slots,
        starts=torch.tensor([40 + (block_size + 1) // 2, 41, 0], dtype=torch.int32).to(device),
        counts=torch.full((3,), block_size, dtype=torch.int32, device=device),
        rows=rows.view(3, block_size),
        places=rows,
    )


def fault(config: GatedDeltaConfig, block_size: int, device: torch.device, verify: Verify = commit_and_verify) -> str:
    """Return how a step of a layer of these sizes differs from the composition's, or ""."""
    if not hasattr(torch_npu, "npu_recurrent_gated_delta_rule"):
        return "this torch_npu has none"
    results = []
    try:
        for run in (verify, partial(gated_delta.commit_and_verify, normed=l2norm)):
            step = trial_step(config, block_size, device)
            results.append((run(step), step.memory.matrix.float()))
        for found, right in zip(*results, strict=True):
            error = float((found - right).abs().max() / right.abs().max())
            if not error <= _CLOSE:
                return f"its results differ by {error:.1%}"
    except RuntimeError as refused:
        return str(refused)
    return ""
