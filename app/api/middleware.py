"""Around every request: its id, taken or made, one line in the access log, the API key, and a proxy's prefix."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import ApiError, unavailable
from app.client.client import EngineClient
from app.log import request_id

logger = logging.getLogger("app.access")

_PROBES = {"/live", "/ready", "/health", "/metrics"}
OPEN_PATHS = {"/", "/docs", "/openapi.json", "/live", "/ready", "/health"}
MOST_HEADERS = 100
MOST_HEAD_BYTES = 2**15
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Takes X-Request-Id (1 to 128 printable ASCII characters) or makes one, returns it, and logs the request.

    This wraps the application from outside, so that even the answer to a bug of ours carries the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        identifier = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(identifier)
        started = time.monotonic()
        status = 0
        complete = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = identifier
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            try:
                await send(message)
            except RuntimeError as error:  # uvloop's way to say that the client hung up while uvicorn was answering.
                if "the handler is closed" not in str(error):
                    raise

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # Starlette answers 500 and raises again. Once the client has its answer the connection may live on; a
            # response broken off in the middle must end with it, which is what uvicorn does.
            if not complete:
                raise
            logger.exception("a bug of ours answered %s %s with 500", scope["method"], quote(scope["path"]))
        except asyncio.CancelledError:
            # uvicorn ends what still runs when it goes down. A client that has no answer yet gets one.
            if status:
                raise
            answer = unavailable("The server is shutting down.", "engine_draining").response()
            await answer(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            milliseconds = 1000 * (time.monotonic() - started)
            path = quote(scope["path"])  # A path may hold anything, line ends too.
            logger.log(level, "%s %s %d %.1f ms", scope["method"], path, status, milliseconds)
            request_id.reset(token)


class Keys:
    """Keys of which a request may bear one. Comparing takes the same time whatever was sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, headers: Headers, what: str) -> None:
        """Raises ApiError 401, which says that `what` is needed, unless the headers bear one of the keys."""
        kind = headers.get("authorization", "").partition(" ")[0]
        given = shown_key(headers)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                f"{what} is needed: send the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def shown_key(headers: Headers) -> bytes:
    """The digest of the key that a request shows, whatever case and spaces are around it."""
    return _digest(headers.get("authorization", "").partition(" ")[2].strip(" ").encode("latin-1"))


class ApiKeys:
    """Lets only requests through that bear one of `keys`, but for OPEN_PATHS: probes have no key, and pages tell
    nothing of this server but what it can do."""

    def __init__(self, app: ASGIApp, keys: Keys, root_path: str = "") -> None:
        self._app = app
        self._keys = keys
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(self._root_path) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            self._keys.check(Headers(scope=scope), "A valid API key")
        except ApiError as refusal:
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class HeadLimits:
    """Answers 431 to a head that no client of ours has reason to send."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = scope["headers"]
            size = sum(len(name) + len(value) for name, value in headers)
            size += len(scope["raw_path"]) + len(scope["query_string"])
            if len(headers) > MOST_HEADERS or size > MOST_HEAD_BYTES:
                await head_too_large().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def head_too_large() -> ApiError:
    return ApiError(
        431,
        f"A request may have {MOST_HEADERS} headers, and {MOST_HEAD_BYTES:,} bytes of them with its path. Send less.",
        code="headers_too_large",
        headers={"Connection": "close"},
    )


class CloseWhileDraining:
    """While the server drains, every answer ends its connection: the client's next request goes to another replica, and
    none is on its way when the connection closes."""

    def __init__(self, app: ASGIApp, engine: EngineClient) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._engine.state.phase == "draining":
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)


class Cors(CORSMiddleware):
    """Starlette's, with refusals in OpenAI's shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        refusal = ApiError(400, f"{bytes(response.body).decode()}.", code="cors_refused").response()
        for name, value in response.headers.items():
            if name not in ("content-length", "content-type"):
                refusal.headers[name] = value
        return refusal


class RootPath:
    """Sends `GET /llm` on to `/llm/`, where the page's relative links work, if /llm is what a proxy puts in front."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bare = scope["type"] == "http" and scope["path"] == self._root_path and scope["method"] in ("GET", "HEAD")
        app = RedirectResponse(f"{self._root_path}/") if bare else self._app
        await app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
