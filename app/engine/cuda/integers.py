"""Integer work around the forwards of a step, each in one launch of Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.cuda.launch import items_per_program

ROWS_BLOCK = tl.constexpr(128)
EMBED_BLOCK = tl.constexpr(1024)
SEQS_BLOCK = tl.constexpr(32)


def positions_and_slots(
    seq_ids: Tensor, position_offsets: Tensor, row_numbers: Tensor, page_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return `Backend.positions_and_slots`."""
    num_rows = len(row_numbers)
    positions, slot_mapping = (torch.empty(num_rows, dtype=torch.int32, device=seq_ids.device) for _ in range(2))
    locate_rows[triton.cdiv(num_rows, ROWS_BLOCK.value),](
        seq_ids, position_offsets, page_table, positions, slot_mapping, num_rows, page_table.shape[1], PAGE=page_size
    )
    return positions, slot_mapping


@triton.jit(do_not_specialize=["num_rows", "table_width"])
def locate_rows(seq_ptr, offset_ptr, table_ptr, position_ptr, slot_ptr, num_rows, table_width, PAGE: tl.constexpr):
    """Compute positions and slots of ROWS_BLOCK rows."""
    rows = tl.program_id(0) * ROWS_BLOCK + tl.arange(0, ROWS_BLOCK)
    inside = rows < num_rows
    seq = tl.load(seq_ptr + rows, mask=inside, other=0)
    position = tl.load(offset_ptr + seq, mask=inside, other=0) + rows
    page = tl.load(table_ptr + seq.to(tl.int64) * table_width + position // PAGE % table_width, mask=inside, other=0)
    tl.store(position_ptr + rows, position, mask=inside)
    tl.store(slot_ptr + rows, page * PAGE + position % PAGE, mask=inside)


def embed_blocks(anchors: Tensor, mask_token_id: int, block_size: int, embedding: Tensor) -> Tensor:
    """Return `Backend.embed_blocks` `[D * b, H]`: the embedding of each anchor `[D]` and of b - 1 masks after it."""
    num_rows, size = len(anchors) * block_size, embedding.shape[1]
    out = torch.empty(num_rows, size, dtype=embedding.dtype, device=embedding.device)
    rows = items_per_program(num_rows, on_gpu=1)
    embed[triton.cdiv(num_rows, rows), triton.cdiv(size, EMBED_BLOCK.value)](
        anchors, embedding, out, num_rows, mask_token_id, block_size, SIZE=size, ROWS=rows
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "mask_token"])
def embed(
    anchor_ptr,
    embedding_ptr,
    out_ptr,
    num_rows,
    mask_token,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy EMBED_BLOCK columns of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * EMBED_BLOCK + tl.arange(0, EMBED_BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (columns < SIZE)
    anchor = tl.load(anchor_ptr + row // BLOCK_SIZE, mask=row < num_rows, other=0)
    token = tl.where(row % BLOCK_SIZE == 0, anchor, mask_token).to(tl.int64)
    x = tl.load(embedding_ptr + token[:, None] * SIZE + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * SIZE + columns, x, mask=inside)


def verify(
    choices: Tensor,
    drafts: Tensor | None,
    logits_start: Tensor,
    num_drafts: Tensor,
    draft_index: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Return `engine.verify.verify`."""
    num_seqs, width = len(logits_start), 1 if drafts is None else drafts.shape[1] + 1
    out = choices.new_empty(num_seqs, width + 1) if out is None else out
    if num_seqs == 0:  # All rows belong to chunks that do not end their prompt.
        return out
    seqs = items_per_program(num_seqs, on_gpu=1)
    operands = (choices, choices if drafts is None else drafts, logits_start, num_drafts, draft_index, out)
    accept[triton.cdiv(num_seqs, seqs),](*operands, num_seqs, WIDTH=width, SEQS=seqs, num_warps=1)
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def accept(
    choice_ptr, draft_ptr, first_ptr, num_ptr, draft_of_ptr, out_ptr, num_seqs, WIDTH: tl.constexpr, SEQS: tl.constexpr
):
    """Verify SEQS sequences."""
    seq = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    inside = seq < num_seqs
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    first = tl.load(first_ptr + seq, mask=inside, other=0)[:, None]
    num_drafts = tl.load(num_ptr + seq, mask=inside, other=0)[:, None]
    draft_row = tl.load(draft_of_ptr + seq, mask=inside, other=0).to(tl.int64)[:, None]
    is_token = inside[:, None] & (columns < WIDTH)
    tokens = tl.load(choice_ptr + first + tl.minimum(columns, num_drafts), mask=is_token, other=0)
    drafted = inside[:, None] & (columns < num_drafts) & (columns < WIDTH - 1)
    drafts = tl.load(draft_ptr + draft_row * (WIDTH - 1) + columns, mask=drafted, other=0)
    is_accepted = (tokens == drafts) & drafted
    accepted = tl.min(tl.where(is_accepted, WIDTH - 1, tl.minimum(columns, WIDTH - 1)), 1)
    out = out_ptr + seq.to(tl.int64) * (WIDTH + 1)
    tl.store(out[:, None] + columns, tokens, mask=is_token)
    tl.store(out + WIDTH, accepted.to(out_ptr.dtype.element_ty), mask=inside)


def advance_by_accepted(
    verified: Tensor, prev_row: Tensor, tokens: Tensor, anchor_rows: Tensor, offsets: Tensor, seq_lens: Tensor
) -> None:
    """Apply `Backend.advance_by_accepted`."""
    num_seqs, operands = len(prev_row), (verified, prev_row, tokens, anchor_rows, offsets, seq_lens)
    advance[triton.cdiv(num_seqs, SEQS_BLOCK.value),](*operands, num_seqs, WIDTH=verified.shape[1] - 1, num_warps=1)


@triton.jit(do_not_specialize=["num_seqs"])
def advance(
    verified_ptr, prev_row_ptr, token_ptr, anchor_row_ptr, offset_ptr, kv_len_ptr, num_seqs, WIDTH: tl.constexpr
):
    """Advance SEQS_BLOCK sequences."""
    seq = tl.program_id(0) * SEQS_BLOCK + tl.arange(0, SEQS_BLOCK)
    prev_row = tl.load(prev_row_ptr + seq, mask=seq < num_seqs, other=-1).to(tl.int64)
    follows = prev_row >= 0
    result = verified_ptr + prev_row * (WIDTH + 1)
    accepted = tl.load(result + WIDTH, mask=follows, other=0)
    bonus = tl.maximum(tl.load(result + accepted, mask=follows, other=0), 0)  # NOT_FINITE is negative
    anchor_row = tl.load(anchor_row_ptr + seq, mask=follows, other=0)
    tl.store(token_ptr + anchor_row, bonus.to(tl.int32), mask=follows)
    offset = tl.load(offset_ptr + seq, mask=follows, other=0)
    tl.store(offset_ptr + seq, offset + accepted.to(tl.int32), mask=follows)
    seq_lens = tl.load(kv_len_ptr + seq, mask=follows, other=0)
    tl.store(kv_len_ptr + seq, seq_lens + accepted.to(tl.int32), mask=follows)
