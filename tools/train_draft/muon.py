"""Muon for matrices (momentum, then the nearest orthogonal matrix), AdamW for everything else.

Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Return nearly the nearest semi-orthogonal matrices to `update` `[M, R, C]`, by quintic Newton-Schulz."""
    x = update
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Optimizer that stacks matrices of the same shape and steps them together."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [p.grad for p in parameters if p.grad is not None]
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(gradients, buffers, group["momentum"])
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_(parameters, list(orthogonal(torch.stack(nesterov)).unbind()), alpha=-scale)


def optimizers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of `model` and AdamW for its tables of tokens and norms."""
    named = list(model.named_parameters())
    tables = ("embed_tokens", "codebook", "markov_w")
    matrices = [p for name, p in named if p.ndim == 2 and not any(table in name for table in tables)]
    rest = [p for name, p in named if p.ndim != 2 or any(table in name for table in tables)]
    return [Muon(matrices, muon_lr), torch.optim.AdamW(rest, adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
