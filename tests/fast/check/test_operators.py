"""The conformance suite of devices: the CPU's operators pass it, and no operator that does something else does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.check import operators, probes
from app.engine.cpu import linear
from app.engine.cpu.backend import CpuBackend
from app.engine.device.base import AttentionMask, AttentionMetadata, LayerKv, Rotation
from app.engine.device.moe import ExpertWeights, MoeConfig
from app.engine.device.recurrent import GatedDeltaPrompts, GatedDeltaStep
from app.engine.device.torch import TorchBackend
from tools.report.operators import BF16, about_pages

CPU = torch.device("cpu")
SIZES = operators.Extent(
    heads=((4, 2, 16), (3, 1, 64)),
    **about_pages((1, 3, 16), (15, 16, 17, 33), (130,), 40),
    page=16,
    hidden=48,
    intermediate=70,
    experts=MoeConfig(8, 2, intermediate_size=32, norm_topk_prob=True),
    num_rows=(1, 5, 33),
    layers=2,
    recurrent=(2, 4, 16),
    batches=(1, 3),
)


INT8 = 0.02
"""Error of a product of rows that are rounded to int8."""


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2 * BF16)], ids=str)
@pytest.mark.parametrize("backend", [TorchBackend(CPU), CpuBackend(CPU)], ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("name", probes.OPERATORS)
def test_an_operator_of_the_cpu_conforms(
    backend: TorchBackend, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    backend.defaults = replace(backend.defaults, dtype=dtype)
    for case in operators.cases(replace(SIZES, tolerance=tolerance))[name]:
        past = float("nan") if isinstance(backend, CpuBackend) else None  # PyTorch's attention reads what it masks
        relative = operators.difference(backend, case.operator, past=past)[1]
        in_int8 = isinstance(backend, CpuBackend) and case.shape.endswith("int8")  # which rounds the rows, too
        assert relative <= (max(tolerance, INT8 * in_int8) if case.tolerance else 0.0), case.shape


def test_experts_conform_where_gpp_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing multiplies by int8, and its numbers are widened."""
    monkeypatch.setattr(linear, "compiled", lambda dtype: None)
    backend = CpuBackend(CPU)
    backend.defaults = replace(backend.defaults, dtype=torch.float32)
    for case in operators.cases(replace(SIZES, tolerance=1e-5))["moe"]:
        assert operators.difference(backend, case.operator)[1] <= 1e-5, case.shape


def test_every_operator_that_is_listed_is_compared() -> None:
    assert set(probes.OPERATORS) == set(operators.cases(operators.SMALL))


class Wrong(TorchBackend):
    """Mistakes that a kernel or a call could make, one an operator."""

    def plan_attention(self, meta: AttentionMetadata, mask: AttentionMask, group: int) -> Any:
        wrong = AttentionMask(causal=not mask.causal, window=mask.window)
        return super().plan_attention(meta, wrong, group)

    def write_kv(self, k_thd: Tensor, v_thd: Tensor, kv: LayerKv, slot_mapping: Tensor) -> None:
        super().write_kv(k_thd, v_thd, kv, slot_mapping.roll(1))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, 1.0)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _ = super().add_rms_norm(x, residual, weight, eps)
        return normed, x

    def rope(self, x_thd: Tensor, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        return super().rope(x_thd, (cos, -sin))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias).roll(1)

    def gated_mlp(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return super().gated_mlp(x, gate_up, down) * float("nan")

    def moe(self, x: Tensor, weights: ExpertWeights, config: MoeConfig) -> Tensor:
        return super().moe(x, weights, replace(config, norm_topk_prob=False))

    def commit_and_verify(self, step: GatedDeltaStep) -> Tensor:
        return super().commit_and_verify(step._replace(starts=(step.starts - 1).clamp(min=0)))

    def commit_prompts(self, step: GatedDeltaPrompts) -> Tensor:
        return super().commit_prompts(step._replace(split_slots=step.next_slots))

    def embed_blocks(self, anchors: Tensor, mask_token_id: int, block_size: int, embedding: Tensor) -> Tensor:
        return super().embed_blocks(anchors, mask_token_id - 1, block_size, embedding)

    def positions_and_slots(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        positions, slots = super().positions_and_slots(*inputs)
        return positions, slots + 1

    def verify(self, *inputs: Any) -> Tensor:
        return super().verify(*inputs).clamp(max=1)

    def advance_by_accepted(self, *inputs: Any) -> None:
        super().advance_by_accepted(*inputs)
        inputs[-1].add_(1)


@pytest.mark.parametrize("name", probes.OPERATORS)
def test_an_operator_that_does_something_else_has_failed(name: str) -> None:
    found = operators.find(Wrong(CPU), name)
    assert found.status == "failed" and found.hint.startswith("do not serve on it")
    assert ("not all numbers" if name == "gated_mlp" else "differs from the CPU") in found.found
