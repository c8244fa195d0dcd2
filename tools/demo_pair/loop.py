"""The training loop of target and draft: learning rates, workers, checkpoints to resume from, a progress bar."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from tools.demo_pair.losses import Batch
from tools.demo_pair.muon import optimizers


@dataclass(frozen=True)
class Plan:
    """Learning rates rise over `warm_up` steps, hold, and fall to zero over the last `decay` of all steps.

    Training ends after `steps` steps, or after `seconds` if that is earlier. Then the rates follow the clock.
    """

    steps: int
    seconds: float = float("inf")
    muon_lr: float = 0.015
    adam_lr: float = 3e-3
    warm_up: int = 60
    decay: float = 0.5
    clip: float = 1.0
    save_every_s: float = 120.0
    log_every: int = 50

    def factor(self, step: int, spent: float) -> float:
        left = 1 - max(step / self.steps, spent / self.seconds)
        return min(1.0, (step + 1) / self.warm_up, max(left / self.decay, 0.01))


def train(
    title: str,
    model: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    batches_from: Callable[[int], Iterator[Batch]],
    plan: Plan,
    state: Path,
) -> float:
    """Train `model` in place until `plan.steps`; continue from `state` when it exists. Returns minutes spent, all
    runs together.

    `batches_from(step)` gives the batches from a step on, so that a resumed run never repeats the ones it has seen.
    """
    optimisers = optimizers(model, plan.muon_lr, plan.adam_lr)
    first, spent = _resume(model, optimisers, state)
    device = next(model.parameters()).device
    rates = [[group["initial_lr"] for group in o.param_groups] for o in optimisers]
    batches = batches_from(first)
    started = saved = time.monotonic()
    mean, tokens = torch.zeros((), device=device), 0
    with _progress() as progress:
        task = progress.add_task(title, total=plan.steps, completed=first, loss="")
        for step in range(first, plan.steps):
            elapsed = _agreed(spent + time.monotonic() - started)
            if elapsed > plan.seconds:
                break
            for optimiser, initial in zip(optimisers, rates, strict=True):
                for group, rate in zip(optimiser.param_groups, initial, strict=True):
                    group["lr"] = rate * plan.factor(step, elapsed)
            batch = next(batches).to(device)
            loss = loss_of(batch)
            loss.backward()
            _average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            mean = loss.detach().lerp(mean, 0.0 if step == first else 0.98)
            tokens += batch.ids.numel()
            now = time.monotonic()
            if (step + 1) % plan.log_every == 0:
                speed = f"loss {mean.item():.4f}  {tokens / (now - started):,.0f} tok/s"
                progress.update(task, completed=step + 1, loss=speed)
                progress.console.print(f"{title} step {step + 1}/{plan.steps} {speed}")
            if now - saved > plan.save_every_s:
                saved = now
                _save(model, optimisers, state, step + 1, spent + now - started)
    spent += time.monotonic() - started
    _save(model, optimisers, state, plan.steps, spent)
    return spent / 60


def num_workers() -> int:
    """Return the number of processes that train together, as torchrun starts them."""
    return dist.get_world_size() if dist.is_initialized() else 1


def worker() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agreed(seconds: float) -> float:
    """Return the seconds of worker 0, so that all have the same rates and end together."""
    if num_workers() > 1:
        dist.broadcast(first := torch.tensor(seconds, dtype=torch.float64), 0)
        seconds = float(first)
    return seconds


def _average_gradients(model: nn.Module) -> None:
    if num_workers() > 1:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / num_workers(), gradients)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


def _save(model: nn.Module, optimisers: list[torch.optim.Optimizer], state: Path, step: int, spent: float) -> None:
    if worker() > 0:
        return
    state.parent.mkdir(parents=True, exist_ok=True)
    partial = state.with_suffix(".partial")
    torch.save(
        {"model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers], "step": step, "spent": spent},
        partial,
    )
    partial.replace(state)


def _resume(model: nn.Module, optimisers: list[torch.optim.Optimizer], state: Path) -> tuple[int, float]:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    if not state.exists():
        return 0, 0.0
    saved = torch.load(state, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimiser, values in zip(optimisers, saved["optimisers"], strict=True):
        optimiser.load_state_dict(values)
    return saved["step"], saved["spent"]
