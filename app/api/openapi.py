"""Text of /openapi.json. The routes read their bodies themselves, so their models and answers are named here."""

from typing import Any, Literal, get_type_hints

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from pydantic import Field, create_model
from pydantic.json_schema import models_json_schema

from app.api import schemas as bodies
from app.api.middleware import OPEN_PATHS
from app.api.responses_schemas import ResponsesRequest
from app.api.schemas import Body
from app.messages import EngineInfo

_REFS = "#/components/schemas/{model}"
_STATUSES = {
    400: "The request is wrong, or asks for something this server does not have; `param` names it",
    401: "An API key is needed",
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


def _shape(name: str, /, **fields: Any) -> Any:
    """Return the model of an answer. A field is a type, or a type and its Field if it may be absent."""
    definitions: dict[str, Any] = {
        key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in fields.items()
    }
    return create_model(name, **definitions)


def _list_of(kind: Any) -> Any:
    return list[kind]


_Error = _shape("Error", message=str, type=str, param=str | None, code=str | None)
_ErrorBody = _shape("ErrorBody", error=_Error)
_PromptTokensDetails = _shape("PromptTokensDetails", cached_tokens=int)
_CompletionTokensDetails = _shape("CompletionTokensDetails", reasoning_tokens=int)
_Usage = _shape(
    "UsageBody",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=_PromptTokensDetails,
    completion_tokens_details=_CompletionTokensDetails,
)
_Function = _shape("CalledFunctionBody", name=str, arguments=str)
_ToolCall = _shape("CalledToolBody", id=str, type=Literal["function"], function=_Function)
_Message = _shape(
    "AnswerMessage",
    role=Literal["assistant"],
    content=str | None,
    reasoning_content=(str, Field(default="", description="absent unless a reasoning parser found some")),
    tool_calls=(_list_of(_ToolCall), Field(default=[], description="absent unless the model called a tool")),
)
_STOP = {"stop_reason": str | int | None, "matched_stop": str | int | None}
_ChatChoice = _shape(
    "ChatChoice",
    index=int,
    message=_Message,
    logprobs=None,
    finish_reason=Literal["stop", "length", "tool_calls"],
    **_STOP,
)
_TextChoice = _shape("TextChoice", index=int, text=str, logprobs=None, finish_reason=Literal["stop", "length"], **_STOP)
_Answer = {"id": str, "created": int, "model": str, "usage": _Usage}
_Warning = _shape(
    "Warning",
    code=str,
    message=str,
    param=(str, Field(description="the field that changed nothing, or not what it says")),
)
_WARNINGS: tuple[Any, Any] = (_list_of(_Warning), Field(default=[], description="absent if there are none"))
_ChatCompletion = _shape(
    "ChatCompletion", object=Literal["chat.completion"], choices=_list_of(_ChatChoice), warnings=_WARNINGS, **_Answer
)
_Completion = _shape(
    "Completion", object=Literal["text_completion"], choices=_list_of(_TextChoice), warnings=_WARNINGS, **_Answer
)
_OutputPart = _shape("OutputPart", type=Literal["output_text", "reasoning_text"], text=str)
_OutputItem = _shape(
    "OutputItem",
    id=str,
    type=Literal["message", "function_call", "reasoning"],
    status=Literal["completed", "incomplete"],
    content=(_list_of(_OutputPart), Field(default=[], description="of a message and of reasoning")),
    call_id=(str, Field(default="", description="of a function_call, with its name and its arguments")),
    name=(str, ""),
    arguments=(str, ""),
)
_ResponseUsage = _shape(
    "ResponseUsageBody",
    input_tokens=int,
    input_tokens_details=_PromptTokensDetails,
    output_tokens=int,
    output_tokens_details=_CompletionTokensDetails,
    total_tokens=int,
)
_IncompleteDetails = _shape("IncompleteDetails", reason=Literal["max_output_tokens"])
_Response = _shape(
    "ResponseBody",
    id=str,
    object=Literal["response"],
    created_at=int,
    model=str,
    status=Literal["completed", "incomplete"],
    incomplete_details=_IncompleteDetails | None,
    output=_list_of(_OutputItem),
    usage=_ResponseUsage,
    metadata=dict[str, str],
    store=Literal[False],
    warnings=_WARNINGS,
)
_ModelCard = _shape(
    "ModelCard", id=str, object=Literal["model"], created=int, owned_by=str, root=str, max_model_len=int | None
)
_ModelList = _shape("ModelList", object=Literal["list"], data=_list_of(_ModelCard))
_Tokens = _shape(
    "Tokens", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None, warnings=_WARNINGS
)
_Text = _shape("Text", prompt=str)
_Version = _shape("Version", version=str)
_NAMED = {"model_path": str, "served_model_name": str, "tp_size": int, "dp_size": int, "draft_block_size": int}
_EngineInfo = _shape("EngineInfoBody", **get_type_hints(EngineInfo), **_NAMED, version=str, settings=dict[str, str])
_ModelInfo = _shape(
    "ModelInfo", model_path=str, is_generation=bool, model_type=str | None, architectures=list[str] | None
)
_Load = _shape("Load", dp_rank=int, num_reqs=int, num_waiting_reqs=int, num_tokens=int)
_Rendered = _shape("RenderedPrompt", model=str, token_ids=list[int])
_Success = _shape("Success", success=Literal[True])
_Progress = _shape("Progress", stage=str, seconds=int, done=int, total=int)
_State = _shape("State", status=str, reason=(str, ""), progress=(_Progress | None, None))
_EVENT = {
    "type": "object",
    "description": "A server-sent event. Its data is a chunk in JSON, or [DONE] after the last chunk.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def _route(
    summary: str, answer: Any, *statuses: int, bodies: tuple[type[Body], ...] = (), streams: bool = False
) -> dict[str, Any]:
    """Return keyword arguments for a route's decorator."""
    success: dict[str, Any] = {"model": answer, "description": "Done"}
    if streams:
        success["content"] = {"text/event-stream": {"schema": _EVENT}}
    errors = {status: {"model": _ErrorBody, "description": _STATUSES[status]} for status in statuses}
    route: dict[str, Any] = {"summary": summary, "responses": {200: success} | errors}
    if bodies:
        refs = [{"$ref": _REFS.format(model=body.__name__)} for body in bodies]
        content = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
        route["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return route


_CHAT, _TEXT, _RESPONSES = (bodies.ChatCompletionRequest,), (bodies.CompletionRequest,), (ResponsesRequest,)
_TOKENIZE, _DETOKENIZE = (bodies.TokenizeRequest, bodies.TokenizeChatRequest), (bodies.DetokenizeRequest,)
_BODIES: tuple[type[Body], ...] = (*_CHAT, *_TEXT, *_RESPONSES, *_TOKENIZE, *_DETOKENIZE)
_ALL = tuple(_STATUSES)
_NO_ENGINE = tuple(status for status in _STATUSES if status not in (500, 504))
CHAT = _route("Answer a conversation", _ChatCompletion, *_ALL, bodies=_CHAT, streams=True)
RESPONSES = _route("Answer a conversation of items", _Response, *_ALL, bodies=_RESPONSES, streams=True)
COMPLETIONS = _route("Continue a text", _Completion, *_ALL, bodies=_TEXT, streams=True)
MODELS = _route("The names of the model", _ModelList, 401)
MODEL = _route("One of them", _ModelCard, 401, 404)
TOKENIZE = _route("Text to tokens", _Tokens, *_NO_ENGINE, bodies=_TOKENIZE)
DETOKENIZE = _route("Tokens to text", _Text, *_NO_ENGINE, bodies=_DETOKENIZE)
VERSION = _route("This server's version", _Version, 401)
RESET_PREFIX_CACHE = _route("Forget all cached prefixes", _Success, 401, 429, 503)
RENDER_CHAT = _route("The prompt of a conversation", _Rendered, *_NO_ENGINE, bodies=_CHAT)
RENDER_COMPLETIONS = _route("The tokens of prompts", _list_of(_Rendered), *_NO_ENGINE, bodies=_TEXT)

_LOADING = {503: {"model": _State, "description": "Loading, draining or dead"}}
READY: dict[str, Any] = {"summary": "Ready for requests", "responses": {200: {"model": _State}} | _LOADING}
HEALTH: dict[str, Any] = {"summary": "Health of the engine", "response_class": Response, "responses": _LOADING}
SERVER_INFO = _route("Sizes of the engine, and what was read from the draft's config.json", _EngineInfo, 401)
MODEL_INFO = _route("The target's folder and family", _ModelInfo, 401)
LOAD = _route("Requests, and tokens on KV pages", _list_of(_Load), 401)
for _facts in (SERVER_INFO, MODEL_INFO, LOAD):
    _facts["responses"] |= _LOADING
METRICS: dict[str, Any] = {"summary": "Metrics for Prometheus", "response_class": PlainTextResponse}


def describe(app: FastAPI, keys_needed: bool, admin_keys_needed: bool) -> dict[str, Any]:
    """Return FastAPI's OpenAPI document with the bodies and the keys, and without the 422 that is never sent."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, definitions = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFS)
    schemas = document["components"]["schemas"]
    schemas.update(definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    names = [name for name, needed in (("key", keys_needed), ("admin_key", admin_keys_needed)) if needed]
    if names:
        document["components"]["securitySchemes"] = {name: {"type": "http", "scheme": "bearer"} for name in names}
    if admin_keys_needed:
        document["paths"]["/reset_prefix_cache"]["post"]["security"] = [{"admin_key": []}]
    if keys_needed:
        document["security"] = [{"key": []}]
        for path in OPEN_PATHS & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document
