"""A decode step of the demo pair: how long it takes, and how much of that the host takes to launch it."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median, quantiles

from tools.lab.step_timing import Bench, Shape, Split
from tools.report.engine import demo_engine
from tools.report.part import Options, Part, Result

WAYS = {"eager": True, "graphs": False}
"""Way -> `enforce_eager`."""
SEQUENCES = (1, 4, 16)
CONTEXT = 128
REPEATS = 60


def parts(options: Options) -> list[Part]:
    opened = cache(partial(bench, options.device, SEQUENCES[-1]))
    return [
        Part(f"{way}, {n} sequence{'s' * (n > 1)}", partial(measured, opened, way, n, REPEATS))
        for way in WAYS
        for n in SEQUENCES
    ]


def bench(device: str, max_num_seqs: int, way: str) -> Bench:
    engine = demo_engine(
        device,
        "bfloat16",
        enforce_eager=WAYS[way],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16 * max_num_seqs + 512,
        max_model_len=1024,
        kv_cache_memory=256 << 20,
    )
    return Bench(engine)


def measured(opened: Callable[[str], Bench], way: str, n: int, repeats: int) -> Result:
    """Time at least `repeats` steps in which n sequences verify whole blocks."""
    timed, shape, splits = opened(way), Shape(n, CONTEXT, drafts=True), list[Split]()
    timed.steps(shape)
    while len(splits) < repeats:
        splits += timed.steps(shape)
    times = {
        "step": spread([split.total for split in splits]),
        "launch": spread([split.schedule + split.launch for split in splits]),
        "read": spread([split.read for split in splits]),
    }
    return times | {"steps": len(splits), "found": f"{times['step']['median_ms']:.4g} ms"}


def spread(ms: Sequence[float]) -> Result:
    """Return the median and the 90th percentile."""
    return {"median_ms": median(ms), "p90_ms": quantiles(ms, n=10)[-1] if len(ms) > 1 else ms[0]}
