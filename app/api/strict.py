"""Check of tool calls against the schemas of strict functions, after the calls were written.

A schema comes from a client, so nothing in it may fetch, hang or crash. No reference leaves the schema. The work has a
maximum of time and size, and it runs in threads of its own, because those of the tokenizer must stay free. A client's
regular expressions are not run, because one can take for ever in a single call.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY

from app.api.errors import clip
from app.metrics import Metrics
from app.text.parsers import ToolCall

MAX_CHARACTERS = 2**16
"""Maximum length of a schema, and of a call's arguments. Schemas of real tools have a tenth of it."""
MAX_SECONDS = 1.0
"""Maximum time of all checks of one request, with their wait for a thread."""
_MAX_MESSAGE = 300

_end = ContextVar[float]("end of the time that the checks of one request may take")
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="strict")


class Verdict(NamedTuple):
    """Outcome of one check. `why` is a sentence without its full stop, empty if the call fits."""

    outcome: Literal["fits", "misfits", "unchecked"]
    why: str = ""


class StrictFunctions:
    """Schemas of the strict functions that one request offers, by name. A function without a schema takes anything."""

    def __init__(self, schemas: Mapping[str, dict[str, Any] | None], metrics: Metrics) -> None:
        self._schemas = schemas
        self._metrics = metrics
        self._seconds_left = MAX_SECONDS

    async def warnings(self, choice: int, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Check the calls of one choice in a thread, and count them. Return a warning for each that does not fit.

        One choice of a request is checked at a time, because all share the request's seconds.
        """
        numbered = [(number, call) for number, call in enumerate(calls) if call.name in self._schemas]
        if not numbered:
            return []
        checked = [(self._schemas[call.name], call.arguments) for _, call in numbered]
        started = time.monotonic()
        end = started + self._seconds_left
        verdicts = await asyncio.get_running_loop().run_in_executor(_threads, _check_all, checked, end)
        self._seconds_left -= time.monotonic() - started
        for verdict in verdicts:
            self._metrics.count("strict_tool_calls", label=verdict.outcome)
        return [
            {
                "code": "arguments_misfit" if verdict.outcome == "misfits" else "arguments_unchecked",
                "choice": choice,
                "tool_call": number,
                "function": call.name,
                "message": f"{verdict.why}.",
            }
            for (number, call), verdict in zip(numbered, verdicts, strict=True)
            if verdict.outcome != "fits"
        ]


def _check_all(checked: Sequence[tuple[dict[str, Any] | None, str]], end: float) -> list[Verdict]:
    _end.set(end)
    return [_check(schema or {}, arguments) for schema, arguments in checked]


def _check(schema: dict[str, Any], arguments: str) -> Verdict:
    """Return the verdict on one call. Any exception of a client's schema makes the call unchecked."""
    try:
        _look_at_the_time()
        if max(len(arguments), len(json.dumps(schema))) > MAX_CHARACTERS:
            return Verdict("unchecked", f"The schema or the arguments have more than {MAX_CHARACTERS:,} characters")
        if error := next(_Bounded(Draft202012Validator.META_SCHEMA, registry=REGISTRY).iter_errors(schema), None):
            return Verdict("unchecked", f"The schema is no JSON Schema: {_explain(error)}")
        error = next(_Bounded(schema, registry=REGISTRY).iter_errors(json.loads(arguments)), None)
    except _TooLong:
        return Verdict("unchecked", f"The checks of this request took more than {MAX_SECONDS:g} s")
    except Exception as error:  # The library raises many kinds, like those of referencing and RecursionError.
        reason = clip(f"{type(error).__name__}: {error}", _MAX_MESSAGE)
        return Verdict("unchecked", f"The schema cannot be used: {reason}")
    return Verdict("misfits", _explain(error)) if error else Verdict("fits")


def _explain(error: ValidationError) -> str:
    return clip(f"At {error.json_path}: {error.message}", _MAX_MESSAGE)


class _TooLong(Exception):
    """The checks of one request took more than MAX_SECONDS."""


def _look_at_the_time() -> None:
    if time.monotonic() > _end.get():
        raise _TooLong


def _evolve(validator: Any, **changes: Any) -> Any:
    """Return the validator of a part of the schema, which is bounded too. All recursion goes through here.

    The library's own would follow the part's `$schema` to a class without bounds.
    """
    _look_at_the_time()
    kept = {"schema": validator.schema, "registry": validator._registry, "_resolver": validator._resolver}
    return _Bounded(**kept | changes)


def _pass(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """Check nothing."""


def _unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    """Compare items by their text, because the library's comparison of every pair takes minutes for a long list."""
    if not value or not isinstance(instance, list):
        return
    if len({json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
        yield ValidationError("the items are not unique")


_KEYWORDS = dict(Draft202012Validator.VALIDATORS)


def _additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    """Check properties that `properties` does not name, unless it takes a regular expression to know them."""
    if "patternProperties" not in schema:
        yield from _KEYWORDS["additionalProperties"](validator, value, instance, schema) or ()


_OWN: dict[str, Callable[..., Any]] = {
    "uniqueItems": _unique_items,
    "additionalProperties": _additional_properties,
    # The first two run regular expressions. The others walk the schema in ways that no time limit sees.
    **dict.fromkeys(("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties"), _pass),
}
_Bounded: Any = extend(Draft202012Validator, _OWN)
_Bounded.evolve = _evolve
