"""Results of a soak, as lines for a terminal and as a page."""

import platform
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from numpy import percentile

from tests.soak.checks import API_GROWTH, ENGINE_GROWTH
from tests.soak.load import BURST
from tests.soak.rounds import Findings
from tests.soak.schema import Fuzzed

INTRODUCTION = f"""\
The server runs the demo pair under a load of several kinds at once:

- Clients ask for streams, for whole answers and for answers to long prompts. Some read slowly through a small buffer.
- Clients leave in the middle, set deadlines that are too short, send bad input, open sockets and send half a request.
  Up to {BURST} come at once.
- The engine is killed, stopped for a while, stopped for good, and stopped together with the API process.

After each round all clients are done, and both processes are examined. These promises must hold:

- Every answer equals, character for character, the answer that the same question got alone, before the load and without
  drafts. Its finish_reason and number of tokens are the same.
- Every other request got an error in OpenAI's shape, with a Retry-After for 429 and 503, or an error event and no
  [DONE].
- An error is allowed only between the death of an engine and the readiness of the next. A 429 is also allowed while
  {BURST} clients come at once, and a 504 once the client's own deadline has passed.
- No request was left without an answer or an error, none is running or waiting, and no KV page is in use.
- From the warm-up to the end the API process gains no descriptor, and at most {API_GROWTH >> 20} MiB of resident
  memory. An engine gains at most {ENGINE_GROWTH >> 20} MiB from its first round to its last.
- There is no zombie, no folder of a dead engine's sockets, and no traceback in the log. After SIGTERM during answers
  the server writes them to their end, and its exit code is 0."""


def summary(findings: Findings, fuzzed: Fuzzed) -> Iterator[str]:
    """Yield the lines for a terminal."""
    yield from _latencies(findings)
    total, right = findings.ends.total(), sum(count for (_, end), count in findings.ends.items() if end == "right")
    yield f"{total:,} requests in {findings.seconds:.0f} s, {right:,} answered, {len(findings.faults)} faults"
    for problem in (*fuzzed.problems, *findings.problems):
        yield f"PROBLEM: {problem}"
    yield "A PROMISE IS BROKEN" if findings.problems or fuzzed.problems else "all promises hold"


def page(findings: Findings, fuzzed: Fuzzed, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the page."""
    plan = findings.plan
    yield "# Reliability"
    yield ""
    yield "For operators who want to know what the server survives."
    yield f"Written by `{shlex.join(['python', '-m', 'tests.soak', *arguments])}`; do not edit. `make soak` runs"
    yield "20 minutes of load and faults, after 10 of schemathesis. `make test-rest` runs about a minute of it."
    command = shlex.join(["dflash-server", "serve", "demo", *plan.flags])
    yield f"Python {platform.python_version()}, torch {torch.__version__}, `{command}`;"
    yield "the server, its engine with one thread, and all clients on one CPU."
    yield ""
    yield INTRODUCTION
    yield ""
    yield f"## {'A PROMISE WAS BROKEN' if findings.problems or fuzzed.problems else 'All of it held'}"
    yield ""
    yield f"It took {findings.seconds / 60:.1f} minutes, with seed {plan.seed}."
    for problem in (*fuzzed.problems, *findings.problems):
        yield f"- {problem}"
    yield ""
    yield from _ends(findings)
    yield ""
    yield from _faults(findings)
    yield ""
    yield from _latencies(findings)
    yield ""
    yield from _footprints(findings)
    yield ""
    yield "## Schemathesis"
    yield ""
    yield from _fuzzed(fuzzed)


def _ends(findings: Findings) -> Iterator[str]:
    yield "| clients | right | clear error | left by themselves | wrong |"
    yield "|---|---|---|---|---|"
    for kind in sorted({kind for kind, _ in findings.ends}):
        cells = " | ".join(f"{findings.ends[kind, end]:,}" for end in ("right", "error", "left", "wrong"))
        yield f"| {kind} | {cells} |"
    for kind, count in findings.held.items():
        yield f"| {kind} | - | - | {count:,} | - |"
    yield ""
    yield "A 4xx is the right answer to bad input. The other errors, where 200 is a stream that has begun:"
    yield ""
    yield "| status | code | times |"
    yield "|---|---|---|"
    for (status, code), count in findings.errors.most_common():
        yield f"| {status} | `{code}` | {count:,} |"


def _faults(findings: Findings) -> Iterator[str]:
    yield "| fault | times | next engine ready after, s |"
    yield "|---|---|---|"
    for kind, times in Counter(fault.kind for fault in findings.faults).items():
        seconds = [fault.seconds for fault in findings.faults if fault.kind == kind and fault.seconds is not None]
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else "(survives)"
        yield f"| {kind} | {times} | {spread} |"


def _latencies(findings: Findings) -> Iterator[str]:
    """Yield the table of streams with a right answer. The figures include the waits for a paused engine or a burst."""
    yield "| streams with a right answer | TTFT p50, ms | p99, ms | between chunks p50, ms | p99, ms |"
    yield "|---|---|---|---|---|"
    for kind in ("all", *(f"round {name}" for name in reversed(findings.plan.cycle))):
        values = (findings.first_tokens[kind], findings.gaps[kind])
        cells = [_milliseconds(some, percent) for some in values for percent in (50, 99)]
        yield f"| {kind}, {len(findings.first_tokens[kind]):,} | {' | '.join(cells)} |"


def _milliseconds(seconds: Sequence[float], percent: int) -> str:
    return f"{1000 * percentile(seconds, percent):.0f}" if seconds else "-"


def _footprints(findings: Findings) -> Iterator[str]:
    yield "| after round | API process, MiB | descriptors | engine | its memory, MiB | its descriptors |"
    yield "|---|---|---|---|---|---|"
    numbers: dict[int, int] = {}
    for point in findings.points:
        number = numbers.setdefault(point.engine_pid, len(numbers) + 1)
        cells = [f"{point.api.memory / 2**20:.1f}", point.api.descriptors, number]
        cells += [f"{point.engine.memory / 2**20:.1f}", point.engine.descriptors]
        if point in (findings.points[0], findings.points[-1]):
            yield f"| {point.after} | {' | '.join(map(str, cells))} |"


def _fuzzed(fuzzed: Fuzzed) -> Iterator[str]:
    if not fuzzed.seconds:
        yield "Left out (`--fuzz-minutes 0`)."
        return
    minutes = f"{fuzzed.seconds / 60:.1f} minutes"
    yield f"{fuzzed.statuses.total():,} requests in {minutes}, made from /openapi.json and checked against it:"
    yield ""
    yield "| status | answers |"
    yield "|---|---|"
    for status, count in sorted(fuzzed.statuses.items()):
        yield f"| {status} | {count:,} |"
