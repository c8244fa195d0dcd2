"""Bodies to requests: their size, their JSON, their refusals, and errors that name the field at fault."""

import asyncio
import gc
import json
import re
from collections import Counter
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.api.errors import ApiError, bad_request, body_too_large, busy, clip
from app.api.refusals import find_refusal, refusals_of
from app.api.schemas import Body
from app.api.services import services_of
from app.api.validation import check_together
from app.metrics import Metrics

MAX_BODY_BYTES = 8 * 2**20
BODY_SECONDS = 20.0
SLOWEST_BYTES_A_SECOND = 2**14
MOST_BYTES_BEING_READ = 2**28
_MOST_ERRORS = 16

BodyT = TypeVar("BodyT", bound=Body)


async def read_json(request: Request) -> dict[str, Any]:
    """The body. Raises ApiError: 413 above MAX_BODY_BYTES, 415 if it is packed, 408 if it does not come, or slower than
    SLOWEST_BYTES_A_SECOND after BODY_SECONDS, 429 if too many others come now, 400 if it is not a JSON object."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"`Content-Encoding: {clip(encoding)}` is not read here. Send the body as it is."
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        body = await _read_body(request)
    except TimeoutError:
        message = f"The body took more than {BODY_SECONDS:g} s and came too slowly."
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
    if not body:
        raise bad_request("The body is empty. Send a JSON object.", code="invalid_json")
    try:
        raw = _decode(body)
        _refuse_repeated_keys(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is not valid JSON: it is nested too deeply.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return raw


def parse(raw: dict[str, Any], model: type[BodyT], metrics: Metrics) -> BodyT:
    """The body as a `model`. Raises ApiError 400 naming the field at fault. A refusal is counted in `metrics`."""
    refusal = find_refusal(raw, refusals_of(model))
    if refusal is not None:
        metrics.request_refused(refusal.field)
        raise bad_request(refusal.why, refusal.field, "unsupported_parameter")
    try:
        parsed = model.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, raw) from None
    check_together(parsed)
    return parsed


async def _read_body(request: Request) -> bytes:
    """At most MAX_BODY_BYTES, whether the client says how much is coming or not. Raises ApiError 413."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise body_too_large(MAX_BODY_BYTES)
    body = bytearray()
    reading = services_of(request).bodies
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(BODY_SECONDS) as patience:
            async for chunk in request.stream():
                body += chunk
                reading.size += len(chunk)
                patience.reschedule(started + BODY_SECONDS + len(body) / SLOWEST_BYTES_A_SECOND)
                if len(body) > MAX_BODY_BYTES:
                    raise body_too_large(MAX_BODY_BYTES)
                if reading.size > MOST_BYTES_BEING_READ:
                    raise busy("Too many bodies are being sent at once. Try again shortly.")
            return bytes(body)
    finally:
        reading.size -= len(body)


def _decode(body: bytes) -> Any:
    """JSON to objects. They hold no cycles, and millions of them would keep the collector busy for seconds."""
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        gc.enable()


def _refuse_repeated_keys(body: bytes) -> None:
    """Raises ApiError 400 where a key stands twice in one object: which of the two counts, parsers disagree."""

    def look(pairs: list[tuple[str, Any]]) -> None:
        if len({key for key, _ in pairs}) < len(pairs):
            key = clip(Counter(key for key, _ in pairs).most_common(1)[0][0])
            raise bad_request(f"`{key}` stands twice in one object of the body. Send it once.", key)

    gc.disable()
    try:
        json.loads(body, object_pairs_hook=look, parse_int=str, parse_float=str)
    finally:
        gc.enable()


def _explain(error: ValidationError, raw: dict[str, Any]) -> ApiError:
    """The error that came furthest: of a union's branches, the one that the client most likely meant."""
    found = [(_param(details, raw), details) for details in error.errors(include_url=False)[:_MOST_ERRORS]]
    param, details = max(found, key=lambda item: _progress(item[0]))
    branches = dict.fromkeys(_complaint(other) for name, other in found if name == param)
    message = f"`{param}` {' or '.join(branches)}." if param else f"The body is wrong: {details['msg']}."
    return bad_request(message, param or None, "missing_parameter" if details["type"] == "missing" else "invalid_value")


def _progress(param: str) -> tuple[int, list[int]]:
    steps = param.split(".")
    return len(steps), [int(step) for step in steps if step.isdecimal()]


def _param(details: ErrorDetails, raw: Any) -> str:
    """The dotted path of an error in the body, without the names of union branches that pydantic puts in."""
    path: list[str] = []
    value = raw
    loc = details["loc"]
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


def _complaint(details: ErrorDetails) -> str:
    if details["type"] == "missing":
        return "is required"
    if details["loc"][-1] == "[key]":
        return 'must be named by a token id, such as "42"'
    if details["type"] in ("too_long", "too_short"):
        return details["msg"].partition(" after validation")[0].replace("List should have", "must have")
    message = details["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|List) should", "must", message)
    message = re.sub(r"must be a valid dictionary( or instance of \w+)?", "must be an object", message)
    shown = details["input"]
    scalar = isinstance(shown, str | int | float) and len(str(shown)) <= 40
    return f"{message}, not {msgspec.json.encode(shown).decode()}" if scalar else message
