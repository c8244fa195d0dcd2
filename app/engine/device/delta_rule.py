"""The gated delta rule of Gated DeltaNet (arXiv 2412.06464) as pure functions, in fp32.

S sequences have W rows each. q and k are [S, W, Nk, Dk], and v is [S, W, Nv, Dv]. The decay and beta of a head are
[S, W, Nv]. Nv is a multiple of Nk, and a head of q and k serves Nv / Nk heads of v in a row. The state is
[S, Nv, Dk, Dv]. One formula serves a single row, a block and a prompt, so they differ by fp32 rounding alone.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Rows that are solved together, like in the method's own code. The work within a chunk grows with its square."""
L2_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """Return x over the square root of its sum of squares + 1e-6, along the last axis."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


def short_conv(before: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return silu of the causal depthwise convolution of rows [S, W, C], behind the K - 1 rows `before` [S, K - 1, C].

    The weight is [C, K], and its last column meets the row itself.
    """
    num_rows, taps = rows.shape[1], weight.float().t()
    x = torch.cat((before, rows), dim=1).float()
    out = x[:, :num_rows] * taps[0]
    for j in range(1, len(taps)):
        out = torch.addcmul(out, x[:, j : j + num_rows], taps[j])
    return F.silu(out)


def last_rows(before: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the K - 1 rows of C numbers that end with row `counts[s]` - 1 of rows [S, W, C], reaching into `before`.

    `before` [S, K - 1, C] are the rows before them, and counts [S] are 0 to W.
    """
    sequences, places = (torch.arange(size, device=counts.device) for size in before.shape[:2])
    return torch.cat((before, rows), dim=1)[sequences[:, None], (counts[:, None] + places).long()]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Return (outputs [S, W, Nv, Dv], the state behind the last row) in fp32, of l2-normed q and k.

    A row first decays the state by exp(log_decay). It then adds k d^T with d = beta (v - state^T k), and its output is
    state^T q / sqrt(Dk). A row with log_decay 0 and beta 0 leaves the state as it is. Up to `chunk` rows are solved
    together: their d are those of a unit lower triangular system.
    """
    num_rows, num_heads, dim = v.shape[1], v.shape[2], k.shape[3]
    size = min(chunk, num_rows)
    q, k = (l2norm(x.float()).repeat_interleave(num_heads // x.shape[2], dim=2) for x in (q, k))
    q, k, v = (_chunks(x.float(), size) for x in (q * dim**-0.5, k, v))
    beta = _chunks(beta.float()[..., None], size)
    log_decay = _chunks(log_decay.float()[..., None], size)
    since_start = log_decay.cumsum(dim=-2).exp()
    # Decay from row i to row t is exp of a sum over the rows between. Differences of cumulative sums would cancel.
    is_later = torch.ones(size, size, dtype=torch.bool, device=v.device).tril(-1)
    between = torch.where(is_later, log_decay, 0.0).cumsum(dim=-2).exp().tril()
    k_beta = k * beta
    system = (k_beta @ k.mT) * between
    solved = unit_inverse(system) @ torch.cat((v * beta, k_beta * since_start), dim=-1)
    d_alone, d_of_state = solved.split_with_sizes([v.shape[-1], dim], dim=-1)
    seen = (q @ k.mT) * between
    q_of_state, k_at_end = q * since_start, (k * between[..., -1, :, None]).mT
    outputs = []
    for i in range(q.shape[2]):
        d = d_alone[:, :, i] - d_of_state[:, :, i] @ state
        outputs.append(q_of_state[:, :, i] @ state + seen[:, :, i] @ d)
        state = torch.addcmul(k_at_end[:, :, i] @ d, state, since_start[:, :, i, -1:])
    o = torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)
    return o[:, :num_rows], state


def unit_inverse(system: Tensor) -> Tensor:
    """Return the inverse of I + L, where L is `system` [..., n, n] below its diagonal.

    The inverse of two halves gives that of the whole: A^-1 and B^-1 stay, and the corner C between them becomes
    -B^-1 C A^-1. From halves of one row on, all corners of a size are two products, so an NPU's cube does the work. The
    series I - L + L^2 - ... would take as few, and lose all digits where keys are nearly equal.
    """
    eye, *corners = _corners(system.shape[-1], system.device)
    if not corners:
        return eye.expand_as(system)
    lines = system.flatten(0, -3)
    found = eye - lines * corners[0]
    for corner in corners[1:]:
        found = torch.baddbmm(found, found @ (lines * corner), found, alpha=-1)
    return found.view(system.shape)


@cache
def _corners(size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return I, and 1 in the corners between halves of 1, 2, 4, ... rows, each [size, size]."""
    row = torch.arange(size, device=device)
    corners = []
    for half in (1 << i for i in range((size - 1).bit_length())):
        part, pair = row // half, row // (2 * half)
        corners.append(((pair[:, None] == pair) & (part[:, None] > part)).float())
    return torch.eye(size, device=device), *corners


def _chunks(x: Tensor, size: int) -> Tensor:
    """Return [S, W, N, D] as [S, N, chunks, size, D], with zeros behind the last row."""
    x = x.transpose(1, 2)
    if missing := -x.shape[2] % size:
        x = F.pad(x, (0, 0, 0, missing))
    return x.unflatten(2, (-1, size))
