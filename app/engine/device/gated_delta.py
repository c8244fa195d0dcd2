"""Gated DeltaNet (arXiv 2412.06464) in fp32: the delta rule as pure functions, and decoding steps with drafts.

S sequences have W rows each. q and k are [S, W, Nk, Dk], and v is [S, W, Nv, Dv]. The decay and beta of a head are
[S, W, Nv]. Nv is a multiple of Nk, and a head of q and k serves Nv / Nk consecutive heads of v. The state is
[S, Nv, Dk, Dv]. Rows of prompts go through `commit_prompts`, in chunks, and decoding steps through `commit_and_verify`.
CUDA has another form of both.

A decoding step commits the accepted rows of the previous step and verifies its own rows in one triangular system: the
pending rows, then those of this step. A row that was not accepted has no beta and no decay, so it changes nothing. No
row depends on later ones, so the first rows of the solution are what is committed. All operators are products or
elementwise, with static shapes. Where the host may not wait, all counts are read on the device.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep, GatedDeltaWeights, State, whole_inputs

CHUNK = 64
"""Rows that are solved together, as in the method's code. The work within a chunk grows with its square."""
L2_EPS = 1e-6

Normed = Callable[[Tensor], Tensor]

_NEVER = -1e4
"""Log of a decay to nothing: exp of it is 0 in fp32, and no operator meets an infinity."""


def l2norm(x: Tensor) -> Tensor:
    """Return x over the square root of its sum of squares + 1e-6, along the last axis."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


def short_conv(before: Tensor, rows: Tensor, taps: Tensor) -> Tensor:
    """Return silu of the causal depthwise convolution of rows [S, W, C], which follow the rows `before` [S, K - 1, C].
    The last of the taps [K, C] in fp32 is for the row itself."""
    num_rows = rows.shape[1]
    x = torch.cat((before, rows), dim=1).float()
    out = x[:, :num_rows] * taps[0]
    for j in range(1, len(taps)):
        out.addcmul_(x[:, j : j + num_rows], taps[j])
    return F.silu(out)


def last_rows(before: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the last K - 1 rows of `before` [S, K - 1, C] and the first `counts[s]` of rows [S, W, C]."""
    sequences, columns = (_numbers(size, 1, counts.device) for size in before.shape[:2])
    return torch.cat((before, rows), dim=1)[sequences[:, None], (counts[:, None] + columns).long()]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk: int = CHUNK,
    normed: Normed = l2norm,
) -> tuple[Tensor, Tensor]:
    """Return (outputs [S, W, Nv, Dv], the state after the last row) in fp32, of q and k before their l2norm.

    A row first decays the state by exp(log_decay). It then adds k d^T with d = beta (v - state^T k), and its output is
    state^T q / sqrt(Dk). A row with log_decay 0 and beta 0 does not change the state. Up to `chunk` rows are solved
    together, as a unit lower triangular system.
    """
    num_rows, num_heads, dim = v.shape[1], v.shape[2], k.shape[3]
    size = min(chunk, num_rows)
    # All is [chunks, S, Nv, rows, D], so what a chunk reads and writes lies together.
    qk = normed(_chunks(torch.stack((q, k), dim=2).float(), size)).movedim(2, -2)
    qk = qk.unsqueeze(4).expand(-1, -1, -1, -1, num_heads // k.shape[2], -1, -1)
    qk = qk.permute(0, 1, 3, 4, 2, 5, 6).flatten(2, 3)
    v, beta, log_decay = (_chunks(x.float(), size).movedim(2, 3) for x in (v, beta[..., None], log_decay))
    sums = log_decay.reshape(-1, size) @ _decays(size, v.device)
    since_start, between = sums.exp_().view(*v.shape[:3], size, -1).tril_(1).split_with_sizes([1, size], dim=4)
    q, k = qk.unbind(3)
    products = (qk.flatten(3, 4) @ k.mT).unflatten(3, (2, size)) * between.unsqueeze(3)
    seen, system = products.unbind(3)
    inverse = unit_inverse(system * beta)
    d, d_per_state = inverse @ (v * beta), inverse @ (k * (since_start * beta))
    q_of_state, k_at_end = q * since_start, (k * between[..., -1, :, None]).mT
    o, decay = torch.empty_like(d), since_start[..., -1:, :]
    state = state.flatten(0, 1).clone(memory_format=torch.contiguous_format)
    # All in place, so that no chunk takes memory of its own.
    for d_i, d_per_state_i, o_i, q_i, decay_i, k_i in zip(
        *(x.flatten(1, 2) for x in (d, d_per_state, o, q_of_state, decay, k_at_end)), strict=True
    ):
        d_i.baddbmm_(d_per_state_i, state, alpha=-1)
        torch.bmm(q_i, state, out=o_i)
        state.mul_(decay_i).baddbmm_(k_i, d_i)
    scale = dim**-0.5
    o.flatten(0, 2).baddbmm_(seen.flatten(0, 2), d.flatten(0, 2), beta=scale, alpha=scale)
    o = o.permute(1, 0, 3, 2, 4).flatten(1, 2)
    return o[:, :num_rows], state.view(-1, num_heads, *state.shape[1:])


@cache
def _decays(size: int, device: torch.device) -> Tensor:
    """Return sums [n, n (n + 1)] of the logs of n rows: up to each row all of them, and those after each row.

    Differences of cumulative sums would cancel.
    """
    row = torch.arange(size, device=device)
    after = torch.arange(-1, size, device=device)
    return ((after < row[:, None, None]) & (row[:, None, None] <= row[:, None])).float().flatten(1)


def unit_inverse(system: Tensor) -> Tensor:
    """Return the inverse of I + L, where L is `system` [..., n, n] below its diagonal.

    The inverse of two halves gives that of the whole: A^-1 and B^-1 stay, and the corner C between them becomes
    -B^-1 C A^-1. From halves of one row on, all corners of a size are two products, so an NPU's cube does the work. The
    series I - L + L^2 - ... would take as few, and lose all digits where keys are nearly equal.
    """
    eyes, masks = _corners(system.shape[-1], system.device)
    inverse, *corners = torch.addcmul(eyes, system.flatten(0, -3), masks)
    for corner in corners:
        inverse = torch.baddbmm(inverse, inverse @ corner, inverse, alpha=-1)
    return inverse.view(system.shape)


@cache
def _corners(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return I and zeros, and masks of the corners between halves of 1, 2, 4, ... rows, each [corners, 1, size, size].

    The first mask is -1, because the inverse of two rows is I - L.
    """
    row = torch.arange(size, device=device)
    corners = []
    for half in (1 << i for i in range(max(1, (size - 1).bit_length()))):
        part, pair = row // half, row // (2 * half)
        corners.append(((pair[:, None] == pair) & (part[:, None] > part)).float())
    eye, *others = torch.eye(size, device=device), *(torch.zeros_like(corner) for corner in corners[1:])
    return torch.stack((eye, *others))[:, None], torch.stack((-corners[0], *corners[1:]))[:, None]


def _chunks(x: Tensor, size: int) -> Tensor:
    """Return rows [S, W, ...] as [chunks, S, size, ...], with zeros after the last row."""
    if missing := -x.shape[1] % size:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, size)).transpose(0, 1)


def commit_prompts(step: GatedDeltaPrompts, normed: Normed = l2norm) -> Tensor:
    """Return `Backend.commit_prompts`, a prompt after the other, with `normed` as the l2norm."""
    inputs, memory, outputs, done = whole_inputs(step), step.memory, [], 0
    for number, (parts, is_new) in enumerate(zip(step.parts, step.are_new, strict=True)):
        one = slice(number, number + 1)
        start = step.starts[one]
        if is_new:
            state = memory.first()
        else:
            state, pending, counts = memory.at(step.slots[one], start)
            if not step.can_wait or counts.any():  # a checkpoint of a decoding sequence has pending rows
                state = advance(step.weights, pending, state, counts, normed)[1]
        for count, slot in zip(parts, (step.split_slots, step.next_slots)[-len(parts) :], strict=True):
            o, state = advance(step.weights, inputs[None, done : done + count], state, normed=normed)
            done, start = done + count, start + count
            memory.write(slot[one], state, start)
            outputs.append(o[0])
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def advance(
    weights: GatedDeltaWeights, inputs: Tensor, state: State, counts: Tensor | None = None, normed: Normed = l2norm
) -> tuple[Tensor, State]:
    """Return outputs [S, W, Nv, Dv] of inputs [S, W, C + 2 Nv], and the state after all rows or the first `counts` [S].

    The other rows may hold anything, and their outputs have no meaning.
    """
    num_heads, k_dim, v_dim = state.matrix.shape[1:]
    channels, num_rows = state.conv.shape[2], inputs.shape[1]
    keys = (channels - num_heads * v_dim) // 2
    is_row = None if counts is None else (_numbers(num_rows, 1, counts.device) < counts[:, None])[..., None]
    if is_row is not None:
        inputs = torch.where(is_row, inputs, 0.0)
    mixed, b, a = inputs.split_with_sizes([channels, num_heads, num_heads], dim=2)
    q, k, v = short_conv(state.conv, mixed, weights.taps[:, :channels]).tensor_split([keys, 2 * keys], dim=2)
    q, k = (part.unflatten(2, (-1, k_dim)) for part in (q, k))
    log_decay = F.softplus(a + weights.dt_bias) * weights.rates[:, 1, 0]
    beta = b.float().sigmoid()
    if is_row is not None:  # a row without decay and beta does not change the state
        log_decay, beta = torch.where(is_row, log_decay, 0.0), torch.where(is_row, beta, 0.0)
    o, matrix = delta_rule(q, k, v.unflatten(2, (num_heads, v_dim)), log_decay, beta, state.matrix, normed=normed)
    if counts is None:
        last = torch.cat((state.conv, mixed), dim=1)[:, num_rows:]
    else:
        last = last_rows(state.conv, mixed, counts)
    return o, State(matrix, last)


class Places(NamedTuple):
    """Where a step's rows are and which of them count in each of L layers, for b pending and W new rows."""

    is_new: Tensor | None  # [S], or None if no sequence is
    block: int  # b
    windows: Tensor  # [L, S * (b + W + 1) * K], rows of all sequences' inputs: conv, pending, new, and none
    ends: Tensor  # [L, S * Nv], rows of `between`: the decays up to the last accepted row
    outputs: Tensor  # [R * Nv], where the step's rows are among those [S, Nv, W] of the result
    kept: Tensor  # [S * W], where the new rows are among the pending rows of all slots


def places_of(step: GatedDeltaStep) -> tuple[Places, int]:
    """Return places, and which of their layers this one is. A layer that failed in a step has not committed what those
    before it have, so each has its own number of accepted rows."""
    memory, is_alone = step.memory, step.shared is None
    num_tokens = memory.num_tokens[None] if is_alone else memory.of_layers
    assert num_tokens is not None, "a pool has the numbers of all layers"
    return step.once("places", lambda: _places(step, num_tokens)), 0 if is_alone else memory.index


def _places(step: GatedDeltaStep, num_tokens: Tensor) -> Places:
    memory, device = step.memory, step.inputs.device
    block, width, num_before = memory.pending.shape[1], step.rows.shape[1], memory.conv.shape[1]
    starts = step.starts * (step.slots != 0)  # in padding a sequence begins, as scratch may hold anything
    is_new = starts == 0  # the slot's previous sequence does not count
    accepted = (starts - num_tokens[:, step.slots]).clamp(0, block)
    if step.can_wait:
        # A plain step has one pending row, so the width of a block would take most of the time.
        block = int(accepted.max())
    rows, numbers, parts, moves = _windows(num_before, block, width, device)
    old = starts.expand_as(accepted)  # any number above 0 keeps all of conv's rows
    counts = torch.stack((old, accepted, old, step.counts.expand_as(accepted)), dim=2)
    is_none = numbers >= counts.index_select(2, parts)
    each = num_before + block + width + 1
    rows = rows + _numbers(len(starts), each, device)[:, None]
    windows = (rows + accepted[..., None] * moves).masked_fill_(is_none, each - 1)
    num_heads, each = memory.matrix.shape[1], 2 * (1 + block + width)
    ends = _numbers(len(starts) * num_heads, each, device).view(-1, num_heads) + accepted[..., None]
    outputs = (step.places // width * (num_heads * width) + step.places % width)[:, None]
    outputs = outputs + _numbers(num_heads, width, device)
    return Places(
        None if step.can_wait and not is_new.any() else is_new,
        block,
        windows.flatten(1),
        ends.flatten(1),
        outputs.flatten(),
        (step.next_slots[:, None] * memory.pending.shape[1] + _numbers(width, 1, device)).flatten(),
    )


def inputs_of(step: GatedDeltaStep, new: Tensor, places: Places) -> Tensor:
    """Return the rows [N, C + 2 Nv] of all sequences that `Places.windows` reads, with `new` ones [S, W, C + 2 Nv]."""
    memory, (sequences, _, width) = step.memory, new.shape
    channels = memory.conv.shape[2]
    before = F.pad(memory.conv[step.slots], (0, width - channels))
    none = _none(channels, width, new.dtype, new.device).expand(sequences, 1, -1)
    return torch.cat((before, memory.pending[step.slots, : places.block], new, none), dim=1).flatten(0, 1)


def _convolved(step: GatedDeltaStep, new: Tensor, places: Places, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (silu of the convolution [S, b + W, C] and gates [S, b + W, 2 Nv] of pending and `new` rows [S, W, C + 2
    Nv], both in fp32, the convolution's inputs [S, K - 1, C] up to the last accepted row).

    The gates of a row that does not count leave no beta and no decay. A row's K inputs are gathered side by side,
    because an NPU launches few operators faster than it moves fewer bytes.
    """
    taps, channels, (sequences, _, width) = step.weights.taps, step.memory.conv.shape[2], new.shape
    inputs = inputs_of(step, new, places)
    windows = inputs.index_select(0, places.windows[layer]).view(sequences, -1, len(taps), width)
    rows = (windows * taps).sum(dim=2)[:, :-1]
    return F.silu(rows[..., :channels]), rows[..., channels:], windows[:, -1, 1:, :channels]


def _logs_of(gates: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """Return the logs of beta and of the decay [S, Nv, 2, P] of gates [S, P, 2 Nv] in fp32.

    Beta is the sigmoid of its gate, and log sigmoid(b) is -softplus(-b), so one operator serves both.
    """
    gates = gates.unflatten(2, (2, -1)).permute(0, 3, 2, 1)
    return F.softplus(torch.addcmul(weights.biases, gates, weights.signs)) * weights.rates


def commit_and_verify(step: GatedDeltaStep, normed: Normed = l2norm) -> Tensor:
    """Return `Backend.commit_and_verify`, with `normed` as the l2norm. All is computed before the first write.

    The first layer of a forward finds the places of its rows for all.
    """
    weights, memory, width = step.weights, step.memory, step.rows.shape[1]
    new, state = whole_inputs(step)[step.rows], memory.read(step.slots)
    num_heads, k_dim, v_dim = state.shape[1:]
    keys = (memory.conv.shape[2] - num_heads * v_dim) // 2
    k_heads = keys // k_dim
    places, layer = places_of(step)
    num_rows = places.block + width
    of_logs, never = _fixed(num_rows, step.inputs.device)

    if places.is_new is not None:
        state.masked_fill_(places.is_new[:, None, None, None], 0.0)
    mixed, gates, last_inputs = _convolved(step, new, places, layer)
    # Row 0 and column 0 are the state. Row t has the decay from each row up to itself, and for k also its own beta.
    between = torch.addmm(never, _logs_of(gates, weights).reshape(-1, len(of_logs)), of_logs).exp_()
    between = between.view(-1, num_heads, 2, 1 + num_rows, 1 + num_rows)
    of_rows = between[..., 1:, :]
    beta = of_rows[:, :, 1, :, 1:].diagonal(dim1=2, dim2=3)[..., None]

    qk = mixed[..., : 2 * keys].unflatten(2, (2, k_heads, k_dim)).permute(0, 3, 2, 1, 4).contiguous()
    qk = normed(qk)
    k, qk = qk[:, :, 1], qk.flatten(2, 3)
    products = (qk @ k.mT).unflatten(2, (2, -1)).unsqueeze(2)
    seen, system = (products * of_rows[..., 1:].unflatten(1, (k_heads, -1))).flatten(1, 2).unbind(2)

    of_state = qk.unsqueeze(2) @ state.unflatten(1, (k_heads, -1))
    of_q, of_k = of_state.flatten(1, 2).unflatten(2, (2, -1)).mul_(of_rows[..., :1]).unbind(2)
    v = mixed[..., 2 * keys :].unflatten(2, (num_heads, v_dim)).transpose(1, 2)
    minus_d = unit_inverse(system) @ torch.addcmul(of_k, v, beta, value=-1)
    minus_d, of_q, seen = (x.flatten(0, 1) for x in (minus_d, of_q, seen))
    scale = k_dim**-0.5
    o = torch.baddbmm(of_q[:, -width:], seen[:, -width:], minus_d, beta=scale, alpha=-scale)

    to_end = between.flatten(0, 3).index_select(0, places.ends[layer]).view(-1, num_heads, 1 + num_rows, 1)
    k_at_end = k.unsqueeze(2) * to_end[:, :, 1:].unflatten(1, (k_heads, -1))
    state.mul_(to_end[:, :, :1]).flatten(0, 1).baddbmm_(k_at_end.flatten(0, 2).mT, minus_d, alpha=-1)
    o = o.view(-1, v_dim).index_select(0, places.outputs).view(-1, num_heads, v_dim)
    memory.matrix[step.next_slots] = memory.stored(state)
    memory.conv[step.next_slots] = last_inputs
    memory.num_tokens[step.next_slots] = step.starts.to(torch.int32)
    memory.pending.flatten(0, 1)[places.kept] = new.flatten(0, 1)
    return o


@cache
def _fixed(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (`of_logs` [2 P, 2 (P + 1)^2], `never` [2 (P + 1)^2]) for P rows.

    The first sums the log decays of the rows after row i up to row t, and in its second half adds row t's log beta. It
    takes 557 kB for 32 rows. The second adds _NEVER where t is before i. They are made on the device, because an upload
    would let the host wait.
    """
    row = torch.arange(1 + num_rows, device=device)
    t, i, each = row[:, None], row, row[1:, None, None]
    decays = ((i < each) & (each <= t)).expand(2, -1, -1, -1)
    betas = (t == each).expand_as(decays) & (row[:2] == 1).view(2, 1, 1, 1)
    of_logs = torch.stack((betas, decays)).transpose(1, 2).float()
    return of_logs.reshape(2 * num_rows, -1), ((i > t).float().flatten() * _NEVER).repeat(2)


@cache
def _windows(before: int, block: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `Places.windows` is made of, each for the inputs of all rows: the row with nothing accepted, the
    number that a count is compared with, the part 0 to 3, and 1 where a row moves on with what is accepted.

    New rows see the last rows of what is accepted. A part of conv's rows counts as a whole. The window after the
    pending rows' is of the last accepted one, for the next conv.
    """
    row = torch.arange(before + block + width, device=device)
    sizes = before, block, before, width
    rows = torch.cat((row[: before + block], row[:before], row[before + block :]))
    numbers = torch.cat((row[:before] * 0, row[:block], row[:before] * 0, row[:width])).to(torch.int32)
    parts = torch.cat([torch.full((size,), i, device=device) for i, size in enumerate(sizes)])
    first = torch.cat((row[:block], row[before + block :], row[before + block - 1 : before + block]))
    inputs = (first[:, None] + row[: before + 1]).flatten()
    rows, numbers, parts = rows[inputs], numbers[inputs], parts[inputs]
    return rows, numbers, parts, (parts == 2).to(torch.int32)


@cache
def _none(channels: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the inputs [width] of a row that does not count."""
    return torch.where(torch.arange(width, device=device) < channels, 0.0, _NEVER).to(dtype)


@cache
def _numbers(count: int, each: int, device: torch.device) -> Tensor:
    """Return 0, each, 2 each, ..., apart from `_fixed`, because steps with prefill have any number of sequences."""
    return torch.arange(0, count * each, each, device=device)
