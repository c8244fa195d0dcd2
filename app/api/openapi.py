"""What /openapi.json says of bodies and answers. The routes read bodies by themselves, so the models are named here."""

from typing import Any, Literal

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from app.api.middleware import OPEN_PATHS
from app.api.schemas import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)

_REFS = "#/components/schemas/{model}"
_BODIES: tuple[type[Body], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
_STATUSES = {
    400: "Something in the request is wrong or cannot be had here; `param` names it",
    401: "An API key is needed",
    404: "No such model",
    408: "The body did not come, or too slowly",
    413: "The body is too large",
    415: "The body is packed",
    429: "As many requests are in flight as may be; see Retry-After",
    431: "The head is too large",
    500: "The engine failed on this request",
    503: "The model is loading, or the server is going down; see Retry-After",
    504: "The request was not done in the time that the server, or the header X-Request-Timeout in seconds, gives it",
}


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Error


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CalledFunctionBody(BaseModel):
    name: str
    arguments: str


class CalledToolBody(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunctionBody


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = Field(default="", description="absent unless a reasoning parser found some")
    tool_calls: list[CalledToolBody] = Field(default=[], description="absent unless the model called something")


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class Progress(BaseModel):
    stage: str
    done: int
    total: int


class State(BaseModel):
    status: str
    reason: str = ""
    progress: Progress | None = None


class Success(BaseModel):
    success: Literal[True]


_EVENT = {
    "type": "object",
    "description": "One of the server-sent events: its data is a chunk in JSON, or [DONE] behind the last one.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def _route(
    summary: str, answer: type[BaseModel], *statuses: int, bodies: tuple[type[Body], ...] = (), streams: bool = False
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator."""
    success: dict[str, Any] = {"model": answer, "description": "Done"}
    if streams:
        success["content"] = {"text/event-stream": {"schema": _EVENT}}
    responses: dict[int | str, Any] = {200: success}
    responses |= {status: {"model": ErrorBody, "description": _STATUSES[status]} for status in statuses}
    route: dict[str, Any] = {"summary": summary, "responses": responses}
    if bodies:
        refs = [{"$ref": _REFS.format(model=body.__name__)} for body in bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        route["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
    return route


_ALL = (400, 401, 404, 408, 413, 415, 429, 431, 500, 503, 504)
_NO_ENGINE = (400, 401, 404, 408, 413, 415, 429, 431, 503)
CHAT = _route("Answer a conversation", ChatCompletion, *_ALL, bodies=(ChatCompletionRequest,), streams=True)
COMPLETIONS = _route("Go on with a text", Completion, *_ALL, bodies=(CompletionRequest,), streams=True)
MODELS = _route("The names of the model", ModelList, 401)
MODEL = _route("One of them", ModelCard, 401, 404)
TOKENIZE = _route("Text to tokens", Tokens, *_NO_ENGINE, bodies=(TokenizeRequest, TokenizeChatRequest))
DETOKENIZE = _route("Tokens to text", Text, *_NO_ENGINE, bodies=(DetokenizeRequest,))
VERSION = _route("This server's version", Version, 401)
RESET_PREFIX_CACHE = _route("Forget all cached prefixes", Success, 401, 429, 503)
READY: dict[str, Any] = {
    "summary": "Whether requests are taken",
    "responses": {200: {"model": State}, 503: {"model": State, "description": "Loading, draining or dead"}},
}
HEALTH: dict[str, Any] = {
    "summary": "Whether the engine works",
    "response_class": Response,
    "responses": {503: {"model": State, "description": "Loading or dead"}},
}
METRICS: dict[str, Any] = {"summary": "Metrics for Prometheus", "response_class": PlainTextResponse}


_EVENT = {
    "type": "object",
    "description": "One of the server-sent events: its data is a chunk in JSON, or [DONE] behind the last one.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def describe(app: FastAPI, keys_needed: bool, admin_keys_needed: bool) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's own, with the bodies, and without the 422 that is never sent."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFS)
    schemas = document["components"]["schemas"]
    schemas.update(bodies["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemes = {"key": keys_needed, "admin_key": admin_keys_needed}
    if any(schemes.values()):
        bearer = {"type": "http", "scheme": "bearer"}
        document["components"]["securitySchemes"] = {name: bearer for name, needed in schemes.items() if needed}
    if admin_keys_needed:
        document["paths"]["/reset_prefix_cache"]["post"]["security"] = [{"admin_key": []}]
    if keys_needed:
        document["security"] = [{"key": []}]
        for path in OPEN_PATHS & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document
