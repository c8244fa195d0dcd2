"""Text of /openapi.json. A route names the type of its answer, and the models of the body that it reads itself."""

from collections.abc import Set
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from app.api import schemas
from app.api.errors import ErrorBody
from app.api.responses_schemas import ResponsesRequest
from app.api.schemas import Body

STATUSES = {
    400: "The request is wrong, or asks for something this server does not have; `param` names it",
    401: "An API key is needed",
    403: "A web page of another origin asked",
    404: "No such model",
    408: "The body came too slowly, or not at all",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too many requests are in flight; see Retry-After",
    431: "The head is too large",
    500: "The engine failed on this request",
    503: "The model is loading, or the server is shutting down; see Retry-After",
    504: "The request was not done by its deadline: the server's, or the seconds in the header X-Request-Timeout",
}
GENERATING = tuple(STATUSES)
ENCODING = tuple(status for status in STATUSES if status not in (500, 504))
CHUNKS = "A server-sent event. Its data is a chunk in JSON, or [DONE] after the last chunk."
_BODIES: tuple[type[Body], ...] = (
    schemas.ChatCompletionRequest,
    schemas.CompletionRequest,
    ResponsesRequest,
    schemas.TokenizeRequest,
    schemas.TokenizeChatRequest,
    schemas.DetokenizeRequest,
)
_REFS = "#/components/schemas/{model}"


def route(
    summary: str,
    answer: Any,
    *statuses: int,
    body: tuple[type[Body], ...] = (),
    stream: str | None = None,
    loading: Any = None,
) -> dict[str, Any]:
    """Return keyword arguments for a route's decorator. Errors have these `statuses`. `stream` describes an event, if
    the answer may be streamed. While the engine is not there, the answer is a 503 of the type `loading`, if that is
    given."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody, "description": STATUSES[status]}
        for status in (*statuses, *([403] if 401 in statuses else []))
    }
    if stream:
        data = {"properties": {"data": {"type": "string"}}, "required": ["data"]}
        event = {"type": "object", "description": stream, **data}
        responses[200] = {"content": {"text/event-stream": {"schema": event}}}
    if loading:
        responses[503] = {"model": loading, "description": "Loading, draining or dead"}
    described: dict[str, Any] = {"summary": summary, "response_model": answer, "responses": responses}
    if body:
        refs = [{"$ref": _REFS.format(model=model.__name__)} for model in body]
        content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described


def describe(app: FastAPI, keys_needed: bool, admin_keys_needed: bool, open_paths: Set[str]) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with the bodies and the keys, which `open_paths` do not need."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, definitions = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REFS)
    document["components"]["schemas"] |= definitions["$defs"]
    names = [name for name, needed in (("key", keys_needed), ("admin_key", admin_keys_needed)) if needed]
    if names:
        document["components"]["securitySchemes"] = {name: {"type": "http", "scheme": "bearer"} for name in names}
    if admin_keys_needed:
        document["paths"]["/reset_prefix_cache"]["post"]["security"] = [{"admin_key": []}]
    if keys_needed:
        document["security"] = [{"key": []}]
        for path in open_paths & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document
