"""Tables, notes and JSON about the cells of a bench."""

import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.cell import Cell
from tools.bench.client import Drafting
from tools.bench.markdown import Row, Table, describe_host, markdown, write_page

SPEED = (
    "The median of the rounds. A ratio is of paired rounds: its Hodges-Lehmann estimate and its 95 % interval "
    "(Wilcoxon's signed ranks). `accepted` is the acceptance length, tokens of a request's step that verified drafts, "
    "the bonus included, from the server's counters; `-`: no such counters, or no drafts. `same text` is how many "
    "answers of a round equal the first variant's, in every round."
)
POSITIONS = (
    "How often the draft at this position of the block was accepted, of the times it was verified; where the server "
    "does not count these, of all steps with drafts."
)
LATENCY = (
    "TTFT: time to first token, from sending to the first chunk; connections are new in every round. "
    "TPOT: per output token after the first, (last - first) / (tokens - 1) of a request. "
    "ITL: inter-token latency, from one chunk to the next; a step of a speculative decoder sends several tokens in one "
    "chunk. E2EL: end-to-end latency, from sending to the last token."
)
GOODPUT = "Requests per second, of which all times keep within {}."


@dataclass(slots=True)
class Publication:
    """A context that prints its cells as Markdown at its end, also if an error ends it early.

    A folder gets results.json. A page gets its table only of a whole bench. `limits` are goodput's, in seconds.
    `about` has a line for each server.
    """

    folder: Path | None
    limits: dict[str, float]
    command: str
    page: str | None = None
    about: list[str] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    @property
    def has_failures(self) -> bool:
        return any(cell.num_failures for cell in self.cells)

    def __enter__(self) -> "Publication":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if not self.cells:
            return
        shown = tables(self.cells, self.limits)
        print(f"{describe_host()}\n")
        print("".join(f"- {line}\n" for line in self.about))
        print(f"{lengths(self.cells)}.\n")
        print(*shown, sep="\n", end="\n\n")
        remarks = "\n".join(f"- {note}" for note in notes(self.cells))
        print(remarks)
        if self.folder:
            results = as_json(self.cells, shown, command=self.command, servers=self.about)
            (self.folder / "results.json").write_text(json.dumps(results, indent=1))
        if self.page and not error:
            head = f"`{self.command}`\n({describe_host()}; {lengths(self.cells)}):"
            write_page(self.page, list(filter(None, [head, markdown(shown[0].rows), remarks])))


def tables(cells: Sequence[Cell], limits: Mapping[str, float]) -> list[Table]:
    """Return the tables that have rows. `limits` are goodput's, in seconds."""
    kept = ", ".join(f"{kind.upper()} {1000 * limit:g} ms" for kind, limit in limits.items())

    def goodput(cell: Cell) -> Row:
        rates = {name: cell.goodput(name, limits) for name in cell.rounds}
        return {name: f"{rate:.2f} ({100 * share:.0f} %)" for name, (rate, share) in rates.items()}

    drafting = [name for name in _variants(cells) if any(cell.acceptance_length(name) for cell in cells)]
    speeds = [_head(cell) | _speed(cell, drafting) for cell in cells]
    latencies = [_head(cell) | _latency(cell, name) for cell in cells for name in cell.rounds]
    goodputs = [_head(cell) | goodput(cell) for cell in cells if limits]
    shown = [
        Table("speed", "Output tokens per second", SPEED, speeds),
        Table("positions", "Acceptance per position", POSITIONS, _positions(cells)),
        Table("latency", "Latency in ms, p50 / p90 / p99", LATENCY, latencies),
        Table("goodput", "Goodput", GOODPUT.format(kept), goodputs),
    ]
    return [table for table in shown if table.rows]


def _variants(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell.rounds))


def _head(cell: Cell) -> Row:
    return {"text": cell.text, "temperature": f"{cell.load.temperature:g}", cell.load.kind: cell.load.label}


def _speed(cell: Cell, drafting: Sequence[str]) -> Row:
    """Return speeds, ratios, acceptance lengths of the variants that draft in any cell, and equal texts."""
    row: Row = {f"{name} tok/s": f"{cell.speed(name):.0f}" for name in cell.rounds}
    for claim in cell.comparison.claims:
        verdict = cell.comparison.verdict(claim)
        shown = f" {verdict}" if verdict in ("met", "missed") else ""
        row[f"{claim.variant} / {claim.against}"] = f"{cell.comparison.ratio(claim)}{shown}"
    for name in drafting:
        length = cell.acceptance_length(name)
        row[f"{name} accepted"] = f"{length:.2f}" if length else "-"
    row |= {f"{name} same text": cell.same_text(name) for name in list(cell.rounds)[1:]}
    return row | {"rounds": cell.comparison.num_rounds, "requests": len(cell.prompts), "failed": cell.num_failures}


def _positions(cells: Sequence[Cell]) -> list[Row]:
    """Return acceptance by position for each text, temperature and variant that drafted, over all loads."""
    texts: dict[tuple[str, float], list[Cell]] = {}
    for cell in cells:
        texts.setdefault((cell.text, cell.load.temperature), []).append(cell)
    acceptance: dict[tuple[str, float, str], list[float]] = {}
    for (text, temperature), name in product(texts, _variants(cells)):
        if counts := [count for cell in texts[text, temperature] if (count := cell.drafting(name))]:
            acceptance[text, temperature, name] = reduce(Drafting.and_also, counts).acceptance_at
    width = max(map(len, acceptance.values()), default=0)
    return [
        {"text": text, "temperature": f"{temperature:g}", "variant": name}
        | {f"at {k}": f"{share:.2f}" for k, share in enumerate(shares, 1)}
        | {f"at {k}": "-" for k in range(len(shares) + 1, width + 1)}
        for (text, temperature, name), shares in acceptance.items()
        if shares
    ]


def _latency(cell: Cell, variant: str) -> Row:
    row: Row = {"variant": variant}
    for kind in ("ttft", "tpot", "itl", "e2el"):
        times = cell.times(variant, kind)
        row[kind.upper()] = " / ".join(map(milliseconds, np.percentile(times, (50, 90, 99)))) if times else "-"
    return row


def milliseconds(seconds: float) -> str:
    """Return three digits, or all digits before the point."""
    ms = 1000 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def notes(cells: Sequence[Cell]) -> list[str]:
    """Return the facts that change the meaning of the tables."""
    remarks = []
    for cell in cells:
        where = f"{cell.text}, {cell.load}"
        if (different := len(set(map(id, cell.prompts)))) < len(cell.prompts):
            remarks.append(f"{cell.text}: {different} prompts came round again until there were {len(cell.prompts)}")
        for name in cell.rounds:
            reasons = Counter(cell.failures(name))
            remarks += [f"{where}: {count} requests to {name} failed: {why}" for why, count in reasons.items()]
            answers = cell.answers(name)
            asked = sum(answer.prompt_tokens for answer in answers)
            cached = sum(answer.cached_tokens for answer in answers)
            if cached > asked / 100:
                remarks.append(f"{where}: {name} had {100 * cached / asked:.0f} % of the prompts' tokens in a cache")
            exact = [(prompt, answer) for prompt, answer in cell.asked(name) if prompt.exact and answer.error is None]
            if short := sum(answer.tokens < (prompt.max_tokens or 0) for prompt, answer in exact):
                remarks.append(f"{where}: {short} answers of {name} are shorter than asked: it ignores ignore_eos")
    slower: dict[str, list[str]] = {}
    for cell in cells:
        for claim in cell.comparison.claims:
            if round((ratio := cell.comparison.ratio(claim)).middle, 2) < 1:
                where = f"{cell.text}, {cell.load}: {ratio}"
                slower.setdefault(f"{claim.variant} is slower than {claim.against}", []).append(where)
    remarks += [f"{what} in {'; '.join(places)}" for what, places in slower.items()]
    verdicts = Counter(c.comparison.verdict(claim) for c in cells for claim in c.comparison.claims)
    if unsettled := verdicts["unsettled"]:
        intervals = f"{unsettled} of {verdicts.total()} intervals are too wide to settle"
        remarks.append(f"{intervals}: raise --max-rounds, or allow more --tight")
    return list(dict.fromkeys(remarks))


def lengths(cells: Sequence[Cell]) -> str:
    """Return the mean numbers of tokens of prompts and answers, as the servers count them."""
    answers = [answer for cell in cells for name in cell.rounds for answer in cell.answers(name)]
    asked = sum(answer.prompt_tokens for answer in answers) / len(answers)
    answered = sum(answer.tokens for answer in answers) / len(answers)
    return f"{len(answers)} answers; on average {asked:.0f} tokens were asked and {answered:.0f} answered"


def as_json(cells: Sequence[Cell], shown: Sequence[Table], **about: Any) -> dict[str, Any]:
    """Return all results with raw timings; `about` goes to the head."""
    names = ("dflash-server", "httpx", "torch")
    return {
        **about,
        "machine": describe_host(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "tables": {table.name: table.rows for table in shown},
        "notes": notes(cells),
        "requests": [row for cell in cells for name in cell.rounds for row in _requests(cell, name)],
    }


def _requests(cell: Cell, variant: str) -> Iterator[Row]:
    """Yield every request, whose `text` is the answer's. `chunks` and `last` are seconds after it was sent."""
    for index, (_, answer) in enumerate(cell.asked(variant)):
        number, position = divmod(index, len(cell.prompts))
        yield (
            _head(cell)
            | {"dataset": cell.text, "variant": variant, "round": number, "prompt": position}
            | asdict(answer)
            | {"chunks": [round(moment - answer.sent, 6) for moment in answer.chunks]}
            | {"last": round(answer.e2el, 6)}
        )
