"""The body of a request: read within limits, parsed as JSON once, and checked against its model."""

import asyncio
import gc
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.api import json_values
from app.api.errors import ApiError, bad_request, body_too_large, clip, too_many_values, unsupported
from app.api.json_values import TooManyValues, ValueCount
from app.api.refusals import REFUSED
from app.api.schemas import ModelRequest, SamplingRequest
from app.api.services import services_of
from app.api.shares import Held
from app.api.validation import check_fields_together, clamp, warn_of_unknown_fields
from app.metrics import Metrics

MAX_BODY_BYTES = 8 * 2**20
BODY_SECONDS = 20.0
MIN_BYTES_PER_SECOND = 2**14
MAX_BYTES_IN_PLACE = 2**15  # of a body that is parsed on the event loop, which takes milliseconds
_MAX_ERRORS = 16
_PARSING = threading.Lock()
"""One large body is parsed at a time, so that the event loop competes with one thread for the interpreter."""

BodyT = TypeVar("BodyT", bound=ModelRequest)


async def read_body(
    request: Request, model: type[BodyT] | Callable[[dict[str, Any]], type[BodyT]], held: Held
) -> BodyT:
    """Return the body of a request as a `model`, or as the one that is chosen for the JSON object. `held` counts it.

    A large body is parsed in a thread. Raises ApiError: 400 that names the field. 408 if the body is slower than
    MIN_BYTES_PER_SECOND after BODY_SECONDS. 413 above MAX_BODY_BYTES, MAX_VALUES or MAX_ITEMS. 415 if it is compressed.
    Raises ClientBusy while other bodies fill the client's share.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"`Content-Encoding: {clip(encoding)}` is not read here. Send the body as it is."
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        data = await _read(request, held)
    except TimeoutError:
        message = f"The body took more than {BODY_SECONDS:g} s and came too slowly."
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
    except TooManyValues as error:
        raise too_many_values(str(error)) from None
    if not data:
        raise bad_request("The body is empty. Send a JSON object.", code="invalid_json")
    services = services_of(request)
    if len(data) <= MAX_BYTES_IN_PLACE:
        return _parse_body(data, model, services.metrics)
    return await services.in_thread(request, _parse_in_turn, data, model, services.metrics)


async def _read(request: Request, held: Held) -> bytearray:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise body_too_large(MAX_BODY_BYTES)
    body, values = bytearray(), ValueCount()
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(BODY_SECONDS) as timeout:
        async for chunk in request.stream():
            body += chunk
            held.add(len(chunk))
            timeout.reschedule(started + BODY_SECONDS + len(body) / MIN_BYTES_PER_SECOND)
            if len(body) > MAX_BODY_BYTES:
                raise body_too_large(MAX_BODY_BYTES)
            values.add(chunk)
    return body


def _parse_in_turn(
    data: bytearray, model: type[BodyT] | Callable[[dict[str, Any]], type[BodyT]], metrics: Metrics
) -> BodyT:
    with _PARSING:
        gc.disable()  # JSON has no cycles, and a collector that looks for them in a large body takes a second.
        try:
            return _parse_body(data, model, metrics)
        finally:
            gc.enable()


def _parse_body(
    data: bytearray, model: type[BodyT] | Callable[[dict[str, Any]], type[BodyT]], metrics: Metrics
) -> BodyT:
    raw = _parse_json(data)
    if not isinstance(raw, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return parse(raw, model if isinstance(model, type) else model(raw), metrics)


def _parse_json(body: bytes | bytearray) -> Any:
    """Return the objects of strict JSON (RFC 8259) in UTF-8.

    Raises ApiError 400, also for a key that comes twice in one object, because parsers disagree on which one counts.
    """
    try:
        return json_values.loads(body.decode(), _object)
    except RecursionError:
        reason = "it is nested too deeply"
    except (json.JSONDecodeError, UnicodeError) as error:
        reason = str(error)
    except ValueError:
        reason = "a number in it is too large, NaN or Infinity"
    raise bad_request(f"The body is not valid JSON: {reason}.", code="invalid_json")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = clip(Counter(key for key, _ in pairs).most_common(1)[0][0].encode(errors="replace").decode())
        raise bad_request(f"`{key}` appears twice in the same object. Send it once.", key)
    return fields


def parse(raw: dict[str, Any], model: type[BodyT], metrics: Metrics) -> BodyT:
    """Return the body as a `model` with its warnings. Refusals and unknown fields are counted in `metrics`. Raises
    ApiError 400 that names the field."""
    for refusal in REFUSED[model]:
        value: Any = raw
        for name in refusal.field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not refusal.harmless(value):
            metrics.count("request_refused", label=refusal.field)
            raise unsupported(refusal.why, refusal.field)
    try:
        body = model.model_validate(raw, context=ValueCount())  # of the JSON texts in it
    except ValidationError as error:
        raise _explain(error, raw) from None
    check_fields_together(body)
    body.warnings.extend(warn_of_unknown_fields(body, metrics))
    if isinstance(body, SamplingRequest):
        body.warnings.extend(clamp(body))
    return body


def _explain(error: ValidationError, raw: dict[str, Any]) -> ApiError:
    """Return the error that lies deepest. Of a union's branches that is the one the client most likely meant."""
    errors = [(_param(details, raw), details) for details in error.errors(include_url=False)[:_MAX_ERRORS]]
    param, details = max(errors, key=lambda item: _depth(item[0]))
    told = [other for name, other in errors if name == param]
    # Where one branch of a union has the right type, the others' types are beside the point.
    told = [other for other in told if not other["type"].endswith("_type")] or told
    reasons = dict.fromkeys(map(_reason, told))
    message = f"`{param}` {' or '.join(reasons)}." if param else f"The body is wrong: {details['msg']}."
    return bad_request(message, param or None, "missing_parameter" if details["type"] == "missing" else "invalid_value")


def _depth(param: str) -> tuple[int, list[int]]:
    steps = param.split(".")
    return len(steps), [int(step) for step in steps if step.isdecimal()]


def _param(details: ErrorDetails, raw: Any) -> str:
    """Return the dotted path of an error in the body, without the names of union branches that pydantic puts in."""
    path, value, loc = list[str](), raw, details["loc"]
    for depth, step in enumerate(loc):
        absent = details["type"] == "missing" and depth == len(loc) - 1
        if isinstance(value, dict) and (step in value or absent):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        path.append(clip(str(step)))
    return ".".join(path)


def _reason(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "is required"
    if details["type"] == "string_pattern_mismatch":
        return 'must be named by a token id, such as "42"'
    if details["type"] in ("too_long", "too_short"):
        return details["msg"].partition(" after validation")[0].replace("List should have", "must have")
    message = details["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|List) should", "must", message)
    message = re.sub(r"must be a valid dictionary( or instance of \w+)?", "must be an object", message)
    value = details["input"]
    scalar = isinstance(value, str | int | float) and len(str(value)) <= 40
    return f"{message}, not {msgspec.json.encode(value).decode()}" if scalar else message
