"""Decoding rows of a Gated DeltaNet layer in Triton: the last step's accepted rows are committed, this step's verified.

A sequence's inputs are in order: the rows that the convolution still sees, the accepted rows of the last step, and
the rows of this step. `mix` takes them through the convolution and the gates, and `recur` through the delta
rule, one after the other. It writes the state after the accepted ones, and none after this step's. A row's result
does not depend on the number of other rows. All counts are read on the device.
"""

import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import INTERPRETED, items_per_program
from app.engine.device.recurrent import GatedDeltaStep

MAX_K_HEAD_DIM = 256
"""Greatest head size of keys whose part of a state stays in the registers of a program."""
COLUMNS_OF_A_PROGRAM = 64
STATE_OF_A_PROGRAM = 2048
"""Numbers of a state that one warp keeps: 64 registers of a thread."""


def commit_and_verify(step: GatedDeltaStep) -> Tensor:
    """Return `Backend.commit_and_verify`. All memory is taken before the first launch, so no failure comes between."""
    num_seqs, (num_rows, width), memory = len(step.slots), step.inputs.shape, step.memory
    num_heads, k_dim, v_dim = memory.matrix.shape[1:]
    block, (before, channels) = memory.pending.shape[1], memory.conv.shape[1:]
    seqs = step.slots, step.next_slots, step.starts, step.counts, step.rows[:, 0], step.rows.stride(0)
    # A sequence has as many rows as a block at most, and no more than there are.
    max_inputs = block + min(block, num_rows)
    mixed = memory.matrix.new_empty(num_seqs, max_inputs, width)
    accepted = step.counts.new_empty(num_seqs)
    o = memory.matrix.new_zeros(num_rows, num_heads, v_dim)
    columns = triton.next_power_of_2(width) if INTERPRETED else COLUMNS_OF_A_PROGRAM
    mix[num_seqs, triton.cdiv(width, columns)](
        step.inputs,
        step.inputs.stride(0),
        *step.weights,
        *seqs,
        memory.conv,
        memory.pending,
        memory.num_tokens,
        mixed,
        accepted,
        max_inputs,
        CHANNELS=channels,
        HEADS=num_heads,
        BLOCK=block,
        TAPS=before + 1,
        ROWS=triton.next_power_of_2(max_inputs),
        COLUMNS=columns,
    )
    heads = items_per_program(num_heads, on_gpu=1)
    values = triton.next_power_of_2(v_dim)
    if not INTERPRETED:
        values = min(values, STATE_OF_A_PROGRAM // triton.next_power_of_2(k_dim))
    arguments = mixed, accepted, *seqs, memory.matrix, memory.num_tokens, o, max_inputs, k_dim**-0.5
    recur[num_seqs, triton.cdiv(num_heads, heads), triton.cdiv(v_dim, values)](
        *arguments,
        CHANNELS=channels,
        HEADS=num_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        BLOCK_H=heads,
        BLOCK_V=values,
        num_warps=1,
    )
    return o


@triton.jit(do_not_specialize=["first_stride", "max_inputs"])
def mix(
    input_ptr,
    stride,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    slot_ptr,
    next_slot_ptr,
    start_ptr,
    count_ptr,
    first_ptr,
    first_stride,
    conv_ptr,
    pending_ptr,
    num_tokens_ptr,
    mixed_ptr,
    accepted_ptr,
    max_inputs,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write COLUMNS columns of `mixed` for one sequence, the inputs that its convolution sees, and its pending rows.

    A row of `mixed` has what enters the delta rule: q, k and v, and for each head beta and the factor of the decay.
    """
    seq = tl.program_id(0)
    slot, next_slot = tl.load(slot_ptr + seq).to(tl.int64), tl.load(next_slot_ptr + seq).to(tl.int64)
    count = tl.load(count_ptr + seq).to(tl.int32)
    if (next_slot == 0) | (count == 0):
        return
    start = tl.load(start_ptr + seq).to(tl.int32)
    is_new = (start == 0) | (slot == 0)
    first = tl.load(first_ptr + seq * first_stride).to(tl.int64)
    accepted = tl.minimum(tl.maximum(start - tl.load(num_tokens_ptr + slot), 0), BLOCK)
    accepted = tl.where(is_new, 0, accepted)  # the slot's previous owner does not count
    tl.store(accepted_ptr + seq, accepted)

    WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel, inside = column < CHANNELS, column < WIDTH
    sees_before = is_channel & (is_new == 0)
    before_ptr = conv_ptr + slot * ((TAPS - 1) * CHANNELS)
    rows_ptr = pending_ptr + slot * (BLOCK * WIDTH)
    new_ptr = input_ptr + first * stride

    row = tl.arange(0, ROWS)
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        index = row + tap
        x = inputs_at(
            index, before_ptr, rows_ptr, new_ptr, stride, accepted, count, column, sees_before, CHANNELS, WIDTH, TAPS
        )
        weight = tl.load(weight_ptr + column * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    # The last tap met the row itself.
    head = tl.where(column < CHANNELS + HEADS, column - CHANNELS, column - CHANNELS - HEADS)
    is_gate = inside & (is_channel == 0)
    a = x + tl.load(dt_bias_ptr + head, mask=is_gate, other=0.0)[None, :]
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head, mask=is_gate, other=0.0))[None, :] * softplus)
    gates = tl.where((column < CHANNELS + HEADS)[None, :], 1.0 / (1.0 + tl.exp(-x)), decay)
    mixed = tl.where(is_channel[None, :], total / (1.0 + tl.exp(-total)), gates)
    out = mixed_ptr + (seq.to(tl.int64) * max_inputs + row)[:, None] * WIDTH + column[None, :]
    tl.store(out, mixed, mask=(row < accepted + count)[:, None] & inside[None, :])

    before = tl.arange(0, triton.next_power_of_2(TAPS - 1))
    index = accepted + before
    last_inputs = inputs_at(
        index, before_ptr, rows_ptr, new_ptr, stride, accepted, count, column, sees_before, CHANNELS, WIDTH, TAPS
    )
    is_new_row = (row < count)[:, None] & inside[None, :]
    new = tl.load(new_ptr + row[:, None] * stride + column[None, :], mask=is_new_row, other=0.0)
    tl.debug_barrier()  # other threads of this program read what is overwritten here
    out = conv_ptr + (next_slot * (TAPS - 1) + before)[:, None] * CHANNELS + column[None, :]
    tl.store(out, last_inputs.to(conv_ptr.dtype.element_ty), mask=(before < TAPS - 1)[:, None] & is_channel[None, :])
    out = pending_ptr + (next_slot * BLOCK + row)[:, None] * WIDTH + column[None, :]
    tl.store(out, new, mask=is_new_row)


@triton.jit
def inputs_at(
    index, before_ptr, pending_ptr, new_ptr, new_stride, accepted, count, column, sees_before, CHANNELS, WIDTH, TAPS
):
    """Return columns of the inputs at `index` in order, in fp32. The TAPS - 1 before the accepted ones come first."""
    row = index - (TAPS - 1)
    inside = column < WIDTH
    is_before = (row < 0)[:, None] & sees_before[None, :]
    is_accepted = ((row >= 0) & (row < accepted))[:, None] & inside[None, :]
    is_new = ((row >= accepted) & (row < accepted + count))[:, None] & inside[None, :]
    x = tl.load(before_ptr + index[:, None] * CHANNELS + column[None, :], mask=is_before, other=0.0).to(tl.float32)
    x += tl.load(pending_ptr + row[:, None] * WIDTH + column[None, :], mask=is_accepted, other=0.0).to(tl.float32)
    new = new_ptr + (row - accepted)[:, None] * new_stride + column[None, :]
    return x + tl.load(new, mask=is_new, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first_stride", "max_inputs"])
def recur(
    mixed_ptr,
    accepted_ptr,
    slot_ptr,
    next_slot_ptr,
    start_ptr,
    count_ptr,
    first_ptr,
    first_stride,
    matrix_ptr,
    num_tokens_ptr,
    o_ptr,
    max_inputs,
    scale,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Commit and verify BLOCK_V columns of BLOCK_H heads of one sequence. Padding keeps the outputs that it has."""
    seq = tl.program_id(0)
    slot, next_slot = tl.load(slot_ptr + seq).to(tl.int64), tl.load(next_slot_ptr + seq).to(tl.int64)
    count = tl.load(count_ptr + seq).to(tl.int32)
    if (next_slot == 0) | (count == 0):
        return
    start = tl.load(start_ptr + seq).to(tl.int32)
    is_new = (start == 0) | (slot == 0)
    accepted = tl.load(accepted_ptr + seq)
    first = tl.load(first_ptr + seq * first_stride).to(tl.int64)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(num_tokens_ptr + next_slot, start)

    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    k_dim, v_dim = tl.arange(0, triton.next_power_of_2(K_DIM)), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_head = head < HEADS
    is_key, is_value = is_head[:, None] & (k_dim < K_DIM)[None, :], is_head[:, None] & (v_dim < V_DIM)[None, :]
    inside = is_key[:, :, None] & is_value[:, None, :]
    entry = (head[:, None, None] * K_DIM + k_dim[None, :, None]) * V_DIM + v_dim[None, None, :]
    size: tl.constexpr = HEADS * K_DIM * V_DIM
    KEYS: tl.constexpr = (CHANNELS - HEADS * V_DIM) // 2
    GROUP: tl.constexpr = HEADS * K_DIM // KEYS
    state = tl.load(matrix_ptr + slot * size + entry, mask=inside & (is_new == 0), other=0.0)

    WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
    mixed = mixed_ptr + seq.to(tl.int64) * max_inputs * WIDTH
    key = (head // GROUP)[:, None] * K_DIM + k_dim[None, :]
    value = head[:, None] * V_DIM + v_dim[None, :]
    out = o_ptr + first * (HEADS * V_DIM) + value
    for row in range(accepted + count):
        if row == accepted:
            tl.store(matrix_ptr + next_slot * size + entry, state, mask=inside)
        k = tl.load(mixed + KEYS + key, mask=is_key, other=0.0)
        k = k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        v = tl.load(mixed + 2 * KEYS + value, mask=is_value, other=0.0)
        beta = tl.load(mixed + CHANNELS + head, mask=is_head, other=0.0)
        decay = tl.load(mixed + CHANNELS + HEADS + head, mask=is_head, other=0.0)
        state *= decay[:, None, None]
        d = beta[:, None] * (v - tl.sum(state * k[:, :, None], 1))
        state += k[:, :, None] * d[:, None, :]
        if row >= accepted:
            q = tl.load(mixed + key, mask=is_key, other=0.0)
            q = q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * scale)[:, None]
            tl.store(out + (row - accepted) * (HEADS * V_DIM), tl.sum(state * q[:, :, None], 1), mask=is_value)
        mixed += WIDTH
