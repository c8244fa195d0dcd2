"""Probes, facts and metrics for operators, orchestrators and routers, and the one change that they may make."""

from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.api import openapi
from app.api.answers import json_response
from app.api.errors import RETRY_AFTER_SECONDS
from app.api.middleware import check_key, digests_of
from app.api.services import services_of
from app.engine_client.client import EngineState

router = APIRouter()


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
    """Return the facts about the loaded engine and its draft, or 503 until it was loaded.

    SGLang's gateway reads those in SGLang's names.
    """
    services = services_of(request)
    state, info = services.engine.state, services.engine.state.info
    if info is None:
        return _described(state, 503)
    named = {"model_path": info.target, "served_model_name": services.config.model_names[0]}
    return json_response(asdict(info) | named | {"tp_size": info.tensor_parallel_size, "dp_size": 1})


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
    if keys := services.config.admin_key:
        check_key(request.headers, digests_of(keys), "An admin key")
    services.engine.flush_cache()
    return json_response({"success": True})


def _described(state: EngineState, status: int) -> Response:
    description: dict[str, Any] = {"status": state.phase}
    if state.reason is not None:
        description["reason"] = state.reason
    if state.progress is not None:
        progress = state.progress
        description["progress"] = {"stage": progress.stage, "done": progress.done, "total": progress.total}
    headers = None if status == 200 else {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return json_response(description, status, headers)
