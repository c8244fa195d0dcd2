"""Figures out of raw timings: the tables that are printed, and everything as JSON."""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from importlib.metadata import version
from statistics import median
from typing import Any

from app.bench.client import Answer, Drafting
from app.bench.machine import describe_host
from app.bench.paired import Comparison, Ratio, ratio
from app.bench.prompts import Prompt
from app.bench.tables import markdown
from app.bench.traffic import Pressure, Round

QUANTILES = (50, 90, 99)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One dataset under one pressure: what every variant answered, round by round. `comparison` has their speeds, and
    claims each variant against the first; without one nothing is said of speed."""

    text: str
    pressure: Pressure
    prompts: Sequence[Prompt]
    rounds: Mapping[str, Sequence[Round]]
    comparison: Comparison | None = None
    warm_up_failures: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def answers(self, variant: str) -> list[Answer]:
        """Those that came, of all rounds."""
        return [a for turn in self.rounds[variant] for a in turn.answers if a.error is None]

    def failures(self, variant: str) -> list[str]:
        """Why requests failed, the warm-up's included."""
        during = [reason for turn in self.rounds[variant] for reason in turn.failures]
        return [*self.warm_up_failures.get(variant, ()), *during]

    def speed(self, variant: str) -> float:
        """Output tokens per second: the median of the rounds."""
        return median(turn.speed for turn in self.rounds[variant])

    def speed_up(self, variant: str) -> Ratio:
        """Against the first variant."""
        return ratio(*([turn.speed for turn in self.rounds[name]] for name in (variant, next(iter(self.rounds)))))

    def drafting(self, variant: str) -> Drafting | None:
        counts = [turn.drafting for turn in self.rounds[variant]]
        known = [count for count in counts if count is not None]
        return reduce(Drafting.and_also, known) if known and len(known) == len(counts) else None

    def acceptance_length(self, variant: str) -> float | None:
        counts = self.drafting(variant)
        return counts.acceptance_length if counts else None

    def accuracy(self, variant: str) -> float | None:
        """The share of answers that are right; one that failed is not. None where nobody can tell."""
        judged = [
            answer.error is None and prompt.judge(answer.text)
            for turn in self.rounds[variant]
            for prompt, answer in zip(self.prompts, turn.answers, strict=True)
            if prompt.judge is not None
        ]
        return sum(judged) / len(judged) if judged else None

    def same_text(self, variant: str) -> float:
        """Of the requests that both answered, the share whose answers equal the first variant's of the same round."""
        pairs = [
            (mine.text, theirs.text)
            for turn, first in zip(self.rounds[variant], next(iter(self.rounds.values())), strict=True)
            for mine, theirs in zip(turn.answers, first.answers, strict=True)
            if mine.error is None and theirs.error is None
        ]
        return sum(mine == theirs for mine, theirs in pairs) / max(1, len(pairs))

    def times(self, variant: str, kind: str) -> list[float]:
        """Seconds: of every request its "ttft", "tpot" or "e2el", of every chunk but the first its "itl"."""
        if kind == "itl":
            return [gap for answer in self.answers(variant) for gap in answer.gaps]
        times = [getattr(answer, kind) for answer in self.answers(variant)]
        return [time for time in times if time is not None]

    def goodput(self, variant: str, limits: Mapping[str, float]) -> float:
        """Requests per second that keep all limits, which are in seconds."""
        good = sum(is_good(answer, limits) for answer in self.answers(variant))
        return good / sum(turn.seconds for turn in self.rounds[variant])


@dataclass(frozen=True, slots=True)
class Table:
    """`name` is the PNG's as well; `meaning` stands below the title."""

    name: str
    title: str
    meaning: str
    rows: list[Row]

    def __str__(self) -> str:
        return f"## {self.title}\n\n{self.meaning}\n\n{markdown(self.rows)}\n"


def percentile(values: Iterable[float], percent: float) -> float:
    """Between two values in proportion, as NumPy does it by default."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether a request keeps limits in seconds. One that has no such time (a single token's TPOT) keeps it."""
    return all((getattr(answer, kind) or 0.0) <= limit for kind, limit in limits.items())


def tables(cells: Sequence[Cell], limits: Mapping[str, float]) -> list[Table]:
    """All those that have something to say."""
    timed = [cell for cell in cells if cell.comparison is not None]
    found = [
        Table("speed", "Output tokens per second", SPEED, _speed(timed)),
        Table("acceptance", "Mean acceptance length by batch size", ACCEPTANCE, _acceptance(cells)),
        Table("positions", "Acceptance per position", POSITIONS, _positions(cells)),
        Table("accuracy", "Accuracy", ACCURACY, _accuracy(cells)),
        Table("latency", "Latency in ms, p50 / p90 / p99", LATENCY, _latency(timed)),
        Table("goodput", "Goodput", _goodput_meaning(limits), _goodput(timed, limits) if limits else []),
    ]
    return [table for table in found if table.rows]


SPEED = (
    "The median of the rounds. A ratio is of paired rounds: its Hodges-Lehmann estimate and its 95 % interval "
    "(Wilcoxon's signed ranks)."
)
ACCEPTANCE = (
    "Tokens of a request's step that verified drafts, the bonus included, from the server's counters; "
    "`-`: no such counters, or no drafts."
)
POSITIONS = (
    "How often the draft at this position of the block was accepted, of the times it was verified; where the server "
    "does not count these, of all steps with drafts."
)
ACCURACY = "Right answers of all that were asked for; `same text` is how many equal the first variant's."
LATENCY = (
    "TTFT: time to first token, from sending to the first chunk; connections are new in every round. "
    "TPOT: per output token after the first, (last - first) / (tokens - 1) of a request. "
    "ITL: inter-token latency, from one chunk to the next; a step of a speculative decoder sends several tokens in one "
    "chunk. E2EL: end-to-end latency, from sending to the last token."
)


def _goodput_meaning(limits: Mapping[str, float]) -> str:
    said = ", ".join(f"{kind.upper()} {1000 * limit:g} ms" for kind, limit in limits.items())
    return f"Requests per second, of which all times keep within {said}."


def _by_text(cells: Iterable[Cell], figure: Callable[[Cell], Row]) -> list[Row]:
    return [{"text": cell.text, cell.pressure.kind: cell.pressure.label} | figure(cell) for cell in cells]


def _speed(cells: Sequence[Cell]) -> list[Row]:
    def figure(cell: Cell) -> Row:
        row: Row = {f"{name} tok/s": f"{cell.speed(name):.0f}" for name in cell.rounds}
        assert cell.comparison is not None
        for claim in cell.comparison.claims:
            verdict = cell.comparison.verdict(claim)
            shown = "" if verdict == "measured" else verdict
            row[f"{claim.variant} / {claim.against}"] = f"{cell.comparison.ratio(claim)} {shown}".rstrip()
        failed = sum(len(cell.failures(name)) for name in cell.rounds)
        return row | {"rounds": cell.comparison.num_rounds, "requests": len(cell.prompts), "failed": failed}

    return _by_text(cells, figure)


def _acceptance(cells: Sequence[Cell]) -> list[Row]:
    drafting = [name for name in _variants(cells) if any(cell.acceptance_length(name) for cell in cells)]

    def figure(cell: Cell) -> Row:
        lengths = {name: cell.acceptance_length(name) for name in drafting}
        return {name: f"{length:.2f}" if length else "-" for name, length in lengths.items()}

    return _by_text(cells, figure) if drafting else []


def acceptance_at(cells: Sequence[Cell]) -> dict[tuple[str, str], list[float]]:
    """(text, variant) -> acceptance by position, over all pressures; of those that drafted."""
    found = {}
    for text in dict.fromkeys(cell.text for cell in cells):
        for name in _variants(cells):
            counts = [cell.drafting(name) for cell in cells if cell.text == text]
            known = [count for count in counts if count is not None]
            if known and (shares := reduce(Drafting.and_also, known).acceptance_at):
                found[text, name] = shares
    return found


def _positions(cells: Sequence[Cell]) -> list[Row]:
    found = acceptance_at(cells)
    longest = max(map(len, found.values()), default=0)
    return [
        {"text": text, "variant": name}
        | {f"at {k + 1}": f"{shares[k]:.2f}" if k < len(shares) else "-" for k in range(longest)}
        for (text, name), shares in found.items()
    ]


def _accuracy(cells: Sequence[Cell]) -> list[Row]:
    def figure(cell: Cell) -> Row:
        shares = {name: cell.accuracy(name) for name in cell.rounds}
        row: Row = {name: "-" if share is None else f"{100 * share:.1f} %" for name, share in shares.items()}
        others = list(cell.rounds)[1:]
        row |= {f"{name} same text": f"{100 * cell.same_text(name):.1f} %" for name in others}
        cut = Counter(answer.finish_reason for name in cell.rounds for answer in cell.answers(name))["length"]
        failed = sum(len(cell.failures(name)) for name in cell.rounds)
        return row | {"prompts": len(cell.prompts), "cut at max_tokens": cut, "failed": failed}

    return _by_text([cell for cell in cells if any(cell.accuracy(name) is not None for name in cell.rounds)], figure)


def _latency(cells: Sequence[Cell]) -> list[Row]:
    def figure(cell: Cell, name: str) -> Row:
        times = {kind: cell.times(name, kind) for kind in ("ttft", "tpot", "itl", "e2el")}
        return {"variant": name} | {kind.upper(): _quantiles(found) for kind, found in times.items()}

    return [row for cell in cells for name in cell.rounds for row in _by_text([cell], partial(figure, name=name))]


def _quantiles(times: Sequence[float]) -> str:
    return " / ".join(milliseconds(percentile(times, q)) for q in QUANTILES) if times else "-"


def milliseconds(seconds: float) -> str:
    """Three digits, or as many as there are before the point."""
    ms = 1000 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _goodput(cells: Sequence[Cell], limits: Mapping[str, float]) -> list[Row]:
    def figure(cell: Cell) -> Row:
        row: Row = {}
        for name in cell.rounds:
            good = sum(is_good(answer, limits) for answer in cell.answers(name))
            asked = sum(len(turn.answers) for turn in cell.rounds[name])
            row[name] = f"{cell.goodput(name, limits):.2f} ({100 * good / asked:.0f} %)"
        return row

    return _by_text(cells, figure)


def _variants(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell.rounds))


def notes(cells: Sequence[Cell]) -> list[str]:
    """What a reader must know before believing the tables."""
    found = []
    for cell in cells:
        where = f"{cell.text}, {cell.pressure}"
        if (different := len(set(map(id, cell.prompts)))) < len(cell.prompts):
            found.append(f"{where}: {different} prompts came round again until there were {len(cell.prompts)}")
        for name in cell.rounds:
            reasons = Counter(cell.failures(name))
            found += [f"{where}: {count} requests to {name} failed: {why}" for why, count in reasons.items()]
            answers = cell.answers(name)
            asked = sum(answer.prompt_tokens for answer in answers)
            cached = sum(answer.cached_tokens for answer in answers)
            if cached > asked / 100:
                found.append(f"{where}: {name} had {100 * cached / asked:.0f} % of the prompts' tokens in a cache")
            if short := _cut_short(cell, name):
                found.append(f"{where}: {short} answers of {name} are shorter than asked: it ignores ignore_eos")
    verdicts = Counter(c.comparison.verdict(claim) for c in cells if c.comparison for claim in c.comparison.claims)
    if unknown := verdicts["inconclusive"]:
        found.append(
            f"{unknown} of {verdicts.total()} ratios are inconclusive: raise --max-rounds, or allow more --tight"
        )
    return found


def _cut_short(cell: Cell, variant: str) -> int:
    return sum(
        answer.error is None and answer.tokens < (prompt.max_tokens or 0)
        for turn in cell.rounds[variant]
        for prompt, answer in zip(cell.prompts, turn.answers, strict=True)
        if prompt.exact
    )


def lengths(cells: Sequence[Cell]) -> str:
    """The mean numbers of tokens that were asked and answered, by the servers' own counts."""
    answers = [answer for cell in cells for name in cell.rounds for answer in cell.answers(name)]
    asked = sum(answer.prompt_tokens for answer in answers) / len(answers)
    answered = sum(answer.tokens for answer in answers) / len(answers)
    return f"{len(answers)} answers; on average {asked:.0f} tokens were asked and {answered:.0f} answered"


def as_json(cells: Sequence[Cell], shown: Sequence[Table], **about: Any) -> dict[str, Any]:
    """Everything, raw timings included; `about` goes to its head."""
    names = ("dflash-server", "httpx", "torch")
    return {
        **about,
        "machine": describe_host(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "tables": {table.name: table.rows for table in shown},
        "notes": notes(cells),
        "requests": [row for cell in cells for row in _raw(cell)],
    }


def _raw(cell: Cell) -> Iterable[Row]:
    """Every request; `chunks` and `last` are seconds after it was sent."""
    for name, turns in cell.rounds.items():
        for number, turn in enumerate(turns):
            for index, (prompt, answer) in enumerate(zip(cell.prompts, turn.answers, strict=True)):
                yield {
                    "text": cell.text,
                    cell.pressure.kind: cell.pressure.label,
                    "variant": name,
                    "round": number,
                    "prompt": index,
                    "sent": round(answer.sent, 6),
                    "chunks": [round(moment - answer.sent, 6) for moment in answer.chunks],
                    "last": round(answer.e2el, 6),
                    "prompt_tokens": answer.prompt_tokens,
                    "cached_tokens": answer.cached_tokens,
                    "tokens": answer.tokens,
                    "finish_reason": answer.finish_reason,
                    "error": answer.error,
                    "right": None if prompt.judge is None else answer.error is None and prompt.judge(answer.text),
                }
