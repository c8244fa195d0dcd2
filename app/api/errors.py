"""Every error a client can get, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from functools import partial
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.client.admission import Busy, ClientBusy
from app.client.supervisor import EngineUnavailable
from app.metrics import Metrics

RETRY_AFTER_SECONDS = 2
_LONGEST_ECHO = 64
_CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """What to answer instead of a result. `param` names the field at fault, dotted ("messages.0.role")."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        else:
            kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = msgspec.json.encode(self.body)
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def clip(text: str, longest: int = _LONGEST_ECHO) -> str:
    """What a client sent, short enough to be said back."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def body_too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The body is larger than {limit:,} bytes, the most that is read. Send less.", code="request_too_large"
    )


def model_not_found(asked: str, served: list[str]) -> ApiError:
    names = ", ".join(f"`{name}`" for name in served)
    return ApiError(
        404, f"The model `{clip(asked)}` does not exist here. Served: {names}.", param="model", code="model_not_found"
    )


def context_length_exceeded(
    param: str, limit: int, prompt: int, asked: int | None = None, *, at_least: bool = False
) -> ApiError:
    """`asked` is the explicit limit on new tokens, if that is what makes it too long; `at_least` bounds `prompt`."""
    if asked is None:
        count = f"at least {prompt}" if at_least else f"{prompt}"
        given = f"your prompt has {count} tokens, which leaves no room for an answer. Shorten the prompt"
    else:
        given = f"you asked for {prompt + asked}: {prompt} in the prompt and {asked} to be made. Reduce one of them"
    return bad_request(
        f"This model's maximum context length is {limit} tokens, and {given}.", param, "context_length_exceeded"
    )


def unavailable(message: str, code: str) -> ApiError:
    """The engine is loading, draining or gone; the same request may be sent again later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def busy(message: str, code: str = "server_busy") -> ApiError:
    return ApiError(429, message, code=code, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def deadline_exceeded() -> ApiError:
    return ApiError(
        504,
        "The request was not done by its deadline (--request-timeout, X-Request-Timeout) and was ended. What came of "
        "the answer, if anything, is not all of it.",
        code="deadline_exceeded",
    )


def install(app: FastAPI, metrics: Metrics) -> None:
    """Answer every exception in OpenAI's shape. Requests that the engine refuses are counted in `metrics`."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(Busy, partial(_turned_away, metrics))
    app.add_exception_handler(EngineUnavailable, partial(_turned_away, metrics))
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _turned_away(metrics: Metrics, request: Request, error: Exception) -> Response:
    """Answer 429 or 503 to a request that the engine does not take now."""
    if isinstance(error, EngineUnavailable):
        refusal = unavailable(str(error), f"engine_{error.phase}")
    else:
        refusal = busy(str(error), "client_busy" if isinstance(error, ClientBusy) else "server_busy")
    metrics.turned_away(str(refusal.code))
    return refusal.response()


async def _http_exception(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    where = f"{request.method} {clip(request.scope['path'])}"
    if error.status_code == 404:
        answer = ApiError(404, f"There is nothing at {where}.", code="not_found")
    elif error.status_code == 405:
        methods = set(headers.get("Allow", "").split(", "))
        if methods & {"GET", "HEAD"}:  # Starlette names one route's alone, and HEAD has a route of its own here.
            methods |= {"GET", "HEAD"}
        allowed = headers["Allow"] = ", ".join(sorted(methods))
        answer = ApiError(405, f"{where} is not possible: use {allowed}.", code="method_not_allowed", headers=headers)
    else:
        phrase = error.detail or HTTPStatus(error.status_code).phrase
        answer = ApiError(error.status_code, phrase, headers=headers)
    return answer.response()


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the access log."""
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    """A bug of ours. The log has the traceback; the client gets nothing of it."""
    return ApiError(500, "The server failed on this request; its log says why.", code="internal_error").response()
