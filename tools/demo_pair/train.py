"""Makes the demo pair again from nothing: `python -m tools.demo_pair.train`. Two CPU cores, no network.

With `--device cuda --producers 6 --tokens 16384` a GPU trains it in minutes.
With `torchrun --nproc-per-node 2 -m tools.demo_pair.train --threads 1` two processes share the work.
With `--start-from FOLDER` the weights and the tokenizer of another pair are trained on, at lower learning rates.

Stages: tokenizer, target, draft, report. Each leaves its result in `--work-dir` and is skipped when it is there, so an
interrupted run goes on where it stopped.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # read once, when torch loads: spinning threads starve on a shared machine

import torch
import torch.distributed as dist
from rich.console import Console
from tokenizers import Tokenizer
from torch import nn

from tools.demo_pair.checkpoint_files import CHECKPOINT, is_new, load_draft, load_target, save_draft, save_target
from tools.demo_pair.circuits import start_with_copying
from tools.demo_pair.loop import Plan, beside, train, wait_for_workers, worker
from tools.demo_pair.losses import draft_loss, target_loss
from tools.demo_pair.model import Draft, Shape, Target
from tools.demo_pair.report import write_report
from tools.demo_pair.rows import DRAFT_WEIGHTS, TARGET_WEIGHTS, Batch, batches
from tools.demo_pair.tokenizer import MASK, train_tokenizer
from tools.parts import ToolParser


def main() -> None:
    options = _options()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    console = Console()
    tokenizer = _tokenizer(options)
    if options.stage in ("all", "target"):
        minutes = _train_target(options, tokenizer)
        console.print(f"target trained in {minutes:.1f} minutes -> {options.out / 'target'}")
    if options.stage in ("all", "draft"):
        minutes = _train_draft(options, tokenizer)
        console.print(f"draft trained in {minutes:.1f} minutes -> {options.out / 'draft'}")
    if options.stage == "all" and worker() == 0:
        write_report(options.out)


def _options() -> argparse.Namespace:
    parser = ToolParser(prog="python -m tools.demo_pair.train", description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo"), help="checkpoints to resume from")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder that gets target/ and draft/")
    parser.add_argument("--stage", choices=("all", "target", "draft"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target-steps", type=int, default=5600)
    parser.add_argument("--draft-steps", type=int, default=4300)
    parser.add_argument("--drills", type=int, default=100, help="steps with repetition drills, in which copying forms")
    parser.add_argument("--start-from", type=Path, help="folder with target/ and draft/ whose training goes on")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens a step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--producers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--head", choices=("dflash", "dflash2", "dspark"), default="dflash", help="kind of draft")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end each stage after this time")
    return parser.parse_args()


def _plan(options: argparse.Namespace, steps: int) -> Plan:
    """Return the schedule. Weights that were trained before need smaller steps, which fall from the beginning on."""
    seconds = 60 * options.minutes
    if options.start_from:
        return Plan(steps, seconds, muon_lr=0.01, adam_lr=2e-3, warm_up=20, decay=1.0)
    return Plan(steps, seconds)


def _tokenizer(options: argparse.Namespace) -> Tokenizer:
    if options.start_from:
        return Tokenizer.from_file(str(options.start_from / "target" / "tokenizer.json"))
    path = options.work_dir / "tokenizer.json"
    if not path.exists():
        train_tokenizer(seed=options.seed).save(str(path))
    return Tokenizer.from_file(str(path))


def _batches(
    options: argparse.Namespace, tokenizer: Tokenizer, seed: str, weights: Mapping[str, float], step: int
) -> Iterator[Batch]:
    def of_producer(producer: int) -> Iterator[Batch]:
        stream = worker() * max(options.producers, 1) + producer
        return batches(tokenizer, seed, options.tokens, weights, options.drills - step, stream)

    return beside(of_producer, options.producers)


def _compile(options: argparse.Namespace, layers: Iterable[nn.Module]) -> None:
    """Compile layers for a CPU, where it pays. On a GPU the compiler takes longer than the training."""
    for layer in layers if options.device == "cpu" else ():
        layer.compile(dynamic=False)


def _train_target(options: argparse.Namespace, tokenizer: Tokenizer) -> float:
    if options.start_from:
        target = load_target(options.start_from).requires_grad_(True).train()
    else:
        target = Target(Shape())
        start_with_copying(target)
    target.to(options.device)
    _compile(options, target.model.layers)

    def batches_from(step: int) -> Iterator[Batch]:
        return _batches(options, tokenizer, f"target/{options.seed}/{step}", TARGET_WEIGHTS, step)

    plan = _plan(options, options.target_steps)
    minutes = train(
        "target", target, lambda b: target_loss(target, b), batches_from, plan, options.work_dir / "target.pt"
    )
    if worker() == 0:
        save_target(target, tokenizer, options.out / "target")
    wait_for_workers()
    return minutes


def _train_draft(options: argparse.Namespace, tokenizer: Tokenizer) -> float:
    target = load_target(options.out if (options.out / "target").exists() else CHECKPOINT).to(options.device)
    if options.start_from:
        draft = load_draft(options.start_from, options.head).train()
        for name, parameter in draft.named_parameters():  # beside a new head, what was trained before stays as it is
            parameter.requires_grad_(options.head == "dflash" or is_new(name))
    else:
        draft = Draft(Shape(head=options.head))
        draft.norm.load_state_dict(target.model.norm.state_dict())  # the head is the target's: begin at its scale
    draft.to(options.device)
    _compile(options, (*target.model.layers, *draft.layers))
    generator = torch.Generator(options.device).manual_seed(options.seed)
    mask_id = tokenizer.token_to_id(MASK)

    def batches_from(step: int) -> Iterator[Batch]:
        return _batches(options, tokenizer, f"draft/{options.seed}/{step}", DRAFT_WEIGHTS, step)

    plan = _plan(options, options.draft_steps)
    minutes = train(
        "draft",
        draft,
        lambda b: draft_loss(target, draft, b, mask_id, generator),
        batches_from,
        plan,
        options.work_dir / "draft.pt",
    )
    if worker() == 0:
        save_draft(draft, mask_id, options.out / "draft")
    return minutes


if __name__ == "__main__":
    main()
