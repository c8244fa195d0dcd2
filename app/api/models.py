"""GET /v1/models and /version: the names of the model, and the server's version."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api import openapi
from app.api.answers import json_response
from app.api.services import Services, services_of

router = APIRouter()


@router.get("/v1/models", **openapi.MODELS)
async def models(request: Request) -> Response:
    services = services_of(request)
    return json_response({"object": "list", "data": [_card(services, name) for name in services.config.model_names]})


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
        "root": services.config.model_names[0],
        "max_model_len": info.max_model_len if info else None,
    }
