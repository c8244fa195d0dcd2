"""Soak the demo pair: load and faults for many minutes, and a look at every answer and at both processes.

    python -m tests.soak                                  20 minutes, after 10 of schemathesis
    python -m tests.soak --minutes 1 --fuzz-minutes 0
    python -m tests.soak --report docs/reliability.md

The report is written in any case; the exit status is 1 if a promise was broken.
"""

import argparse
import sys
from pathlib import Path

from tests.soak.report import page, summary
from tests.soak.rounds import Plan, soak
from tests.soak.schema import Fuzzed, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of load (20)")
    parser.add_argument("--fuzz-minutes", type=float, default=10.0, help="of schemathesis before it, or 0 (10)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
    parser.add_argument("--report", type=Path, help="a page to write")
    given = parser.parse_args()
    fuzzed = fuzz(given.fuzz_minutes * 60, given.seed, tell) if given.fuzz_minutes else Fuzzed()
    findings = soak(Plan(given.minutes, given.seed), tell)
    if given.report is not None:
        given.report.write_text("\n".join(page(findings, fuzzed, sys.argv[1:])) + "\n", encoding="utf-8")
    print("\n".join(summary(findings, fuzzed)))
    return 1 if findings.problems or fuzzed.problems else 0


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
