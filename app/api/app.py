"""The ASGI application: routers, error handlers and layers. It needs neither uvicorn nor signals."""

import functools
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp

from app.api import chat, completions, errors, models, openapi, ops, page, responses, tokenize
from app.api.middleware import Cors, Gate, Hold, Keys, RequestIds
from app.api.services import Services
from app.config.settings import Config
from app.engine_client.client import EngineClient
from app.metrics import Metrics
from app.text.parsers import family_for, reasoning_for
from app.text.parsers.reasoning import ReasoningParser
from app.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from app.api.tracing import Tracer

ROUTERS = (chat.router, completions.router, responses.router, tokenize.router, models.router, ops.router, page.router)


def create_app(services: Services) -> ASGIApp:
    """Return the HTTP application. `services.engine` need not be ready."""
    app = FastAPI(
        title="dflash-server",
        version=version("dflash-server"),
        description="OpenAI-compatible serving with DFlash block-diffusion speculative decoding.",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.root_path = services.root_path
    app.state.services = services
    errors.install(app, services.metrics)
    for router in ROUTERS:
        app.include_router(router)
    needed = bool(services.api_keys), bool(services.admin_keys)
    app.openapi = functools.cache(functools.partial(openapi.describe, app, *needed))  # type: ignore[method-assign]
    keys = Keys([*services.api_keys, *services.admin_keys] if services.api_keys else [])
    held = Hold(app, services.engine, services.hold_seconds) if services.hold_seconds else app
    layers: ASGIApp = Gate(held, keys, services.root_path)
    if services.allowed_origins:
        layers = Cors(
            layers,
            allow_origins=services.allowed_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIds(layers, lambda: services.is_leaving or services.engine.state.phase == "draining")


def services_for(
    config: Config,
    engine: EngineClient,
    tokenizer: Tokenizer,
    metrics: Metrics,
    hold_seconds: float = 0.0,
    tracer: "Tracer | None" = None,
) -> Services:
    """Return the settings' Services. A parser set to `auto` follows the chat template, which follows a named one."""
    source = tokenizer.chat_template.source or ""
    if (family := family_for(config.tool_call_parser, source)) is not None:
        tokenizer.chat_template.family = family
    reasoning = reasoning_for(config.reasoning_parser, source)
    return Services(
        engine,
        tokenizer,
        config.model_names,
        metrics,
        reasoning=reasoning is not None,
        reasoning_parser=reasoning or ReasoningParser,
        tool_family=family,
        template_kwargs=config.default_chat_template_kwargs,
        log_prompts=config.log_prompts,
        request_timeout=config.request_timeout,
        api_keys=config.api_keys(),
        admin_keys=config.admin_key,
        allowed_origins=config.allowed_origins,
        root_path=config.root_path,
        hold_seconds=hold_seconds,
        tracer=tracer,
    )
