"""Endpoints that generate nothing: models, tokens, probes, facts, metrics, cached prefixes, and two pages."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.api import openapi, prompts
from app.api.answers import json_response
from app.api.body import parse, read_json
from app.api.errors import RETRY_AFTER_SECONDS
from app.api.middleware import check_key
from app.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from app.api.services import Services, services_of
from app.engine_client.client import EngineState
from app.text.parsers.base import Json

router = APIRouter()

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'"
)


@router.get("/v1/models", **openapi.MODELS)
async def models(request: Request) -> Response:
    services = services_of(request)
    return json_response({"object": "list", "data": [_card(services, name) for name in services.model_names]})


@router.get("/v1/models/{name:path}", **openapi.MODEL)
async def model(request: Request, name: str) -> Response:
    services = services_of(request)
    return json_response(_card(services, services.served_name(name)))


@router.get("/version", **openapi.VERSION)
async def server_version() -> Response:
    return json_response({"version": version("dflash-server")})


def _card(services: Services, name: str) -> dict[str, Any]:
    info = services.engine.state.info
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "dflash-server",
        "root": services.model_names[0],
        "max_model_len": info.max_model_len if info else None,
    }


@router.post("/tokenize", **openapi.TOKENIZE)
async def tokenize(request: Request) -> Response:
    """Return the tokens of a bare prompt, or of a conversation through the chat template."""
    services = services_of(request)
    raw = await read_json(request)
    is_bare = raw.get("messages") is None
    model: type[TokenizeRequest | TokenizeChatRequest] = TokenizeRequest if is_bare else TokenizeChatRequest
    body = parse(raw, model, services.metrics)
    services.served_name(body.model)
    info = services.engine.ready_info()
    warnings: Sequence[Json] = ()
    if isinstance(body, TokenizeChatRequest):
        prompt = await prompts.render_and_encode(services, body, info, must_fit=False)
        token_ids, warnings = prompt.token_ids, prompt.warnings
    else:
        special = body.add_special_tokens is not False
        token_ids = await prompts.encode_text(
            services, body.prompt, "prompt", info, add_special_tokens=special, must_fit=False
        )
    strings = services.tokenizer.token_strings(token_ids) if body.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids, "token_strs": strings}
    return json_response(answer | ({"warnings": warnings} if warnings else {}))


@router.post("/detokenize", **openapi.DETOKENIZE)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with special tokens."""
    services = services_of(request)
    body = parse(await read_json(request), DetokenizeRequest, services.metrics)
    services.served_name(body.model)
    prompts.check_ids("tokens", body.tokens, services.engine.ready_info())
    return json_response({"prompt": services.tokenizer.decode(body.tokens, skip_special_tokens=False)})


@router.get("/live")
async def live() -> Response:
    """Return 200 while this process answers."""
    return json_response({"status": "live"})


@router.get("/ready", **openapi.READY)
async def ready(request: Request) -> Response:
    """Return 200 if requests are admitted, else 503 with the phase, the reason and the progress of loading."""
    services = services_of(request)
    state = services.engine.state
    if services.is_leaving and state.phase == "ready":
        state = replace(state, phase="draining")
    return _described(state, 200 if state.phase == "ready" else 503)


@router.get("/health", **openapi.HEALTH)
async def health(request: Request) -> Response:
    """Return 200 without a body while the engine works or drains, and 503 while it loads or is dead."""
    state = services_of(request).engine.state
    return Response() if state.phase in ("ready", "draining") else _described(state, 503)


@router.get("/get_server_info", include_in_schema=False)
@router.get("/server_info", **openapi.SERVER_INFO)
async def server_info(request: Request) -> Response:
    """Return the facts about the loaded engine and its draft, some in SGLang's names, or 503 until it was loaded."""
    services = services_of(request)
    if (info := services.engine.state.info) is None:
        return _described(services.engine.state, 503)
    named = {"model_path": info.target, "served_model_name": services.model_names[0], "settings": services.settings}
    sizes = {"tp_size": info.tensor_parallel_size, "dp_size": 1, "draft_block_size": info.block_size}
    return json_response(asdict(info) | named | sizes | {"version": version("dflash-server")})


@router.get("/get_model_info", include_in_schema=False)
@router.get("/model_info", **openapi.MODEL_INFO)
async def model_info(request: Request) -> Response:
    """Return the target's folder and the family in its config.json, in SGLang's names, or 503 until it was loaded."""
    services = services_of(request)
    state = services.engine.state
    if state.info is None:
        return _described(state, 503)
    tokenizer = services.tokenizer
    family = {"model_type": tokenizer.model_type, "architectures": tokenizer.architectures}
    return json_response({"model_path": state.info.target, "is_generation": True} | family)


@router.get("/get_load", **openapi.LOAD)
async def load(request: Request) -> Response:
    """Return the load in SGLang's names, as one data-parallel rank, or 503 until the engine was loaded."""
    engine = services_of(request).engine
    state, stats = engine.state, engine.stats
    if state.info is None:
        return _described(state, 503)
    waiting, pages = (stats.num_waiting, stats.used_pages) if stats else (0, 0)
    tokens = pages * state.info.page_size
    rank = {"dp_rank": 0, "num_reqs": engine.num_running, "num_waiting_reqs": waiting, "num_tokens": tokens}
    return json_response([rank])


@router.get("/metrics", **openapi.METRICS)
async def metrics(request: Request) -> Response:
    return Response(services_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.post("/flush_cache", include_in_schema=False)
@router.post("/reset_prefix_cache", **openapi.RESET_PREFIX_CACHE)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes. Needs an admin key if the server has any."""
    services = services_of(request)
    if services.admin_digests:
        check_key(request.headers, services.admin_digests, "An admin key")
    services.engine.flush_cache()
    return json_response({"success": True})


def _described(state: EngineState, status: int) -> Response:
    description: dict[str, Any] = {"status": state.phase}
    if state.reason is not None:
        description["reason"] = state.reason
    if state.progress is not None:
        stage, seconds = state.progress, int(time.monotonic() - state.progress.started)
        description["progress"] = {"stage": stage.stage, "seconds": seconds, "done": stage.done, "total": stage.total}
    headers = None if status == 200 else {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return json_response(description, status, headers)


@router.get("/", include_in_schema=False)
@router.get("/docs", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the page that shows DFlash at work in a chat, or at /docs the text of openapi.json."""
    name = "docs.html" if request.scope["route"].path == "/docs" else "index.html"
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(_html(name), media_type="text/html; charset=utf-8", headers=headers)


@cache
def _html(name: str) -> bytes:
    return (Path(__file__).parent / "static" / name).read_bytes()
