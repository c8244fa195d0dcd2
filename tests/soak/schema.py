"""Schemathesis within a time limit. It sends requests that /openapi.json allows or forbids to a real engine."""

import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from schemathesis import Case

from tests.exhaustive.operations import CHECKS, TRIALS
from tests.soak.questions import SILENCE_SECONDS
from tests.soak.server import DemoServer

FLAGS = ["--max-model-len", "128", "--max-num-seqs", "16"]
"""Answers are short, so that there are many."""
_ROUND = 50


@dataclass
class Fuzzed:
    """Number of requests by the status of their answers."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def fuzz(seconds: float, seed: int, tell: Callable[[str], None]) -> Fuzzed:
    """All operations in turn with new data each time, until the time is up. The first problem of a turn ends it."""
    found = Fuzzed()
    server = DemoServer(FLAGS)
    with server:
        tell(f"schemathesis for {seconds:g} s, of {server.url}")
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = {operation.label: operation for operation in (some.ok() for some in schema.get_all_operations())}
        began = time.monotonic()
        for turn, (label, mode) in enumerate(itertools.cycle(TRIALS)):
            found.seconds = time.monotonic() - began
            if found.seconds >= seconds:
                break
            strategy = operations[label].as_strategy(generation_mode=mode)
            try:
                _try(strategy, f"{seed}/{turn}", found, began + seconds)
            except (Exception, BaseExceptionGroup) as error:  # of several checks at once
                found.problems.append(f"{label}, {mode.value}: {error}")
        found.problems += [f"after schemathesis {name} is {value}" for name, value in server.gauges().items() if value]
        found.problems += server.untidy()
    found.problems += server.exit_complaints
    tell(f"schemathesis: {found.statuses.total()} requests, {len(found.problems)} problems")
    return found


def _try(strategy: hypothesis.strategies.SearchStrategy[Case], seed: str, found: Fuzzed, until: float) -> None:
    """_ROUND requests. Raises what schemathesis says of one that is not answered as described."""

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=_ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @hypothesis.given(strategy)
    def answer_is_as_described(case: Case) -> None:
        if time.monotonic() < until:
            response = case.call(timeout=SILENCE_SECONDS)
            found.statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer_is_as_described()
