"""The ASGI application: routers, error handlers and layers. It needs neither uvicorn nor signals."""

import functools
from importlib.metadata import version

from fastapi import FastAPI
from starlette.types import ASGIApp

from app.api import chat, completions, errors, models, openapi, ops, page, responses, tokenize
from app.api.middleware import Cors, Gate, Hold, RequestIds
from app.api.services import Services

ROUTERS = (chat.router, completions.router, responses.router, tokenize.router, models.router, ops.router, page.router)


def create_app(services: Services, hold_seconds: float = 0.0) -> ASGIApp:
    """Return the HTTP application. While the engine loads, a request waits for it for `hold_seconds` at most."""
    config = services.config
    app = FastAPI(
        title="dflash-server",
        version=version("dflash-server"),
        description="OpenAI-compatible serving with DFlash block-diffusion speculative decoding.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = config.root_path
    app.state.services = services
    errors.install(app, services.metrics)
    for router in ROUTERS:
        app.include_router(router)
    needed = bool(services.api_keys), bool(config.admin_key)
    app.openapi = functools.cache(functools.partial(openapi.describe, app, *needed))  # type: ignore[method-assign]
    keys = [*services.api_keys, *config.admin_key] if services.api_keys else []
    held = Hold(app, services.engine, hold_seconds) if hold_seconds else app
    layers: ASGIApp = Gate(held, keys, config.root_path)
    if config.allowed_origins:
        layers = Cors(
            layers,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIds(layers, lambda: services.is_leaving or services.engine.state.phase == "draining")
