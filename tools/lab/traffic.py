"""Tokens a second of traffic that refills, by bytes, operations and the host's time: `python -m tools.lab traffic`.

32 requests of GSM8K's lengths are answered at once by Qwen3-8B and its draft with `--verify auto`, and the next comes
when one has ended. The step of an H200 is measured (docs/results/h200/speeds.md). Of an Ascend910B3 nothing is: its
step is the floor at the share of the floor that the H200 reaches, and the host takes as long.
"""

import argparse
import math
from collections.abc import Sequence
from functools import cache

from app.engine.checkpoint.draft import draft_config
from app.engine.checkpoint.families import target_config
from tools.bench.command import out_folder
from tools.bench.flags import add_out_flag
from tools.bench.markdown import Row, Table
from tools.lab import floors
from tools.lab.publish import publish
from tools.lab.random_weights import pair_of
from tools.parts import ToolParser
from tools.report.roofline import CHIPS, H200, Chip

SEQS, WIDTH, ACCEPTANCE = 32, 6, 4.92
STEP_MS, HOST_MS = 10.99, 2.48
"""A step of `auto` at 32 on an H200, with overlap, and the host's part of it."""
PROMPT_MS, STEPS_OF_AN_ANSWER = 3.0, 65
CONTEXT = 512
MEANING = "Tokens a second, without overlap of any step, and at the floor of memory and multipliers."
DRAW_PASSES, DRAW_LAUNCHES, LAUNCH_MS = 7, 92, 1e-3
"""Reads and writes of all fp32 logits in a draw with a top-k, and its launches (docs/cuda.md)."""


@cache
def floor_ms(chip: Chip) -> float:
    """Return the least milliseconds of a step whose blocks and rows are WIDTH wide."""
    target, draft = pair_of("qwen3-8b")
    decoder = target_config(target)
    drafter = draft_config(draft, decoder)
    rows = SEQS * WIDTH
    parts = [
        floors.forward(drafter.decoder, rows, SEQS, CONTEXT, logits=rows - SEQS),
        floors.forward(decoder, rows, SEQS, CONTEXT, logits=rows),
        floors.context_kv(drafter, rows),
    ]
    return 1e3 * sum(chip.seconds(part.read, part.operations) for part in parts)


def speed(chip: Chip, *, sampled: bool, overlaps: bool, is_floor: bool = False) -> float:
    """Return tokens a second. Without overlap the host's time comes on top of each step, and with it of mixed ones."""
    prompts = SEQS / STEPS_OF_AN_ANSWER
    mixed = 1 - math.exp(-prompts)
    slower = floor_ms(chip) / floor_ms(H200)
    ms = floor_ms(chip) if is_floor else STEP_MS * slower
    ms += prompts * PROMPT_MS * slower * (floor_ms(H200) / STEP_MS if is_floor else 1)
    if not is_floor:
        ms += HOST_MS * (mixed if overlaps else 1)
    if sampled:
        logits = 4 * SEQS * WIDTH * target_config(pair_of("qwen3-8b")[0]).vocab_size
        passes = 1 if is_floor else DRAW_PASSES
        ms += 1e3 * passes * logits / chip.bandwidth + (0 if is_floor else DRAW_LAUNCHES * LAUNCH_MS)
    return 1e3 * (SEQS * ACCEPTANCE + prompts) / ms


def rows() -> list[Row]:
    found: list[Row] = []
    for name, chip, overlaps in (("H200", H200, True), ("Ascend910B3", CHIPS["Ascend910B3"], False)):
        for kind, sampled in (("greedy", False), ("sampled", True)):
            ways = {
                "tok/s": speed(chip, sampled=sampled, overlaps=overlaps),
                "without overlap": speed(chip, sampled=sampled, overlaps=False),
                "floor": speed(chip, sampled=sampled, overlaps=overlaps, is_floor=True),
            }
            found.append({"device": name, "requests": kind} | {way: f"{value:,.0f}" for way, value in ways.items()})
    return found


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    return publish("traffic", arguments, [Table("traffic", "Traffic that refills", MEANING, rows())], folder)


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.lab traffic", description=__doc__)
    add_out_flag(made, "traffic.json")
    return made
