"""Endpoints that generate nothing: models, tokens, probes, facts, metrics, cached prefixes, and two pages."""

import re
import time
from base64 import b64encode
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ConfigDict
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from app.api import openapi, prompts
from app.api.answers import Warnings, json_response
from app.api.body import read_body
from app.api.errors import RETRY_AFTER_SECONDS
from app.api.middleware import check_key
from app.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from app.api.services import Services, services_of
from app.engine_client.client import EngineState
from app.messages import EngineInfo

router = APIRouter()

_OF_FILES = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
_NAMED = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Version(TypedDict):
    version: str


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    warnings: NotRequired[Warnings]


class Text(TypedDict):
    prompt: str
    warnings: NotRequired[Warnings]


class Success(TypedDict):
    success: Literal[True]


class LoadProgress(TypedDict):
    stage: str
    seconds: int
    done: int
    total: int


class State(TypedDict):
    status: str
    reason: NotRequired[str]
    progress: NotRequired[LoadProgress]


@dataclass(frozen=True, kw_only=True)
class ServerInfo(EngineInfo):
    """Facts about the loaded engine, some under SGLang's names too, and the settings that are not default."""

    __pydantic_config__: ClassVar = ConfigDict(json_schema_serialization_defaults_required=True)

    model: str  # as it was asked for: demo, smollm2, a folder, a file or an id
    model_path: str
    served_model_name: str
    settings: dict[str, str]
    tp_size: int
    dp_size: int
    draft_block_size: int
    version: str


class ModelInfo(TypedDict):
    model_path: str
    is_generation: bool
    model_type: str | None
    architectures: list[str] | None


class Load(TypedDict):
    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


@router.get("/v1/models", **openapi.route("The names of the model", ModelList, 401))
async def models(request: Request) -> Response:
    services = services_of(request)
    return json_response(ModelList(object="list", data=[_card(services, name) for name in services.model_names]))


@router.get("/v1/models/{name:path}", **openapi.route("One of them", ModelCard, 401, 404), openapi_extra=_NAMED)
async def model(request: Request) -> Response:
    services = services_of(request)
    if not (name := request.path_params["name"]):
        raise HTTPException(404)  # /v1/models/, which is no model's path
    return json_response(_card(services, services.served_name(name)))


@router.get("/version", **openapi.route("This server's version", Version, 401))
async def server_version() -> Response:
    return json_response(Version(version=version("dflash-server")))


def _card(services: Services, name: str) -> ModelCard:
    info = services.engine.state.info
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "dflash-server",
        "root": services.model_names[0],
        "max_model_len": info.max_model_len if info else None,
    }


@router.post(
    "/tokenize",
    **openapi.route("Text to tokens", Tokens, *openapi.ENCODING, body=(TokenizeRequest, TokenizeChatRequest)),
)
async def tokenize(request: Request) -> Response:
    """Return the tokens of a bare prompt, or of a conversation through the chat template."""
    services = services_of(request)
    with services.hold(request) as held:
        body = await read_body(request, _tokenize_model, held)
        services.served_name(body.model)
        answer = await services.in_thread(request, _tokens, services, body, services.engine.ready_info())
    return json_response(answer)


def _tokenize_model(raw: dict[str, Any]) -> type[TokenizeRequest | TokenizeChatRequest]:
    return TokenizeRequest if raw.get("messages") is None else TokenizeChatRequest


def _tokens(services: Services, body: TokenizeRequest | TokenizeChatRequest, info: EngineInfo) -> Tokens:
    warnings = [*body.warnings]
    if isinstance(body, TokenizeChatRequest):
        prompt = prompts.of_conversation(services, body, info, must_fit=False)
        token_ids, warnings = prompt.token_ids, [*warnings, *prompt.warnings]
    else:
        special = body.add_special_tokens is not False
        token_ids = prompts.encode(services, body.prompt, "prompt", info, add_special_tokens=special, must_fit=False)
    answer: Tokens = {
        "count": len(token_ids),
        "max_model_len": info.max_model_len,
        "tokens": token_ids,
        "token_strs": services.tokenizer.token_strings(token_ids) if body.return_token_strs else None,
    }
    if warnings:
        answer["warnings"] = warnings
    return answer


@router.post("/detokenize", **openapi.route("Tokens to text", Text, *openapi.ENCODING, body=(DetokenizeRequest,)))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with special tokens."""
    services = services_of(request)
    with services.hold(request) as held:
        body = await read_body(request, DetokenizeRequest, held)
        services.served_name(body.model)
        text = await services.in_thread(request, _text, services, body.tokens, services.engine.ready_info())
    return json_response(Text(prompt=text, warnings=body.warnings) if body.warnings else Text(prompt=text))


def _text(services: Services, token_ids: list[int], info: EngineInfo) -> str:
    prompts.check_ids("tokens", token_ids, info)
    return services.tokenizer.decode(token_ids, skip_special_tokens=False)


@router.get("/live")
async def live() -> Response:
    """Return 200 while this process answers."""
    return json_response({"status": "live"})


@router.get("/ready", **openapi.route("Ready for requests", State, loading=State))
async def ready(request: Request) -> Response:
    """Return 200 if requests are admitted, else 503 with the phase, the reason and the progress of loading."""
    services = services_of(request)
    state = services.engine.state
    if services.is_leaving and state.phase == "ready":
        state = replace(state, phase="draining")
    return _described(state, 200 if state.phase == "ready" else 503)


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # SageMaker's and vLLM's name of it
@router.get("/health", **openapi.route("Health of the engine", None, loading=State), response_class=Response)
async def health(request: Request) -> Response:
    """Return 200 without a body while the engine works or drains, and 503 while it loads or is dead."""
    state = services_of(request).engine.state
    return Response() if state.phase in ("ready", "draining") else _described(state, 503)


@router.get("/get_server_info", include_in_schema=False)
@router.get(
    "/server_info",
    **openapi.route(
        "Sizes of the engine, and what was read from the draft's config.json", ServerInfo, 401, loading=State
    ),
)
async def server_info(request: Request) -> Response:
    """Return the facts about the loaded engine and its draft, some in SGLang's names, or 503 until it was loaded."""
    services = services_of(request)
    if (info := services.engine.state.info) is None:
        return _described(services.engine.state, 503)
    facts = ServerInfo(
        **asdict(info),
        model=services.config.model,
        model_path=info.target,
        served_model_name=services.model_names[0],
        settings=services.settings,
        tp_size=info.tensor_parallel_size,
        dp_size=1,
        draft_block_size=info.block_size,
        version=version("dflash-server"),
    )
    return json_response(facts)


@router.get("/get_model_info", include_in_schema=False)
@router.get("/model_info", **openapi.route("The target's folder and family", ModelInfo, 401, loading=State))
async def model_info(request: Request) -> Response:
    """Return the target's folder and the family in its config.json, in SGLang's names, or 503 until it was loaded."""
    services = services_of(request)
    state = services.engine.state
    if state.info is None:
        return _described(state, 503)
    facts: ModelInfo = {
        "model_path": state.info.target,
        "is_generation": True,
        "model_type": services.tokenizer.model_type,
        "architectures": services.tokenizer.architectures,
    }
    return json_response(facts)


@router.get("/get_load", **openapi.route("Requests, and tokens on KV pages", list[Load], 401, loading=State))
async def load(request: Request) -> Response:
    """Return the load in SGLang's names, as one data-parallel rank, or 503 until the engine was loaded."""
    engine = services_of(request).engine
    state, stats = engine.state, engine.stats
    if state.info is None:
        return _described(state, 503)
    waiting, pages = (stats.num_waiting, stats.used_pages) if stats else (0, 0)
    tokens = pages * state.info.page_size
    rank = Load(dp_rank=0, num_reqs=engine.num_running, num_waiting_reqs=waiting, num_tokens=tokens)
    return json_response([rank])


@router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    return Response(services_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.post("/flush_cache", include_in_schema=False)
@router.post("/reset_prefix_cache", **openapi.route("Forget all cached prefixes", Success, 401, 429, 503))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes. Needs an admin key if the server has any."""
    services = services_of(request)
    if services.admin_digests:
        check_key(request.headers, services.admin_digests, "An admin key")
    services.engine.flush_cache()
    return json_response(Success(success=True))


def _described(state: EngineState, status: int) -> Response:
    description: State = {"status": state.phase}
    if state.reason is not None:
        description["reason"] = state.reason
    if (stage := state.progress) is not None:
        seconds = int(time.monotonic() - stage.started)
        description["progress"] = {"stage": stage.stage, "seconds": seconds, "done": stage.done, "total": stage.total}
    headers = None if status == 200 else {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return json_response(description, status, headers)


@router.get("/", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the page that shows DFlash at work in a chat, or at /docs the text of openapi.json."""
    name = "docs.html" if request.scope["route"].path == "/docs" else "index.html"
    html = _static(name)
    headers = {"Content-Security-Policy": _policy(html), **_OF_FILES}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@router.get("/markdown-it.js", include_in_schema=False)
async def markdown_library() -> Response:
    """Return the library by which the page renders Markdown."""
    return Response(_static("markdown-it.js"), media_type="text/javascript; charset=utf-8", headers=_OF_FILES)


@cache
def _static(name: str) -> bytes:
    return (Path(__file__).parent / "static" / name).read_bytes()


@cache
def _policy(html: bytes) -> str:
    """Return a policy by which the page's own scripts run, and no other that might get into its text."""
    scripts = re.findall(rb"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    digests = " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'self' {digests}; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'"
    )
