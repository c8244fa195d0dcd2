"""The parts of a Gated DeltaNet layer that an NPU has operators for: the l2norm, and prompts if bfloat16 is enough.

Checked against torch_npu's schemas, meta kernels and host checks on CPU; not run on an Ascend device.
"""

from functools import cache

import torch
import torch_npu
from torch import Tensor

from app.engine.device.delta_rule import L2_EPS, delta_rule
from app.engine.errors import UnsupportedError
from app.engine.npu.rules import DELTA_DIM

TOLERANCE = 0.05
"""Largest error of the chunk operator as a share of the largest value. 70 rows of bfloat16 stay below it."""


def l2norm(x: Tensor) -> Tensor:
    """Return `delta_rule.l2norm` as an RMSNorm."""
    dim = x.shape[-1]
    return torch_npu.npu_rms_norm(x, _weight(dim, x.device), L2_EPS / dim)[0]


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `delta_rule.delta_rule` by one operator. It takes all but the decay in bfloat16, the state too (N40)."""
    num_seqs, num_rows, _, dim = q.shape
    q, k, v, beta = (x.flatten(0, 1).bfloat16().contiguous() for x in (l2norm(q), l2norm(k), v, beta))
    o, state = torch_npu.npu_chunk_gated_delta_rule(
        q,
        k,
        v,
        beta=beta,
        initial_state=state.mT.bfloat16().contiguous(),
        actual_seq_lengths=torch.full((num_seqs,), num_rows, dtype=torch.int32, device=q.device),
        scale=dim**-0.5,
        g=log_decay.flatten(0, 1).contiguous(),
    )
    return o.float().unflatten(0, (num_seqs, num_rows)), state.mT.float()


def check_chunk_operator(device: torch.device) -> None:
    """Raise UnsupportedError if the operator is missing here, or computes something else."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 70, heads, DELTA_DIM, generator=draw) for heads in (2, 2, 4))
    decay, beta = (torch.rand(2, 70, 4, generator=draw) for _ in range(2))
    given = q, k, v, -decay / 8, beta, torch.randn(2, 4, DELTA_DIM, DELTA_DIM, generator=draw)
    try:
        found = [x.cpu() for x in chunk_delta_rule(*(x.to(device) for x in given))]
    except (AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedError(
            f"--npu-chunk-prefill: npu_chunk_gated_delta_rule does not run here: {reason}"
        ) from error
    for x, wanted in zip(found, delta_rule(*given), strict=True):
        off = float((x - wanted).abs().max() / wanted.abs().max())
        if not off < TOLERANCE:
            raise UnsupportedError(
                f"--npu-chunk-prefill: npu_chunk_gated_delta_rule is {off:.2g} of the largest value away from PyTorch"
            )


@cache
def _weight(dim: int, device: torch.device) -> Tensor:
    """Return the weight that makes an RMSNorm an l2norm, made on the device, because an upload would let it wait."""
    return torch.full((dim,), dim**-0.5, device=device)
