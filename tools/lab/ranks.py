"""The host's cost of sending a step to the other ranks of a model: `python -m tools.lab ranks`.

Rank 0 does this before each step that it runs, so its device waits for it. The steps are those of decoding sequences,
and the followers are processes that read what comes. Exits with 1 if 32 sequences certainly cost more than they may.
"""

import argparse
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from app.engine.ranks.leader import Followers
from app.engine.ranks.runner import teller
from app.engine.schedule.batch import Batch, ScheduledSequence
from app.engine.sequence import Sequence as EngineSequence
from app.engine.step.inputs import Layout, StepInputs
from app.messages import Request, SamplingParams
from tools.bench.command import out_folder
from tools.bench.flags import add_out_flag, count, counts
from tools.bench.markdown import Row, Table
from tools.lab.publish import Verdict, publish
from tools.parts import ToolParser

PAGE_SIZE, BLOCK = 16, 16
LIMIT_MS = 0.3
"""Most that a step of LIMIT_BATCH sequences may cost at 2 ranks: 1 % of a 30 ms step of a 32B."""
LIMIT_BATCH = 32
SAMPLED = SamplingParams(0.7, seed=1, top_k=20, top_p=0.9, presence_penalty=0.5)
STEPS = {
    "plain": (1, SamplingParams()),
    "whole blocks": (BLOCK, SamplingParams()),
    "whole blocks, all drawn with filters and penalties": (BLOCK, SAMPLED),
}
MEANING = "Medians of the time in which rank 0 encodes a step and hands it to its sockets. A follower gets the bytes."
READER = (sys.executable, "-m", "tools.lab.rank_reader")


def bench(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = out_folder(options)
    rows: list[Row] = []
    costs: list[float] = []
    steps = [(name, batch) for name in STEPS for batch in options.batches]
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as private:
            followers = Followers("{}\n", size, Path(private), on_end=_fail, command=READER)
            followers.start()
            for name, batch in steps:
                step = step_of(batch, *STEPS[name], options.context)
                milliseconds, num_bytes = cost(step, followers.send, options.steps)
                cell = {"ranks": size, "step": name, "sequences": batch}
                rows.append(cell | {"ms": f"{milliseconds:.3f}", "bytes": num_bytes})
                if (size, batch) == (2, LIMIT_BATCH):
                    costs.append(milliseconds)
            followers.close()
    verdicts = []
    if costs:
        claim = f"sending a step of {LIMIT_BATCH} sequences to 2 ranks costs at most {LIMIT_MS} ms of the host"
        verdicts.append(Verdict(claim, max(costs) <= LIMIT_MS, f"at most {max(costs):.3f} ms"))
    table = Table("ranks", "Sending a step", MEANING, rows)
    about = [f"context {options.context}, pages of {PAGE_SIZE}, {options.steps} steps each"]
    return publish("ranks", arguments, [table], folder, about=about, verdicts=verdicts)


def step_of(num_seqs: int, width: int, sampling: SamplingParams, context: int) -> StepInputs:
    """Return a step in which each sequence decodes behind `context` tokens, and verifies `width` rows."""
    batch = Batch(block_rows=width)
    pages = -(-(context + BLOCK) // PAGE_SIZE)
    for i in range(num_seqs):
        request = Request(str(i), (7,) * context, max_tokens=64, sampling=sampling)
        own = array("i", range(1 + i * pages, 1 + (i + 1) * pages))
        seq = EngineSequence(request, arrival=i, pages=own, batch_slot=i)
        batch.decodes.append(ScheduledSequence(seq, context - 1, width, needs_logits=True, num_drafts=width - 1))
    return Layout(PAGE_SIZE).build(batch)


def cost(step: StepInputs, send: Callable[[bytes], None], num_steps: int) -> tuple[float, int]:
    """Return (median milliseconds of sending a step, its bytes for each follower)."""
    lengths: list[int] = []

    def counted(message: bytes) -> None:
        lengths.append(len(message))
        send(message)

    tell, times = teller(counted), []
    for _ in range(num_steps):
        start = time.perf_counter()
        tell(step)
        times.append(time.perf_counter() - start)
        time.sleep(0.001)  # the step itself, in which followers read
    return 1000 * median(times), lengths[0]


def _fail(reason: str) -> None:
    print(f"error: {reason}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    made = ToolParser(prog="python -m tools.lab ranks", description=__doc__)
    made.add_argument("--sizes", type=counts, default=[2, 8], help="numbers of ranks [2,8]")
    made.add_argument("--batches", type=counts, default=[1, 32, 128], help="numbers of sequences [1,32,128]")
    made.add_argument("--context", type=count, default=2048, help="tokens of each sequence [2048]")
    made.add_argument("--steps", type=count, default=300, help="steps of each kind [300]")
    add_out_flag(made, "ranks.json")
    return made
