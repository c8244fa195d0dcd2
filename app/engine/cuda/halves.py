"""RMSNorm and RoPE of lines in two halves, in Triton. A line is one head of a row."""

import triton
import triton.language as tl


@triton.jit
def norm_of_halves(a, b, weight_a, weight_b, eps, HALF: tl.constexpr):
    """Return both halves of each line after RMSNorm over the line, in fp32."""
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    return a * scale * weight_a.to(tl.float32), b * scale * weight_b.to(tl.float32)


@triton.jit
def rope_of_halves(a, b, cos, sin):
    """Return both halves of each line after RoPE, in fp32."""
    cos32, sin32 = cos.to(tl.float32), sin.to(tl.float32)
    return a * cos32 - b * sin32, b * cos32 + a * sin32
