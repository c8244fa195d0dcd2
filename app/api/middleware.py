"""ASGI layers around every request: its id and the access log, CORS, and the gate that judges its head."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import log
from app.api.errors import CLIENT_CLOSED_REQUEST, ApiError, clip, unavailable
from app.engine_client.client import EngineClient
from app.metrics import Metrics

logger = logging.getLogger("app.access")

_PROBES = {"/live", "/ready", "/health", "/ping", "/metrics"}
OPEN_PATHS = {"/", "/docs", "/markdown-it.js", "/openapi.json", "/live", "/ready", "/health", "/ping"}
_MAX_LOGGED = 128  # characters of what a client chose: a path, a header, and by X-Forwarded-For its own address
MAX_HEADERS = 100
MAX_HEAD_BYTES = 2**15
_ROUTING_HEADERS = (
    "x-gateway-inference-objective",
    "x-gateway-inference-fairness-id",
    "x-gateway-destination-endpoint",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
)
"""Headers that Kubernetes' endpoint pickers add. They change nothing here, and are logged."""
_LOCAL_NAME = re.compile(r"[^.]*\.?|.*\.(?:localhost|local|internal|\d+)\.?|.*:.*", re.IGNORECASE)
"""Hosts that no stranger can point at another machine: IP addresses, and names without a domain or in a private one."""
_STORED = re.compile(r"(/v1/responses/+)[^/]+", re.IGNORECASE)
"""The path of a stored response, whose id is in no log: without keys it is all that opens it."""
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Layer that gives every request an id, returns it as X-Request-Id, logs the request, and counts its status.

    The client's X-Request-Id is used if it has 1 to 128 printable ASCII characters. While the server drains, each
    answer closes its connection, so that the client goes to another replica. It is the outermost layer, so a bug's
    500 has the id too.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, is_draining: Callable[[], bool] = lambda: False) -> None:
        self._app = app
        self._metrics = metrics
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identifier = Headers(scope=scope).get("x-request-id", "")
        if not _SAFE_ID.fullmatch(identifier):
            identifier = uuid.uuid4().hex
        log.request.set(noted := {"request_id": identifier})
        started = time.monotonic()
        status, complete = 0, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = identifier
                if self._is_draining():
                    headers["Connection"] = "close"
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            try:
                await send(message)
            except RuntimeError as error:  # uvloop raises this if the client has left.
                if "the handler is closed" not in str(error):
                    raise

        try:
            await self._app(scope, receive, send_with_id)
            if not complete:  # A stream ends like that when its client leaves.
                status = CLIENT_CLOSED_REQUEST
        except Exception:
            # Starlette answers 500 and raises again. A complete answer leaves the connection usable. For an incomplete
            # one uvicorn closes the connection.
            if not complete:
                raise
            logger.exception("a bug answered %s %s with 500", scope["method"], _logged_path(scope))
        except asyncio.CancelledError:
            # uvicorn cancels running requests at its shutdown. A client without an answer gets one.
            if status:
                raise
            answer = unavailable("The server is shutting down.", "engine_draining").response()
            await answer(scope, receive, send_with_id)
        finally:
            self._metrics.count("http_responses", label=str(status or 500))
            _log(scope, status or 500, time.monotonic() - started, noted)


def _log(scope: Scope, status: int, seconds: float, noted: Mapping[str, Any]) -> None:
    """Log a request with what was noted of it. In the text, names and values of a client are quoted."""
    headers = Headers(scope=scope)
    more = {"client": scope["client"][0][:_MAX_LOGGED]} if scope.get("client") else {}
    more |= {name: value for name, value in noted.items() if value is not None and name != "request_id"}
    more |= {name: value[:_MAX_LOGGED] for name in _ROUTING_HEADERS if (value := headers.get(name))}
    head = {
        "method": scope["method"],
        "path": _logged_path(scope),
        "status": status,
        "ms": round(1000 * seconds, 1),
    }
    level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
    text = "".join(f" {name}={quote(str(value), safe='/:,')}" for name, value in more.items())
    logger.log(level, "%s %s %d %.1f ms%s", *head.values(), text, extra={"fields": head | more})


def _logged_path(scope: Scope) -> str:
    return quote(_STORED.sub(r"\1ID", scope["path"])[:_MAX_LOGGED])


def key_digests(keys: Sequence[str]) -> list[bytes]:
    """Return the digests of the configured keys, which `check_key` compares. They are made once, at startup."""
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def check_key(headers: Headers, digests: Sequence[bytes], what: str) -> None:
    """Raise ApiError 401, which says that `what` is needed, unless the headers have a key of one of the digests.

    A comparison takes the same time for every key that a client sends.
    """
    sent = sent_key(headers)
    matches = [hmac.compare_digest(sent, digest) for digest in digests]
    if not any(matches):
        message = f"{what} is needed: send the header `Authorization: Bearer KEY`, `x-api-key` or `api-key`."
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def sent_key(headers: Headers) -> bytes:
    """Return the digest of the request's key, without the spaces around it: of a Bearer token, or else of the header of
    Anthropic's clients or of Azure's. An empty one counts as absent."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    sent = (token if kind.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("api-key", ""))
    key = next(filter(None, (key.strip(" ") for key in sent)), "")
    return hashlib.sha256(key.encode("latin-1")).digest()


class BrowserGuard:
    """Check of requests that a browser sends for a page of another origin, which may be any page that its user opens.

    Such a page cannot read an answer without CORS, but the request would be served all the same. Pages of `origins`
    may ask ("*": all), and so may the server's own.

    With `is_local` a page may not ask by its own name either, which its owner can point at this machine (DNS
    rebinding): the host must be an IP address, a name of a private network, or the host of one of `origins`.
    """

    def __init__(self, origins: Collection[str], is_local: bool) -> None:
        self._origins = frozenset(origins)
        self._hosts = {urlsplit(origin).hostname for origin in origins}
        self._checks_host = is_local and "*" not in self._origins

    def check(self, method: str, headers: Headers) -> None:
        """Raise ApiError 403 for a request of a page that may not ask."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if self._checks_host and not _LOCAL_NAME.fullmatch(name := _host_name(host)) and name not in self._hosts:
            raise ApiError(
                403,
                f"The `Host` is {clip(host)}, and a server on a loopback address without a key answers only to local "
                "names, because a web page can bring its own name here. Use http://127.0.0.1, or start the server with "
                f"--api-key, or with --allowed-origins http://{clip(host)}.",
                code="host_refused",
            )
        if method not in ("GET", "OPTIONS") and not self._may_post(origin, host, headers.get("sec-fetch-site")):
            raise ApiError(
                403,
                f"A page of {clip(origin) or 'another site'} may not send requests here. To allow it, start the server "
                f"with --allowed-origins {clip(origin) or 'ORIGIN'}.",
                code="origin_refused",
            )

    def _may_post(self, origin: str, host: str, site: str | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        if origin and origin != "null" and not origin.startswith(("http://", "https://")):
            return True  # a program's: app://, vscode-webview://, chrome-extension://
        if site is not None:  # The browser knows, also behind a proxy that sends another Host.
            return site in ("same-origin", "none")
        # A proxy may leave the port out.
        return not origin or origin.partition("://")[2] == host or _host_name(origin.partition("://")[2]) == host


def is_loopback(host: str) -> bool:
    """Return True for an address on which only this machine can be reached."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _host_name(host: str) -> str:
    """Return the lower-case name in a Host header, without its port. A malformed one is its own name."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host


class Gate:
    """Layer that answers 431 to a head with too many headers or bytes, 400 to one that a proxy may frame otherwise, 403
    to a page that `guard` refuses, and 401 to a request without one of `keys`.

    `open_paths` need no key: OPEN_PATHS, because probes have none, and pages show only what the server can do. With a
    proxy's prefix /llm, GET /llm is redirected to /llm/, because the page's links are relative.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        root_path: str,
        open_paths: Collection[str] = OPEN_PATHS,
        guard: BrowserGuard | None = None,
    ) -> None:
        self._app = app
        self._guard = guard or BrowserGuard((), is_local=False)
        self._digests = key_digests(keys)
        self._root_path = root_path
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # It is answered like GET. The HTTP server leaves the body out.
            scope = {**scope, "method": "GET"}
        app, headers = self._app, scope["headers"]
        path = scope["path"].removeprefix(self._root_path)
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        try:
            if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
                raise head_too_large()
            _check_framing(scope)
            if not path and scope["method"] == "GET":
                app = RedirectResponse(f"{self._root_path}/")
            else:
                if path not in OPEN_PATHS:
                    self._guard.check(scope["method"], Headers(scope=scope))
                if self._digests and path not in self._open_paths:
                    check_key(Headers(scope=scope), self._digests, "A valid API key")
        except ApiError as refusal:
            app = refusal.response()
        await app(scope, receive, send)


def _check_framing(scope: Scope) -> None:
    """Raise ApiError 400 for a body whose end two readers may see in two places: RFC 9112, 6.1.

    The connection is closed, because what follows may be a request that a proxy took for a part of this one.
    """
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        message = "A request has `Content-Length` or `Transfer-Encoding`, and this one has both. Send one of them."
    elif scope["http_version"] == "1.0":
        message = "HTTP/1.0 has no `Transfer-Encoding`. Send `Content-Length`, or HTTP/1.1."
    else:
        return
    raise ApiError(400, message, code="invalid_http", headers={"Connection": "close"})


class Hold:
    """Layer that lets a request wait while the engine is loading, for some seconds at most."""

    def __init__(self, app: ASGIApp, engine: EngineClient, seconds: float) -> None:
        self._app = app
        self._engine = engine
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and self._engine.state.phase == "loading":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.loaded(), self._seconds)
        await self._app(scope, receive, send)


def head_too_large() -> ApiError:
    return ApiError(
        431,
        f"A request may have {MAX_HEADERS} headers, and {MAX_HEAD_BYTES:,} bytes of them with its path. Send less.",
        code="headers_too_large",
        headers={"Connection": "close"},
    )


class Cors(CORSMiddleware):
    """Starlette's layer for CORS, with errors in OpenAI's shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        kept = {name: text for name, text in response.headers.items() if not name.startswith("content-")}
        return ApiError(400, f"{bytes(response.body).decode()}.", code="cors_refused", headers=kept).response()
