"""Decoding rows of a Gated DeltaNet layer in Triton: the last step's accepted rows are committed, this step's verified.

A sequence's inputs are in order: the rows that the convolution still sees, the accepted rows of the last step, and
the rows of this step. `mix` takes them through the convolution, the norms of q and k and the gates, and `recur` through
the delta rule, one after the other. It writes the state after the accepted ones, and none after this step's. A row's
result does not depend on the number of other rows. All counts are read on the device.
"""

import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import INTERPRETED, items_per_program
from app.engine.device.recurrent import GatedDeltaStep

MAX_K_HEAD_DIM = 256
"""Greatest head size of keys whose part of a state stays in the registers of a program."""
COLUMNS, WIDE_COLUMNS = 32, 8
"""Columns of a state that a warp keeps in registers, with keys of up to 128 numbers and with wider ones. Half as many
were faster for up to 8 sequences on an H200, by up to 1.5 us a layer, but sums of other columns have another order, and
a sequence's bits would depend on how many there are."""
WIDE_KEYS = 128


def commit_and_verify(step: GatedDeltaStep) -> Tensor:
    """Return `Backend.commit_and_verify`. All memory is taken before the first launch, so no failure comes between."""
    num_seqs, num_rows, memory = len(step.slots), len(step.inputs), step.memory
    num_heads, k_dim, v_dim = memory.matrix.shape[1:]
    block, (before, channels), width = memory.pending.shape[1], memory.conv.shape[1:], memory.pending.shape[2]
    gates = step.inputs[:, channels:] if step.gates is None else step.gates
    seqs = step.slots, step.next_slots, step.starts, step.counts, step.rows[:, 0], step.rows.stride(0)
    # A sequence has as many rows as a block at most, and no more than there are.
    max_inputs = block + min(block, num_rows)
    mixed = memory.matrix.new_empty(num_seqs, max_inputs, width)
    accepted = step.counts.new_empty(num_seqs)
    o = memory.matrix.new_empty(num_rows, num_heads, v_dim)
    values, key_block = num_heads * v_dim, triton.next_power_of_2(k_dim)
    columns = max(key_block, triton.next_power_of_2(values + 2 * num_heads)) if INTERPRETED else key_block
    key_heads = (channels - values) // k_dim
    mix[num_seqs, key_heads + triton.cdiv(values + 2 * num_heads, columns)](
        step.inputs,
        step.inputs.stride(0),
        gates,
        gates.stride(0),
        *step.weights[:3],
        *seqs,
        memory.conv,
        memory.pending,
        memory.num_tokens,
        mixed,
        accepted,
        max_inputs,
        k_dim**-0.5,
        CHANNELS=channels,
        HEADS=num_heads,
        K_DIM=k_dim,
        KEY_HEADS=key_heads,
        BLOCK=block,
        TAPS=before + 1,
        ROWS=triton.next_power_of_2(max_inputs),
        COLUMNS=columns,
        num_warps=min(8, max(1, columns // 16)),
    )
    heads = items_per_program(num_heads, on_gpu=1)
    columns = triton.next_power_of_2(v_dim)
    if not INTERPRETED:
        columns = min(columns, COLUMNS if key_block <= WIDE_KEYS else WIDE_COLUMNS)
    recur[num_seqs, triton.cdiv(num_heads, heads), triton.cdiv(v_dim, columns)](
        mixed,
        accepted,
        *seqs,
        memory.matrix,
        memory.num_tokens,
        o,
        num_rows,
        max_inputs,
        CHANNELS=channels,
        HEADS=num_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        BLOCK_H=heads,
        BLOCK_V=columns,
        num_warps=1,
    )
    return o


@triton.jit(do_not_specialize=["first_stride", "max_inputs"])
def mix(
    input_ptr,
    stride,
    gate_ptr,
    gate_stride,
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
    scale,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write a head of q or k, or COLUMNS columns behind them, of `mixed` for one sequence, of the inputs that its
    convolution sees, and of its pending rows.

    A row of `mixed` has what enters the delta rule: q, k, normed, and v, and for each head beta and the factor of the
    decay.
    """
    seq = tl.program_id(0)
    slot, next_slot = tl.load(slot_ptr + seq).to(tl.int64), tl.load(next_slot_ptr + seq).to(tl.int64)
    count = tl.load(count_ptr + seq).to(tl.int32)
    if (next_slot == 0) | (count == 0):
        return
    start = tl.load(start_ptr + seq).to(tl.int32)
    is_new = start == 0
    first = tl.load(first_ptr + seq * first_stride).to(tl.int64)
    accepted = tl.minimum(tl.maximum(start - tl.load(num_tokens_ptr + slot), 0), BLOCK)
    accepted = tl.where(is_new, 0, accepted)  # the slot's previous owner does not count
    tl.store(accepted_ptr + seq, accepted)

    WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
    part, number = tl.program_id(1), tl.arange(0, COLUMNS)
    column = tl.where(part < KEY_HEADS, part * K_DIM, KEY_HEADS * K_DIM + (part - KEY_HEADS) * COLUMNS) + number
    inside = tl.where(part < KEY_HEADS, number < K_DIM, column < WIDTH)
    is_channel = inside & (column < CHANNELS)
    sees_before = is_channel & (is_new == 0)
    before_ptr = conv_ptr + slot * ((TAPS - 1) * CHANNELS)
    rows_ptr = pending_ptr + slot * (BLOCK * WIDTH)
    # Both gates may lie elsewhere than the channels.
    new_stride = tl.where(is_channel, stride, gate_stride)
    new_ptr = tl.where(is_channel, input_ptr + first * stride, gate_ptr + first * gate_stride - CHANNELS) + column

    sources = before_ptr, rows_ptr, new_ptr, new_stride, accepted, count
    row = tl.arange(0, ROWS)
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        index = row + tap
        x = inputs_at(index, sources, column, inside, sees_before, CHANNELS, WIDTH, TAPS)
        weight = tl.load(weight_ptr + column * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    # The last tap met the row itself.
    head = tl.where(column < CHANNELS + HEADS, column - CHANNELS, column - CHANNELS - HEADS)
    is_gate = inside & (is_channel == 0)
    a = x + tl.load(dt_bias_ptr + head, mask=is_gate, other=0.0)[None, :]
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head, mask=is_gate, other=0.0))[None, :] * softplus)
    gates = tl.where((column < CHANNELS + HEADS)[None, :], 1.0 / (1.0 + tl.exp(-x)), decay)
    total = total / (1.0 + tl.exp(-total))
    if part < KEY_HEADS:
        norm = tl.rsqrt(tl.sum(total * total, 1) + 1e-6) * tl.where(part < KEY_HEADS // 2, scale, 1.0)
        total = total * norm[:, None]
    mixed = tl.where(is_channel[None, :], total, gates)
    out = mixed_ptr + (seq.to(tl.int64) * max_inputs + row)[:, None] * WIDTH + column[None, :]
    tl.store(out, mixed, mask=(row < accepted + count)[:, None] & inside[None, :])

    before = tl.arange(0, triton.next_power_of_2(TAPS - 1))
    index = accepted + before
    last_inputs = inputs_at(index, sources, column, inside, sees_before, CHANNELS, WIDTH, TAPS)
    is_new_row = (row < count)[:, None] & inside[None, :]
    new = tl.load(new_ptr[None, :] + row[:, None] * new_stride[None, :], mask=is_new_row, other=0.0)
    tl.debug_barrier()  # other threads of this program read what is overwritten here
    out = conv_ptr + (next_slot * (TAPS - 1) + before)[:, None] * CHANNELS + column[None, :]
    tl.store(out, last_inputs.to(conv_ptr.dtype.element_ty), mask=(before < TAPS - 1)[:, None] & is_channel[None, :])
    out = pending_ptr + (next_slot * BLOCK + row)[:, None] * WIDTH + column[None, :]
    tl.store(out, new, mask=is_new_row)


@triton.jit
def inputs_at(index, sources, column, inside, sees_before, CHANNELS, WIDTH, TAPS):
    """Return columns of the inputs at `index` in order, in fp32. The TAPS - 1 before the accepted ones come first."""
    before_ptr, pending_ptr, new_ptr, new_stride, accepted, count = sources
    row = index - (TAPS - 1)
    is_before = (row < 0)[:, None] & sees_before[None, :]
    is_accepted = ((row >= 0) & (row < accepted))[:, None] & inside[None, :]
    is_new = ((row >= accepted) & (row < accepted + count))[:, None] & inside[None, :]
    x = tl.load(before_ptr + index[:, None] * CHANNELS + column[None, :], mask=is_before, other=0.0).to(tl.float32)
    x += tl.load(pending_ptr + row[:, None] * WIDTH + column[None, :], mask=is_accepted, other=0.0).to(tl.float32)
    new = new_ptr[None, :] + (row - accepted)[:, None] * new_stride[None, :]
    return x + tl.load(new, mask=is_new, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first_stride", "num_rows", "max_inputs"])
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
    num_rows,
    max_inputs,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Commit and verify BLOCK_V columns of BLOCK_H heads of one sequence. Padding, whose last sequence has the rows
    that are left, gets zeros."""
    seq = tl.program_id(0)
    slot, next_slot = tl.load(slot_ptr + seq).to(tl.int64), tl.load(next_slot_ptr + seq).to(tl.int64)
    count = tl.load(count_ptr + seq).to(tl.int32)
    first = tl.load(first_ptr + seq * first_stride).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    k_dim, v_dim = tl.arange(0, triton.next_power_of_2(K_DIM)), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_head = head < HEADS
    is_key, is_value = is_head[:, None] & (k_dim < K_DIM)[None, :], is_head[:, None] & (v_dim < V_DIM)[None, :]
    value = head[:, None] * V_DIM + v_dim[None, :]
    out = o_ptr + first * (HEADS * V_DIM) + value
    if next_slot == 0:
        rows = tl.where(seq == tl.num_programs(0) - 1, num_rows - first.to(tl.int32), count)
        for _ in range(rows):
            tl.store(out, tl.zeros([BLOCK_H, BLOCK_V], tl.float32), mask=is_value)
            out += HEADS * V_DIM
        return
    if count == 0:
        return
    start = tl.load(start_ptr + seq).to(tl.int32)
    is_new = start == 0
    accepted = tl.load(accepted_ptr + seq)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(num_tokens_ptr + next_slot, start)

    inside = is_key[:, :, None] & is_value[:, None, :]
    entry = (head[:, None, None] * K_DIM + k_dim[None, :, None]) * V_DIM + v_dim[None, None, :]
    size: tl.constexpr = HEADS * K_DIM * V_DIM
    KEYS: tl.constexpr = (CHANNELS - HEADS * V_DIM) // 2
    GROUP: tl.constexpr = HEADS * K_DIM // KEYS
    state = tl.load(matrix_ptr + slot * size + entry, mask=inside & (is_new == 0), other=0.0)

    WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
    mixed = mixed_ptr + seq.to(tl.int64) * max_inputs * WIDTH
    query = mixed + (head // GROUP)[:, None] * K_DIM + k_dim[None, :]
    value, gate = mixed + 2 * KEYS + value, mixed + CHANNELS + head
    q, k = tl.load(query, mask=is_key, other=0.0), tl.load(query + KEYS, mask=is_key, other=0.0)
    v = tl.load(value, mask=is_value, other=0.0)
    beta, decay = tl.load(gate, mask=is_head, other=0.0), tl.load(gate + HEADS, mask=is_head, other=0.0)
    rows = accepted + count
    for row in range(rows):
        # The next row is loaded before this one is used, and both sums are of the old state, so neither waits.
        query += WIDTH
        value += WIDTH
        gate += WIDTH
        goes_on = row + 1 < rows
        next_q = tl.load(query, mask=is_key & goes_on, other=0.0)
        next_k = tl.load(query + KEYS, mask=is_key & goes_on, other=0.0)
        next_v = tl.load(value, mask=is_value & goes_on, other=0.0)
        next_beta = tl.load(gate, mask=is_head & goes_on, other=0.0)
        next_decay = tl.load(gate + HEADS, mask=is_head & goes_on, other=0.0)
        if row == accepted:
            tl.store(matrix_ptr + next_slot * size + entry, state, mask=inside)
        d = beta[:, None] * (v - decay[:, None] * tl.sum(state * k[:, :, None], 1))
        if row >= accepted:
            o = decay[:, None] * tl.sum(state * q[:, :, None], 1) + tl.sum(k * q, 1)[:, None] * d
            tl.store(out, o, mask=is_value)
            out += HEADS * V_DIM
        state = state * decay[:, None, None] + k[:, :, None] * d[:, None, :]
        q, k, v, beta, decay = next_q, next_k, next_v, next_beta, next_decay
