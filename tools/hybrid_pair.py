"""Trains the small hybrid pair of the tests: `python -m tools.hybrid_pair`. One CPU core for 40 minutes, no network.

The target is Transformers' own Qwen3.5 with three Gated DeltaNet layers and one of attention. It continues tunes, which
are random notes that repeat. It has to find the place where it stands in a tune.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tools.demo_pair.checkpoint_files import save_draft
from tools.demo_pair.loop import Plan, train
from tools.demo_pair.losses import draft_loss, target_loss
from tools.demo_pair.model import Draft, Shape, Target
from tools.demo_pair.rows import Batch
from tools.parts import ToolParser

CHECKPOINT = Path(__file__).parents[1] / "tests" / "exhaustive" / "hybrid_pair"
SHAPE = Shape(
    vocab=64, hidden=128, layers=4, groups=2, kv_heads=2, head_dim=32, mlp=256, draft_layers=2, taps=(0, 1, 2), block=16
)
MASK_TOKEN_ID = SHAPE.vocab - 1
PERIODS = range(16, 21)
"""Notes until a tune repeats, of the target's training. None stands twice among them."""
PERIOD = 20
"""Notes of the draft's tunes. A draft for all periods has to count them, which takes it hours to learn."""
ROWS, LENGTH = 20, 128


def tune(rng: Random, period: int, length: int) -> list[int]:
    """Return the first `length` notes of a tune."""
    notes = rng.sample(range(MASK_TOKEN_ID), period)
    return [notes[i % period] for i in range(length)]


def batches(seed: str, periods: Sequence[int]) -> Iterator[Batch]:
    """Yield endless batches of tunes, whose notes are known from the second time on."""
    rng = Random(seed)
    supervised = (torch.arange(LENGTH) >= PERIODS[-1]).expand(ROWS, -1)
    while True:
        yield Batch(torch.tensor([tune(rng, rng.choice(periods), LENGTH) for _ in range(ROWS)]), supervised)


class HybridTarget(Target):
    """Transformers' model with the interface of the demo pair's target."""

    def __init__(self, shape: Shape, causal: Qwen3_5ForCausalLM) -> None:
        nn.Module.__init__(self)
        self.shape = shape
        self.causal = causal
        self.model = causal.model

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert positions is None, "tunes have no gaps"
        found = self.model(ids, output_hidden_states=True, use_cache=False).hidden_states
        return found[-1], torch.cat([found[tap + 1] for tap in self.shape.taps], -1)


def make_target(shape: Shape) -> Qwen3_5ForCausalLM:
    """Return an untrained target, whose layers are three Gated DeltaNet ones and one of attention."""
    config = Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.kv_heads * shape.groups,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return Qwen3_5ForCausalLM(config)


def main() -> None:
    parser = ToolParser(prog="python -m tools.hybrid_pair", description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path("build/hybrid-pair"), help="checkpoints to resume from")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder that gets target/ and draft/")
    parser.add_argument("--target-steps", type=int, default=600)
    parser.add_argument("--draft-steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    causal = make_target(SHAPE)
    target = HybridTarget(SHAPE, causal)
    state = options.work_dir / "target.pt"
    plan = Plan(options.target_steps)
    minutes = train(
        "target", target, lambda b: target_loss(target, b), lambda step: batches(f"target {step}", PERIODS), plan, state
    )
    causal.bfloat16().save_pretrained(options.out / "target")
    causal.float().requires_grad_(False).eval()
    draft = Draft(SHAPE)
    draft.norm.weight.data += causal.model.norm.weight  # the head is the target's: begin at its scale
    generator = torch.Generator().manual_seed(0)
    minutes += train(
        "draft",
        draft,
        lambda b: draft_loss(target, draft, b, MASK_TOKEN_ID, generator),
        lambda step: batches(f"draft {step}", [PERIOD]),
        Plan(options.draft_steps),
        options.work_dir / "draft.pt",
    )
    save_draft(draft, MASK_TOKEN_ID, options.out / "draft")
    print(f"trained in {minutes:.0f} minutes -> {options.out}")


if __name__ == "__main__":
    main()
