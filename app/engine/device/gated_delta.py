"""Decoding rows of a Gated DeltaNet layer: the last step's accepted rows are committed, this step's verified.

Both go through one chunk of the delta rule: the pending rows of the last step, then those of this step. A row that was
not accepted has no key, no beta and no decay, so it changes nothing. What is committed are the first rows' parts of the
same solution, because no row depends on later ones. All of it are products and elementwise operators of static shapes.
Where the host may not wait, all counts are read on the device.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.device.delta_rule import l2norm, last_rows, short_conv, unit_inverse

_NEVER = -1e4
"""Log of a decay to nothing: exp of it is 0 in fp32, and no operator meets an infinity."""


class GatedDeltaStep(NamedTuple):
    """R rows of S decoding sequences in one layer, with its weights and slots. C, Nk, Nv, Dk, Dv and K are its sizes.

    `inputs` [R, C + 2 Nv] enter the recurrence. The fields from `slots` to `places` are those of `SequenceRows`, all on
    the device. Slot 0 belongs to padding. The four fields behind them are those of `LayerState`, which are written in
    place. With `can_wait` the host may read counts, because it computes them itself.
    """

    inputs: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    slots: Tensor
    next_slots: Tensor
    starts: Tensor
    counts: Tensor
    rows: Tensor
    places: Tensor
    matrix: Tensor
    conv: Tensor
    pending: Tensor
    num_tokens: Tensor
    can_wait: bool = False

    @property
    def first_rows(self) -> Tensor:
        """Return the first row [S] of each sequence, a strided view."""
        return self.rows[:, 0]


def commit_and_verify(step: GatedDeltaStep, normed: Callable[[Tensor], Tensor] = l2norm) -> Tensor:
    """Return outputs [R, Nv, Dv] fp32 of a step's rows, after those that were accepted before them are committed.

    `normed` is the l2norm of the last axis. All results are there before the first is written.
    """
    num_heads, k_dim, v_dim = step.matrix.shape[1:]
    block, channels, width = step.pending.shape[1], step.conv.shape[2], step.rows.shape[1]
    keys = (channels - num_heads * v_dim) // 2
    k_heads = keys // k_dim

    is_new = (step.starts == 0) | (step.slots == 0)  # whatever the slot's last owner has left
    accepted = (step.starts - step.num_tokens[step.slots]).clamp(0, block).masked_fill(is_new, 0)
    if step.can_wait:
        # A plain step has one pending row, so the width of a block would take most of the time.
        block = int(accepted.max())
    device = step.inputs.device
    fixed, sequences = _fixed(block + width, device), _numbers(len(step.slots), device)
    counts = accepted[:, None].expand(-1, block), step.counts[:, None].expand(-1, width)
    is_none = _places(block, width, device) >= torch.cat(counts, dim=1)

    pending, new = step.pending[step.slots, :block], step.inputs[step.rows]
    before, state = step.conv[step.slots], step.matrix[step.slots]
    if not step.can_wait or is_new.any():
        before = before.masked_fill(is_new[:, None, None], 0.0)
        state = state.masked_fill(is_new[:, None, None, None], 0.0)
    behind = last_rows(before, pending[..., :channels], accepted)
    ordered = torch.cat((pending[..., :channels], behind, new[..., :channels]), dim=1)
    mixed = short_conv(before, ordered, step.conv_weight)
    mixed = torch.cat((mixed[:, :block], mixed[:, -width:]), dim=1).masked_fill(is_none[..., None], 0.0)
    gates = torch.cat((pending[..., channels:], new[..., channels:]), dim=1).float().mT
    b, a = gates.unflatten(1, (2, num_heads)).unbind(1)
    beta = b.sigmoid().masked_fill(is_none[:, None], 0.0)[..., None]
    slowing = F.softplus(a + step.dt_bias[:, None]) * step.a_log.exp()[:, None]
    slowing = slowing.masked_fill(is_none[:, None], 0.0).flatten(0, 1)
    # Row 0 and column 0 are the state, and row t has the decay from each row up to itself.
    between = torch.addmm(fixed.never, slowing, fixed.rows_between).exp()
    between = between.view(-1, num_heads, block + width + 1, block + width + 1)

    qk = mixed[..., : 2 * keys].unflatten(2, (2, k_heads, k_dim)).permute(0, 3, 2, 1, 4).contiguous()
    qk = normed(qk)
    k, qk = qk[:, :, 1], qk.flatten(2, 3)
    products = (qk @ k.mT).unflatten(2, (2, -1))
    grouped = between[..., 1:, 1:].unflatten(1, (k_heads, -1)).unsqueeze(3)
    seen, system = (products.unsqueeze(2) * grouped).flatten(1, 2).unbind(2)
    qk = qk.unsqueeze(2).expand(-1, -1, num_heads // k_heads, -1, -1).flatten(1, 2)

    of_state = (qk @ state).unflatten(2, (2, -1)) * between[..., 1:, :1].unsqueeze(2)
    v = mixed[..., 2 * keys :].unflatten(2, (num_heads, v_dim)).transpose(1, 2)
    d = unit_inverse(system * beta) @ ((v - of_state[:, :, 1]) * beta)
    scale = k_dim**-0.5
    of_q, seen = (x.flatten(0, 1)[:, -width:] for x in (of_state[:, :, 0], seen))
    o = torch.baddbmm(of_q, seen, d.flatten(0, 1), beta=scale, alpha=scale)

    to_end = between[sequences, :, accepted][..., None]
    committed = (qk[:, :, -d.shape[2] :] * to_end[:, :, 1:]).mT @ d
    committed = torch.addcmul(committed, state, to_end[:, :, :1])
    o = o.view(-1, num_heads, width, v_dim).transpose(1, 2).flatten(0, 1)[step.places]
    step.matrix[step.next_slots] = committed
    step.conv[step.next_slots] = behind
    step.num_tokens[step.next_slots] = step.starts.to(torch.int32)
    step.pending[:, :width][step.next_slots] = new
    return o


class _Fixed(NamedTuple):
    """Numbers that depend on shapes alone. P is the pending rows of a sequence and those of the step.

    `rows_between` [P, (P + 1)^2] is -1 for the rows behind row i up to row t, and `never` [(P + 1)^2] leaves no way
    back.
    """

    rows_between: Tensor
    never: Tensor


@cache
def _places(block: int, width: int, device: torch.device) -> Tensor:
    """Return each row's place [P] in its part."""
    return torch.cat([torch.arange(size, dtype=torch.int32, device=device) for size in (block, width)])


@cache
def _fixed(num_rows: int, device: torch.device) -> _Fixed:
    """Return them, made on the device, because an upload would let the host wait. 32 rows take 139 kB, 64 take 1 MB.

    They are kept by the sum of both parts, because each part of a wide block has any number of rows.
    """
    row = torch.arange(1 + num_rows, device=device)
    t, i, between = row[:, None], row, row[1:, None, None]
    rows_between = -((i < between) & (between <= t)).float().flatten(1)
    never = (i > t).float().flatten() * _NEVER
    return _Fixed(rows_between, never)


@cache
def _numbers(num_seqs: int, device: torch.device) -> Tensor:
    """Return 0, 1, ... apart from what is larger, because steps beside prefill have any number of sequences."""
    return torch.arange(num_seqs, device=device)
