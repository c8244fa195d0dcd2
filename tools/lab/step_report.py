"""Costs of decode steps as tables, and whether they grow as they should, as far as so many rounds can tell."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, Literal

from app.bench.paired import Ratio, ratio
from app.bench.report import Table
from tools.lab.step_timing import Measured, Shape, Split
from tools.lab.verdict import Verdict

LINEAR_ALLOWANCE = 0.2
"""How much more than in proportion a cost may be: noise, and sizes that suit a device less than others."""
HOST_ALLOWANCE = 0.25
HOST_ALLOWANCE_MS = 0.02
"""The host part may differ by this share, or by so many milliseconds, before it counts as growing."""
_FROM_GOOD_TO_BAD = (True, None, False)
"""What a claim can come to."""

Found = Mapping[Shape, Measured]
Axis = Literal["batch", "context"]


@dataclass(frozen=True, slots=True)
class Series:
    """Shapes of which only the number of sequences grows, or only their context."""

    axis: Axis
    shapes: Sequence[Shape]

    @property
    def drafts(self) -> bool:
        return self.shapes[0].drafts

    @property
    def kind(self) -> str:
        return "whole block" if self.drafts else "plain"

    @property
    def held(self) -> str:
        """What does not grow."""
        first = self.shapes[0]
        if self.axis == "batch":
            return f"context {first.context}"
        return "1 sequence" if first.batch == 1 else f"{first.batch} sequences"

    def size(self, shape: Shape) -> int:
        return shape.batch if self.axis == "batch" else shape.context

    def __str__(self) -> str:
        return f"{self.kind} step against {self.axis} at {self.held}"


def series(
    batches: Sequence[int], context: int, contexts: Sequence[int], context_batches: Sequence[int], drafts: bool
) -> list[Series]:
    """Plain steps and, with a draft, whole blocks: against batch at one context, against context at some batches."""
    kinds = (False, True) if drafts else (False,)
    found = [Series("batch", [Shape(batch, context, kind) for batch in batches]) for kind in kinds]
    for batch in context_batches:
        found += [Series("context", [Shape(batch, length, kind) for length in contexts]) for kind in kinds]
    return [some for some in found if some.shapes]


def groups(all_series: Sequence[Series]) -> dict[tuple[Axis, str], list[Series]]:
    """By axis and what it is held at."""
    found: dict[tuple[Axis, str], list[Series]] = {}
    for some in all_series:
        found.setdefault((some.axis, some.held), []).append(some)
    return found


def tables(
    all_series: Sequence[Series], found: Found, *, is_asynchronous: bool, acceptance_length: float | None
) -> list[Table]:
    """A table for each of `groups`, plain steps before whole blocks.

    `acceptance_length` says how many tokens a sequence gets out of a whole block, None if that is not known.
    """
    made = []
    for (axis, held), group in groups(all_series).items():
        rows = [row for some in group for row in _rows(some, found, is_asynchronous, acceptance_length)]
        name = f"{axis}-{held.replace(' ', '-')}"
        made.append(Table(name, f"Cost against {axis}, {held}", _meaning(axis, is_asynchronous), rows))
    return made


def _meaning(axis: Axis, is_asynchronous: bool) -> str:
    more = "sequence" if axis == "batch" else "1000 tokens of context, each sequence,"
    computed = (
        "`dispatch` is launching until the device has all work, `wait` until its result is read; `device` is a step of "
        "several that are queued, which the device never waits for, or dispatch where that is more."
        if is_asynchronous
        else "On a CPU the operators are computed as they are launched: `compute` is both, and cannot be told apart. "
        "Its floor is `products`, the step's matrix products with weights alone, run again one after the other; "
        "attention's are not among them."
    )
    return (
        f"Milliseconds. `+` is what each {more} costs beyond the row before. `build` makes the step's arrays. "
        f"{computed} `operators` are what a step asks the device for; a function that `--compile` made is none. "
        "`tok/s` is of all sequences together, of whole blocks where the acceptance length is known."
    )


def _rows(
    some: Series, found: Found, is_asynchronous: bool, acceptance_length: float | None
) -> Iterator[dict[str, Any]]:
    length = acceptance_length if some.drafts else 1.0
    computed, read = ("dispatch", "wait") if is_asynchronous else ("compute", "read")
    before: Shape | None = None
    for shape in some.shapes:
        measured = found[shape]
        yield {
            "step": some.kind,
            some.axis: some.size(shape),
            "ms": _ms(measured.ms),
            "+": _ms(_added(some, before, shape, found)) if before else "",
            "schedule": _ms(measured.middle(lambda split: split.schedule)),
            "build": _ms(measured.middle(lambda split: split.build)),
            computed: _ms(measured.middle(lambda split: split.launch - split.build)),
            **({} if is_asynchronous else {"products": _ms(median(measured.products))}),
            read: _ms(measured.middle(lambda split: split.read)),
            **({"device": _ms(median(measured.queued))} if is_asynchronous else {}),
            "commit": _ms(measured.middle(lambda split: split.commit)),
            "operators": measured.operators,
            "tok/s": f"{1000 * shape.batch * length / measured.ms:.0f}" if length else "",
        }
        before = shape


def _added(some: Series, before: Shape, shape: Shape, found: Found) -> float:
    """Milliseconds for each sequence more, or for each 1000 tokens of context more of every sequence."""
    more = found[shape].ms - found[before].ms
    if some.axis == "batch":
        return more / (shape.batch - before.batch)
    return 1000 * more / (shape.context - before.context) / shape.batch


def _ms(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def verdicts(all_series: Sequence[Series], found: Found) -> list[Verdict]:
    """Of series that have two sizes at least."""
    made = [linear(some, found) for some in all_series if len(some.shapes) > 1]
    return made + [flat_host(some, found) for some in all_series if some.axis == "context" and len(some.shapes) > 1]


def linear(some: Series, found: Found) -> Verdict:
    """Whether no size costs more than the smaller ones do in proportion, every pair of sizes looked at."""

    def judged(small: Shape, large: Shape) -> tuple[int, float, str]:
        grown = _grown(small, large, found, lambda measured: measured.totals)
        times = some.size(large) / some.size(small)
        holds = grown.at_most(times * (1 + LINEAR_ALLOWANCE))
        text = f"at worst {grown} x from {some.size(small)} to {some.size(large)}, in proportion {times:.3g} x"
        return _FROM_GOOD_TO_BAD.index(holds), grown.middle / times, text

    worst, _, text = max(judged(small, large) for small, large in combinations(some.shapes, 2))
    claim = f"{some}: grows no faster than linearly, {_percent(LINEAR_ALLOWANCE)} allowed for noise"
    return Verdict(claim, _FROM_GOOD_TO_BAD[worst], text)


def flat_host(some: Series, found: Found) -> Verdict:
    """Whether schedule, build and commit take as long at the longest context as at the shortest, by themselves."""
    small, large = some.shapes[0], some.shapes[-1]
    grown = _grown(small, large, found, lambda measured: measured.hosts)
    shorter, longer = median(found[small].hosts), median(found[large].hosts)
    claim = (
        f"{some}: the host part, run by itself, does not grow, {_percent(HOST_ALLOWANCE)} or "
        f"{1000 * HOST_ALLOWANCE_MS:.0f} us allowed for noise"
    )
    text = f"{grown} x from {small.context} to {large.context}, {1000 * shorter:.0f} to {1000 * longer:.0f} us"
    return Verdict(claim, grown.at_most(1 + max(HOST_ALLOWANCE, HOST_ALLOWANCE_MS / shorter)), text)


def _grown(small: Shape, large: Shape, found: Found, costs: Callable[[Measured], list[float]]) -> Ratio:
    """How many times as much the larger costs, by the rounds that ran both."""
    return ratio(costs(found[large]), costs(found[small]))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def as_json(found: Found) -> list[dict[str, Any]]:
    """Every shape with the milliseconds of every round."""
    return [
        {"batch": shape.batch, "context": shape.context, "drafts": shape.drafts}
        | {"operators": measured.operators, "copies": measured.copies}
        | {part: [round(getattr(split, part), 4) for split in measured.splits] for part in (*Split.__slots__, "total")}
        | {part: [round(ms, 4) for ms in getattr(measured, part)] for part in ("hosts", "queued", "products")}
        for shape, measured in found.items()
    ]
