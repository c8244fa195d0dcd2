"""Cells of a bench: one dataset under one load, with the answers of every variant in every round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from statistics import median

from tools.bench.client import Answer, Drafting
from tools.bench.formats import Prompt
from tools.bench.paired import Comparison
from tools.bench.traffic import Load, Round


@dataclass(frozen=True, slots=True)
class Cell:
    """Rounds by variant. `comparison` has their speeds and claims."""

    text: str
    load: Load
    prompts: Sequence[Prompt]
    rounds: Mapping[str, Sequence[Round]]
    comparison: Comparison
    warm_up_failures: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def asked(self, variant: str) -> Iterator[tuple[Prompt, Answer]]:
        """Yield each prompt with its answer, failed ones included, in all rounds."""
        for played in self.rounds[variant]:
            yield from zip(self.prompts, played.answers, strict=True)

    def answers(self, variant: str) -> list[Answer]:
        """Return the answers without an error, of all rounds."""
        return [answer for _, answer in self.asked(variant) if answer.error is None]

    def failures(self, variant: str) -> list[str]:
        """Return the reasons of failed requests, the warm-up's included."""
        during = [answer.error for _, answer in self.asked(variant) if answer.error is not None]
        return [*self.warm_up_failures.get(variant, ()), *during]

    @property
    def num_failures(self) -> int:
        return sum(len(self.failures(variant)) for variant in self.rounds)

    def speed(self, variant: str) -> float:
        """Return output tokens per second, the median of the rounds."""
        return median(played.speed for played in self.rounds[variant])

    def drafting(self, variant: str) -> Drafting | None:
        counts = [played.drafting for played in self.rounds[variant]]
        return None if None in counts or not counts else reduce(Drafting.and_also, filter(None, counts))

    def acceptance_length(self, variant: str) -> float | None:
        counts = self.drafting(variant)
        return counts.acceptance_length if counts else None

    def same_text(self, variant: str) -> str:
        """Return "8 of 8": the requests of a round whose answers equal the first variant's in every round."""
        first = self.rounds[next(iter(self.rounds))]
        same = [True] * len(self.prompts)
        for ours, theirs in zip(self.rounds[variant], first, strict=True):
            for index, (a, b) in enumerate(zip(ours.answers, theirs.answers, strict=True)):
                same[index] &= a.error is None and b.error is None and a.text == b.text
        return f"{sum(same)} of {len(same)}"

    def times(self, variant: str, kind: str) -> list[float]:
        """Return seconds: "ttft", "tpot" or "e2el" of every request, or "itl" of every chunk but the first."""
        if kind == "itl":
            return [gap for answer in self.answers(variant) for gap in answer.gaps]
        times = [getattr(answer, kind) for answer in self.answers(variant)]
        return [time for time in times if time is not None]

    def goodput(self, variant: str, limits: Mapping[str, float]) -> tuple[float, float]:
        """Return requests per second that keep all limits, and their share of all requests. Limits are seconds."""
        good = sum(is_good(answer, limits) for answer in self.answers(variant))
        played = self.rounds[variant]
        return good / sum(some.seconds for some in played), good / sum(len(some.answers) for some in played)


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Return True if a request keeps all limits, which are seconds. A missing time keeps its limit."""
    return all((getattr(answer, kind) or 0.0) <= limit for kind, limit in limits.items())
