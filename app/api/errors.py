"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

import re
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from app import log
from app.engine_client.admission import Busy, ClientBusy
from app.engine_client.supervisor import EngineUnavailable
from app.metrics import Metrics

RETRY_AFTER_SECONDS = 2
CLIENT_CLOSED_REQUEST = 499
_ADVICE = (
    (r"/v1/responses/(?:input_tokens|compact)/?", "This server has no such endpoint."),
    (r"/v1/responses/.+", "Only GET and DELETE {root}/v1/responses/ID are served, with the ID of a response: resp_..."),
    (r".*/messages/?", "Anthropic's Messages API is not served. Use POST {root}/v1/chat/completions."),
    (r"/v1/(chat/completions|completions|responses|models)/", "Use {root}/v1/{0}, without the slash at the end."),
    (r".*?/(chat/completions|completions|responses|models)/?", "Use {root}/v1/{0}: a base_url ends with {root}/v1."),
    (r"/api/chat|/invocations", "Only OpenAI's API is served. Use POST {root}/v1/chat/completions."),
    (r"/(?:api/)?generate|/completion|/infill", "Only OpenAI's API is served. Use POST {root}/v1/completions."),
    (r"(?:/v1|/api)?/(?:embed|embeddings?|rerank|score)", "This model writes text: it embeds and ranks nothing."),
    (r"(?:/v1)?/tokenizer_info", "The tokenizer's files are not shown. Use POST {root}/tokenize."),
    (r"/props|/slots", "Use GET {root}/server_info, and GET {root}/get_load for the load."),
)
"""What to use instead of an unknown path: a wrong base_url is a common mistake, and so is another server's API."""


class Error(TypedDict):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: Error


class AnswerWarning(TypedDict):
    """What an answer says about a request that was answered all the same."""

    code: str
    message: str
    param: Annotated[str, Field(description="the field that changed nothing, or not what it says")]


@dataclass(eq=False)
class ApiError(Exception):
    """An error to answer with. `param` is the dotted path of the field at fault, like "messages.0.role"."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None

    @property
    def body(self) -> ErrorBody:
        error: Error = {
            "message": self.message,
            "type": "server_error" if self.status >= 500 else "invalid_request_error",
            "param": self.param,
            "code": self.code,
        }
        if self.status == 429:
            error["type"] = "rate_limit_error"
        return {"error": error}

    def response(self) -> Response:
        log.request.get({}).update(code=self.code, param=self.param)
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def clip(text: str, max_length: int = 64) -> str:
    """Return a client's text, short enough for a message."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    """Return the error of a field that this server or this model does not have."""
    return bad_request(message, param, "unsupported_parameter")


def body_too_large(limit: int) -> ApiError:
    message = f"The body is larger than {limit:,} bytes, the most that is read. Send less."
    return ApiError(413, message, code="request_too_large")


def too_many_values(which: str) -> ApiError:
    return ApiError(413, f"The body has {which}, the most that are read. Send less.", code="request_too_large")


def context_length_exceeded(
    param: str, limit: int, prompt: int, max_tokens: int | None = None, *, at_least: bool = False
) -> ApiError:
    """Return the error of a prompt of (`at_least`) `prompt` tokens that is too long, or is so with `max_tokens`."""
    if max_tokens is None:
        bound = "at least " if at_least else ""
        reason = f"your prompt has {bound}{prompt} tokens, which leaves no room for an answer. Shorten the prompt"
    else:
        total = f"{prompt + max_tokens}: {prompt} in the prompt plus {max_tokens} requested"
        reason = f"you asked for {total}. Reduce one of them"
    message = f"This model's maximum context length is {limit} tokens, and {reason}."
    return bad_request(message, param, "context_length_exceeded")


def unavailable(message: str, code: str) -> ApiError:
    """Return the 503 of an engine that is loading, draining or dead. The client may send the request again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def busy(message: str, code: str = "server_busy") -> ApiError:
    return ApiError(429, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def internal_error() -> ApiError:
    """Return the 500 of a bug."""
    return ApiError(500, "The server failed on this request; its log says why.", code="internal_error")


def install(app: FastAPI, metrics: Metrics) -> None:
    """Answer every exception of `app` in OpenAI's shape. Count the requests that the engine refuses in `metrics`."""

    @app.exception_handler(ApiError)
    async def answer(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(EngineUnavailable)
    @app.exception_handler(Busy)
    async def turn_away(request: Request, error: EngineUnavailable | Busy) -> Response:
        if isinstance(error, EngineUnavailable):
            refusal = unavailable(str(error), f"engine_{error.phase}")
        else:
            refusal = busy(str(error), "client_busy" if isinstance(error, ClientBusy) else "server_busy")
        metrics.count("requests_turned_away", label=refusal.code)
        return refusal.response()

    @app.exception_handler(HTTPException)
    async def answer_no_route(request: Request, error: HTTPException) -> Response:
        """Answer errors that Starlette raises: unknown paths and wrong methods."""
        headers = dict(error.headers or {})
        where = f"{request.method} {clip(request.scope['path'])}"
        if error.status_code == 404:
            hint = _advice(request.scope["path"], request.scope.get("root_path", ""))
            return ApiError(404, f"There is nothing at {where}. {hint}".rstrip(), code="not_found").response()
        methods = set(headers.get("Allow", "").split(", "))
        if methods & {"GET", "HEAD"}:
            methods |= {"GET", "HEAD"}
        allowed = headers["Allow"] = ", ".join(sorted(methods))
        origins = " Pages of other origins need --allowed-origins." if request.method == "OPTIONS" else ""
        message = f"{where} is not possible: use {allowed}.{origins}"
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()

    @app.exception_handler(ClientDisconnect)
    async def note_disconnect(request: Request, error: ClientDisconnect) -> Response:
        """Set the status for the access log, because the client has left."""
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def answer_bug(request: Request, error: Exception) -> Response:
        """Answer 500 to a bug. The log has the traceback."""
        return internal_error().response()


def _advice(path: str, root_path: str) -> str:
    """Return what to use instead of an unknown `path`, or ""."""
    for pattern, advice in _ADVICE:
        if match := re.fullmatch(pattern, path.removeprefix(root_path)):
            return advice.format(*match.groups(), root=root_path)
    return ""
