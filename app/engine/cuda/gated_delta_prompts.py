"""Rows of prompts of a Gated DeltaNet layer in Triton: all chunks of all prompts of a step in two launches.

`solve` does what needs no state for all chunks of ROWS rows at once: convolution, gates, and the triangular system of
a chunk. `scan` takes the state over the chunks of a prompt, one after the other. Pending rows that were accepted come
before a prompt's own. The last chunk before a split ends there, because the state is written. Products have operands
of the engine's dtype, and the state is in fp32.
"""

import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import dot_size, operand, rounded
from app.engine.device.recurrent import GatedDeltaPrompts

ROWS = tl.constexpr(32)
"""Rows that are solved together. Twice as many took twice as long on an H200, because their system spills."""
HALVINGS = tl.constexpr(ROWS.value.bit_length() - 1)
COLUMNS = 32
"""Columns of a state that a program takes over the chunks."""
NARROW = 256
"""Bytes of a row of keys with which `solve` and `scan` stay in the registers of four warps."""
SEARCHED_PROMPTS = tl.constexpr(128)
PRECISION = tl.constexpr("tf32x3")
"""Of products of fp32 numbers, which keep about fp32's digits."""


def commit_prompts(step: GatedDeltaPrompts) -> Tensor:
    """Return `Backend.commit_prompts`. All memory is taken before the first launch, so no failure comes between."""
    inputs, memory, num_prompts = step.inputs, step.memory, len(step.slots)
    num_rows, (num_heads, k_dim, v_dim) = len(inputs), memory.matrix.shape[1:]
    block, (before, channels) = memory.pending.shape[1], memory.conv.shape[1:]
    # A prompt has whole chunks, one that is cut short before a split and one at the end, and chunks of pending rows.
    spare_chunks = 2 + triton.cdiv(block, ROWS.value)
    num_chunks = num_rows // ROWS.value + num_prompts * spare_chunks
    num_inputs = num_rows + num_prompts * block
    keys = inputs.new_empty(3, num_inputs, num_heads, k_dim)
    values = inputs.new_empty(num_inputs, num_heads, v_dim)
    seen = inputs.new_empty(num_inputs, num_heads, ROWS.value)
    decays = memory.matrix.new_empty(num_chunks, num_heads)
    o = memory.matrix.new_empty(num_rows, num_heads, v_dim)
    prompts = step.slots, step.next_slots, step.split_slots, step.starts, step.splits, step.query_start_loc
    between = *keys, values, seen, decays
    sizes = {
        "HEADS": num_heads,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_BLOCK": dot_size(k_dim),
        "BLOCK": block,
        "SPARE": spare_chunks,
    }
    gates = inputs[:, channels:] if step.gates is None else step.gates
    is_narrow = dot_size(k_dim) * inputs.itemsize <= NARROW
    solve[num_chunks, num_heads](
        inputs,
        inputs.stride(0),
        gates,
        gates.stride(0),
        *step.weights[:3],
        *prompts,
        num_prompts,
        memory.conv,
        memory.pending,
        memory.num_tokens,
        *between,
        k_dim**-0.5,
        CHANNELS=channels,
        TAPS=before + 1,
        V_BLOCK=dot_size(v_dim),
        **sizes,
        num_warps=4 if is_narrow else 8,
    )
    columns = min(COLUMNS if is_narrow else COLUMNS // 2, dot_size(v_dim))
    scan[num_heads, triton.cdiv(v_dim, columns), num_prompts](
        *prompts,
        *between,
        memory.matrix,
        memory.num_tokens,
        o,
        COLUMNS=columns,
        **sizes,
        num_warps=4 if is_narrow else 8,
        num_stages=3 if is_narrow else 1,
    )
    return o


@triton.jit
def prompt_at(prompt, slot_ptr, start_ptr, split_ptr, first_ptr, num_tokens_ptr, BLOCK):
    """Return a prompt's slot, whether it begins with zeros, its first row in the step, the accepted rows before that,
    and how many rows there are up to a split (0 without one) and in all, both with the accepted ones."""
    slot, start = tl.load(slot_ptr + prompt).to(tl.int64), tl.load(start_ptr + prompt)
    is_new = start == 0
    accepted = tl.minimum(tl.maximum(start - tl.load(num_tokens_ptr + slot), 0), BLOCK)
    accepted = tl.where(is_new, 0, accepted)  # the slot's previous owner does not count
    first, split = tl.load(first_ptr + prompt), tl.load(split_ptr + prompt)
    total = accepted + tl.load(first_ptr + prompt + 1) - first
    return slot, is_new, first.to(tl.int64), accepted, tl.where(split > 0, accepted + split, 0), total


@triton.jit(do_not_specialize=["num_prompts"])
def solve(
    input_ptr,
    stride,
    gate_ptr,
    gate_stride,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    slot_ptr,
    next_slot_ptr,
    split_slot_ptr,
    start_ptr,
    split_ptr,
    first_ptr,
    num_prompts,
    conv_ptr,
    pending_ptr,
    num_tokens_ptr,
    w_ptr,
    q_ptr,
    k_ptr,
    u_ptr,
    seen_ptr,
    decay_ptr,
    scale,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Prepare a chunk of a head. With the state S before the chunk its d are U - W S, and its outputs Q S + seen d.

    Rows of W, U, Q and seen, and of the keys K by their decays up to the end, are those of the prompts back to back,
    each after BLOCK pending ones. It also writes the inputs that the convolution sees after a split and at the end.
    """
    # The chunks of prompt i begin at query_start_loc[i] // ROWS + i * SPARE. These are at least as many as it needs.
    tile, head, prompt = tl.program_id(0), tl.program_id(1), -1
    for searched in range(0, num_prompts, SEARCHED_PROMPTS):
        prompts = searched + tl.arange(0, SEARCHED_PROMPTS)
        is_prompt = prompts < num_prompts
        first_tiles = tl.load(first_ptr + prompts, mask=is_prompt, other=0) // ROWS + prompts * SPARE
        prompt += tl.sum(((first_tiles <= tile) & is_prompt).to(tl.int32))
    slot, is_new, first, accepted, split, total = prompt_at(
        prompt, slot_ptr, start_ptr, split_ptr, first_ptr, num_tokens_ptr, BLOCK
    )
    chunk = tile - (first // ROWS).to(tl.int32) - prompt * SPARE
    in_split = tl.cdiv(split, ROWS)
    begin = tl.where(chunk < in_split, chunk * ROWS, split + (chunk - in_split) * ROWS)
    end = tl.minimum(begin + ROWS, tl.where(chunk < in_split, split, total))
    if begin >= total:
        return

    KEYS: tl.constexpr = (CHANNELS - HEADS * V_DIM) // 2
    GROUP: tl.constexpr = HEADS * K_DIM // KEYS
    WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    before_ptr = conv_ptr + slot * ((TAPS - 1) * CHANNELS)
    rows_ptr, new_gates = pending_ptr + slot * (BLOCK * WIDTH), gate_ptr + (first - accepted) * gate_stride
    sources = before_ptr, rows_ptr, input_ptr + (first - accepted) * stride, stride, accepted, is_new
    k_dim, v_dim = tl.arange(0, K_BLOCK), tl.arange(0, V_BLOCK)
    is_key, is_value = k_dim < K_DIM, v_dim < V_DIM
    query, value = head // GROUP * K_DIM + k_dim, 2 * KEYS + head * V_DIM + v_dim
    narrow = u_ptr.dtype.element_ty

    gate = tl.where(row < accepted, rows_ptr + row * WIDTH + CHANNELS, new_gates + row.to(tl.int64) * gate_stride)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gate + head, mask=is_row, other=0.0).to(tl.float32)))
    a = tl.load(gate + HEADS + head, mask=is_row, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    log_decay = tl.where(is_row, -tl.exp(tl.load(a_log_ptr + head)) * softplus, 0.0)

    k = convolved(row, is_row, KEYS + query, is_key, weight_ptr, sources, CHANNELS, WIDTH, TAPS)
    k = rounded(k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None], narrow)
    q = convolved(row, is_row, query, is_key, weight_ptr, sources, CHANNELS, WIDTH, TAPS)
    q = rounded(q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * scale)[:, None], narrow)
    # Decay from row s to row t is exp of a sum over the rows between. Differences of cumulative sums would cancel.
    t, s = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    later = tl.where(t > s, log_decay[:, None], 0.0)
    between = tl.where(t >= s, tl.exp(tl.cumsum(later, 0)), 0.0)
    to_end, since_start = tl.exp(tl.sum(later, 0)), tl.exp(tl.cumsum(log_decay, 0))
    k_t = operand(tl.trans(k))
    system = tl.where(t > s, tl.dot(operand(k), k_t, input_precision=PRECISION) * between, 0.0)
    inverse = operand(rounded(unit_inverse(system * beta[:, None]), narrow))
    seen = tl.dot(operand(q), k_t, input_precision=PRECISION) * between

    at, step = (first + prompt * BLOCK + begin) * HEADS + head, tl.arange(0, ROWS)[:, None] * HEADS
    of_key, is_stored = step * K_DIM + k_dim[None, :], is_row[:, None] & is_key[None, :]
    of_seen = step * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(seen_ptr + at * ROWS + of_seen, rounded(seen, narrow), mask=is_row[:, None])
    tl.store(q_ptr + at * K_DIM + of_key, rounded(q.to(tl.float32) * since_start[:, None], narrow), mask=is_stored)
    tl.store(k_ptr + at * K_DIM + of_key, rounded(k.to(tl.float32) * to_end[:, None], narrow), mask=is_stored)
    k = operand(rounded(k.to(tl.float32) * (beta * since_start)[:, None], narrow))
    tl.store(
        w_ptr + at * K_DIM + of_key, rounded(tl.dot(inverse, k, input_precision=PRECISION), narrow), mask=is_stored
    )
    v = convolved(row, is_row, value, is_value, weight_ptr, sources, CHANNELS, WIDTH, TAPS)
    u = tl.dot(inverse, operand(rounded(v * beta[:, None], narrow)), input_precision=PRECISION)
    of_value = step * V_DIM + v_dim[None, :]
    tl.store(u_ptr + at * V_DIM + of_value, rounded(u, narrow), mask=is_row[:, None] & is_value[None, :])
    tl.store(decay_ptr + tile * HEADS + head, tl.exp(tl.sum(log_decay, 0)))

    if (end == total) | (end == split):
        next_slot = tl.load(tl.where(end == total, next_slot_ptr, split_slot_ptr) + prompt).to(tl.int64)
        to_ptr = conv_ptr + next_slot * ((TAPS - 1) * CHANNELS)
        keep_inputs(end, value, is_value, to_ptr, sources, CHANNELS, WIDTH, TAPS)
        if head % GROUP == 0:
            keep_inputs(end, query, is_key, to_ptr, sources, CHANNELS, WIDTH, TAPS)
            keep_inputs(end, KEYS + query, is_key, to_ptr, sources, CHANNELS, WIDTH, TAPS)


@triton.jit
def row_pointers(row, sources, CHANNELS, WIDTH, TAPS):
    """Return where rows of inputs begin. Before row 0 are those that the convolution still sees, then pending ones."""
    before_ptr, pending_ptr, new_ptr, stride, accepted, _ = sources
    new = tl.where(row < accepted, pending_ptr + row * WIDTH, new_ptr + row.to(tl.int64) * stride)
    return tl.where(row < 0, before_ptr + (row + TAPS - 1) * CHANNELS, new)


@triton.jit
def inputs_at(row, is_row, column, is_column, sources, CHANNELS, WIDTH, TAPS):
    """Return columns of rows of inputs, and 0 for those before a new sequence."""
    is_known = is_row & ((row >= 0) | (sources[5] == 0))
    at = row_pointers(row, sources, CHANNELS, WIDTH, TAPS)[:, None] + column[None, :]
    return tl.load(at, mask=is_known[:, None] & is_column[None, :], other=0.0)


@triton.jit
def convolved(row, is_row, column, is_column, weight_ptr, sources, CHANNELS, WIDTH, TAPS: tl.constexpr):
    """Return silu of the convolution of rows of inputs in fp32, which is 0 where there is no row."""
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for tap in range(TAPS):  # unrolled, loads of all taps at once would spill
        x = inputs_at(row + tap - (TAPS - 1), is_row, column, is_column, sources, CHANNELS, WIDTH, TAPS).to(tl.float32)
        weight = tl.load(weight_ptr + column * TAPS + tap, mask=is_column, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    return total / (1.0 + tl.exp(-total))


@triton.jit
def keep_inputs(end, column, is_column, to_ptr, sources, CHANNELS, WIDTH, TAPS: tl.constexpr):
    """Write columns of the inputs that the convolution of the row at `end` sees before it."""
    tap = tl.arange(0, triton.next_power_of_2(TAPS - 1))
    is_tap = tap < TAPS - 1
    x = inputs_at(end - (TAPS - 1) + tap, is_tap, column, is_column, sources, CHANNELS, WIDTH, TAPS)
    tl.store(to_ptr + tap[:, None] * CHANNELS + column[None, :], x, mask=is_tap[:, None] & is_column[None, :])


@triton.jit
def unit_inverse(a):
    """Return the inverse of I + a, of a strictly lower triangular a [ROWS, ROWS], from halves of 1, 2, 4, ... rows on.

    `device.gated_delta.unit_inverse` has the formula.
    """
    t, s = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    inverse = tl.where(t == s, 1.0, 0.0) - tl.where(t // 2 == s // 2, a, 0.0)
    for i in tl.static_range(1, HALVINGS):
        corner = tl.where(((t >> (i + 1)) == (s >> (i + 1))) & ((t >> i) > (s >> i)), a, 0.0)
        corner = tl.dot(inverse, corner, input_precision=PRECISION)
        inverse -= tl.dot(corner, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def scan(
    slot_ptr,
    next_slot_ptr,
    split_slot_ptr,
    start_ptr,
    split_ptr,
    first_ptr,
    w_ptr,
    q_ptr,
    k_ptr,
    u_ptr,
    seen_ptr,
    decay_ptr,
    matrix_ptr,
    num_tokens_ptr,
    o_ptr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Take COLUMNS columns of a head's state over the chunks of a prompt, and write them after a split and at the end.

    Without a split the first part has no rows.
    """
    head, prompt = tl.program_id(0), tl.program_id(2)
    slot, is_new, first, accepted, split, total = prompt_at(
        prompt, slot_ptr, start_ptr, split_ptr, first_ptr, num_tokens_ptr, BLOCK
    )
    k_dim, column = tl.arange(0, K_BLOCK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = k_dim < K_DIM, column < V_DIM
    inside = is_key[:, None] & is_column[None, :]
    entry = (head * K_DIM + k_dim[:, None]) * V_DIM + column[None, :]
    size: tl.constexpr = HEADS * K_DIM * V_DIM
    state = tl.load(matrix_ptr + slot * size + entry, mask=inside & (is_new == 0), other=0.0)
    narrow = u_ptr.dtype.element_ty
    decay_ptr += (first // ROWS + prompt * SPARE) * HEADS + head
    rows = tl.arange(0, ROWS)
    step = rows[:, None] * HEADS
    of_column = step * V_DIM + column[None, :]
    for part in range(2):
        begin, end = tl.where(part == 0, 0, split), tl.where(part == 0, split, total)
        for row in range(begin, end, ROWS):
            is_row = row + rows < end
            at = (first + prompt * BLOCK + row) * HEADS + head
            of_key, is_known = step * K_DIM + k_dim[None, :], is_row[:, None] & is_key[None, :]
            is_value = is_row[:, None] & is_column[None, :]
            before = operand(rounded(state, narrow))
            w = operand(tl.load(w_ptr + at * K_DIM + of_key, mask=is_known, other=0.0))
            u = tl.load(u_ptr + at * V_DIM + of_column, mask=is_value, other=0.0)
            d = u.to(tl.float32) - tl.dot(w, before, input_precision=PRECISION)
            d = operand(rounded(d, narrow))
            q = operand(tl.load(q_ptr + at * K_DIM + of_key, mask=is_known, other=0.0))
            o = tl.dot(q, before, input_precision=PRECISION)
            seen = operand(tl.load(seen_ptr + at * ROWS + step * ROWS + rows[None, :], mask=is_row[:, None], other=0.0))
            o = tl.dot(seen, d, o, input_precision=PRECISION)
            k = operand(tl.load(k_ptr + at * K_DIM + of_key, mask=is_known, other=0.0))
            state = tl.dot(tl.trans(k), d, state * tl.load(decay_ptr), input_precision=PRECISION)
            decay_ptr += HEADS
            out = (first + row - accepted) * HEADS + head
            is_new_row = is_value & (row + rows >= accepted)[:, None]
            tl.store(o_ptr + out * V_DIM + of_column, o, mask=is_new_row)
        if end > begin:
            next_slot = tl.load(tl.where(part == 0, split_slot_ptr, next_slot_ptr) + prompt).to(tl.int64)
            tl.store(matrix_ptr + next_slot * size + entry, state, mask=inside)
            if (head == 0) & (tl.program_id(1) == 0):
                tl.store(num_tokens_ptr + next_slot, tl.load(start_ptr + prompt) + end - accepted)
