"""What only hardware shows of products in 8 bits and of experts: graphs of them, a row's bits in a batch, and NaN."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from app.check.operators import FORMATS, experts
from app.engine.device.base import Backend
from app.engine.device.comparison import Inputs
from app.engine.device.factory import make_backend
from app.engine.device.moe import MoeConfig
from tools.report.part import Options, Part, Result
from tools.report.timing import graph_apart

Operator = Callable[[Tensor], Tensor]
E4M3_NAN = 0x7F
MANY_EXPERTS = MoeConfig(256, 8, intermediate_size=128, norm_topk_prob=True)


@dataclass(frozen=True, slots=True)
class HazardSizes:
    """A product [width, hidden], and experts. `rows` are replayed, the last of them many of each expert. In `few` rows
    each has its own bits, and with `--batch-invariant` in `many` too."""

    hidden: int = 1024
    width: int = 5120
    experts: MoeConfig = MANY_EXPERTS
    rows: tuple[int, ...] = (16, 64, 1024)
    few: tuple[int, ...] = (2, 16, 17, 32)
    many: tuple[int, ...] = (64, 128, 512)


def parts(options: Options, sizes: HazardSizes) -> list[Part]:
    opened = cache(partial(make_backend, options.device))
    fixed = cache(partial(make_backend, options.device, batch_invariant=True))
    counts = (*sizes.few, *sizes.many)
    made: list[tuple[str, Callable[[], Result]]] = []
    for name in ("", *FORMATS):
        label = name or "16 bits"
        made.append((f"product in {label}, replayed", partial(replayed, product, opened, sizes, name)))
        made.append((f"experts in {label}, replayed", partial(replayed, mixture, opened, sizes, name)))
    for name in FORMATS:
        made.append((f"rows alone in {name}", partial(alone, opened, sizes, name, sizes.few)))
        made.append((f"rows alone in {name}, --batch-invariant", partial(alone, fixed, sizes, name, counts)))
    made.append(("NaN in a weight in e4m3", partial(nan_in_weight, opened, sizes)))
    for name in FORMATS:
        made.append((f"NaN in rows for {name}", partial(nan_in_rows, opened, sizes, name)))
    return [Part(name, run) for name, run in made]


def product(at: Inputs, sizes: HazardSizes, name: str) -> Operator:
    """Return the product by a random weight, in the format `name` or in 16 bits for ""."""
    values = at.normal(sizes.width, sizes.hidden, scale=sizes.hidden**-0.5)
    weight = at.backend.pack_linear(FORMATS[name].of(values) if name else values)
    return lambda x: at.backend.linear(x, weight)


def mixture(at: Inputs, sizes: HazardSizes, name: str) -> Operator:
    weights = experts(at, sizes.hidden, sizes.experts, name)
    return lambda x: at.backend.moe(x, weights, sizes.experts)


@torch.inference_mode()
def replayed(
    make: Callable[[Inputs, HazardSizes, str], Operator], opened: Callable[[], Backend], sizes: HazardSizes, name: str
) -> Result:
    """Compare graphs with eager code, on rows that came after the capture, bit by bit."""
    at = inputs(opened())
    run, cases = make(at, sizes, name), []
    for count in sizes.rows:
        x = at.normal(count, sizes.hidden)
        graph = graph_apart(at.backend, partial(one, run, x))
        x.copy_(at.normal(count, sizes.hidden))
        graph.replay()
        cases.append({"rows": count, "passed": same(graph.outputs[0], run(x))})
    return found(cases)


@torch.inference_mode()
def alone(opened: Callable[[], Backend], sizes: HazardSizes, name: str, counts: Sequence[int]) -> Result:
    """Compare the first and the last row of products of several rows with the product of that row, bit by bit."""
    at = inputs(opened())
    run, x, cases = product(at, sizes, name), at.normal(max(counts), sizes.hidden), []
    for count in counts:
        out = run(x[:count])
        rows = [same(out[row : row + 1], run(x[row : row + 1])) for row in (0, count - 1)]
        cases.append({"rows": count, "passed": all(rows)})
    return found(cases)


@torch.inference_mode()
def nan_in_weight(opened: Callable[[], Backend], sizes: HazardSizes) -> Result:
    """Multiply by a weight with one NaN, which must show in its column of the result and in no other."""
    at, cases = inputs(opened()), list[Result]()
    weight = FORMATS["e4m3"].of(at.normal(sizes.width, sizes.hidden, scale=sizes.hidden**-0.5))
    weight.data.view(torch.uint8)[3, 5] = E4M3_NAN
    packed = at.backend.pack_linear(weight)
    for count in sizes.rows:
        is_finite = at.backend.linear(at.normal(count, sizes.hidden), packed).isfinite()
        passed = bool(is_finite.sum() == count * (sizes.width - 1)) and not is_finite[:, 3].any()
        cases.append({"rows": count, "passed": passed})
    return found(cases)


@torch.inference_mode()
def nan_in_rows(opened: Callable[[], Backend], sizes: HazardSizes, name: str) -> Result:
    """Multiply rows of which one has NaN: all of its results must be lost, and no other row's."""
    at, cases = inputs(opened()), list[Result]()
    run = product(at, sizes, name)
    for count in sizes.rows:
        x = at.normal(count, sizes.hidden)
        x[count // 2, 7] = torch.nan
        is_finite = run(x).isfinite()
        passed = bool(is_finite.sum() == (count - 1) * sizes.width) and not is_finite[count // 2].any()
        cases.append({"rows": count, "passed": passed})
    return found(cases)


def one(run: Operator, x: Tensor) -> tuple[Tensor]:
    return (run(x),)


def inputs(backend: Backend) -> Inputs:
    return Inputs(backend, torch.bfloat16, torch.bfloat16)


def same(one: Tensor, other: Tensor) -> bool:
    return bool(one.isfinite().all()) and one.equal(other)


def found(cases: list[Result]) -> Result:
    return {"cases": cases, "passed": all(case["passed"] for case in cases)}
