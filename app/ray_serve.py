"""Replicas on a Ray cluster: `serve run app.ray_serve:application model=Qwen/Qwen3-8B num_replicas=2`.

Each replica is a whole server without a listening socket, because Ray's HTTP server and the proxy before it listen.
Arguments are the fields of `Replicas`, and the settings of `dflash-server serve` with `_` for `-`. They are settled
once, before a replica starts.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import ray
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError
from ray import serve
from starlette.types import ASGIApp

from app import log
from app.api.server import Server
from app.config.error import ConfigError
from app.config.pairs import PAIRS
from app.config.settings import Config, check_settings
from app.config.sources import SETTINGS, load_config, settings_of
from app.engine.checkpoint.read import find_models
from app.engine.load.refusals import check_models
from app.engine.npu.torch_build import check_torch_build
from app.engine_client.admission import Admission

_USE_HAPROXY = "set RAY_SERVE_ENABLE_HA_PROXY=1 where Ray is started and here, or say allow_python_proxy=true"
_RAY_SETTINGS = {
    "host": "http_options",
    "port": "http_options",
    "root_path": "route_prefix",
    "drain_delay": "Ray's own drain",
}
"""Settings that belong to Ray, and their names there."""


class Replicas(BaseModel):
    """Arguments of the application in addition to the server's settings.

    With `max_replicas` the number of replicas follows the load. A request waits `hold_seconds` for an engine's restart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: PositiveInt = 1
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    target_ongoing_requests: PositiveFloat | None = None
    num_cpus: NonNegativeFloat = 1
    hold_seconds: NonNegativeFloat = 60.0
    health_check_period_s: FiniteFloat = 10.0
    allow_python_proxy: bool = False


def application(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of `serve run` and of a YAML file's `args`. Raises ClickException for a wrong argument."""
    try:
        given = list(settings_of(args, known=SETTINGS.keys() | Replicas.model_fields.keys()))
        replicas = read_replicas({one.field: one.value for one in given if one.field in Replicas.model_fields})
        config = load_config(one for one in given if one.field not in Replicas.model_fields)
        for name in sorted(config.model_fields_set & _RAY_SETTINGS.keys()):
            raise ConfigError(f"{name} is not read here, because Ray listens and drains: use {_RAY_SETTINGS[name]}")
        config = config.model_copy(update={"host": "0.0.0.0"})  # Ray listens, and clients may use any name
        if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1" and not replicas.allow_python_proxy:
            raise ConfigError("Ray's Python proxy takes 148 ms a chunk at 32 streams, and HAProxy 4 ms", _USE_HAPROXY)
        check_settings(config)
        named = config.model, config.draft_model, config.tokenizer
        if all(name is None or Path(name).is_dir() or (name in PAIRS and not PAIRS[name].missing) for name in named):
            checked_models(config)
        if config.engine.device == "auto":
            config = config.model_copy(update={"engine": replace(config.engine, device=cluster_device())})
        chosen = options(config, replicas)
    except ConfigError as error:  # `serve run` shows click's errors without a traceback
        raise click.ClickException(f"{error} ({error.hint})" if error.hint else str(error)) from None
    return serve.deployment(serve.ingress()(Replica), **chosen).bind(config, replicas.hold_seconds)


def read_replicas(given: Mapping[str, Any]) -> Replicas:
    """Return the settled arguments. Raises ConfigError for a wrong one, or one that another leaves unread."""
    try:
        replicas = Replicas(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}={first['input']}: {first['msg']}") from None
    if replicas.max_replicas is None:
        for name in given.keys() & {"min_replicas", "target_ongoing_requests"}:
            raise ConfigError(f"{name} is read only with max_replicas: give that too, or num_replicas")
    elif "num_replicas" in given:
        raise ConfigError("num_replicas is not read with max_replicas, by which the number follows the load: give one")
    elif replicas.max_replicas < replicas.min_replicas:
        raise ConfigError(f"max_replicas={replicas.max_replicas} is below min_replicas={replicas.min_replicas}")
    return replicas


def checked_models(config: Config) -> tuple[Config, Mapping[str, Any]]:
    """Return the settings with the models' folders, and the target's config.json. Raises ConfigError for files that
    cannot be served."""
    folders = find_models(**config.named_models)
    config = config.with_models(*folders)
    return config, check_models(config.engine, folders.tokenizer)


def options(config: Config, replicas: Replicas) -> dict[str, Any]:
    """Return the options of Ray's deployment. Raises ConfigError if Ray cannot place or scale such replicas."""
    count, running, device = config.engine.tensor_parallel_size, config.engine.max_num_seqs, config.engine.device
    devices: dict[str, Any] = {"cpu": {}, "cuda": {"num_gpus": count}, "npu": {"resources": {"NPU": count}}}
    if device not in devices:
        raise ConfigError(f"device={device}: say cpu, cuda or npu, because Ray numbers the devices of a replica from 0")
    bound = 10_000 if running is None else Admission(config.max_queue).max_at_once(running) + 16  # probes and 429s
    chosen: dict[str, Any] = {
        "name": "dflash",
        "ray_actor_options": {"num_cpus": replicas.num_cpus, **devices[device]},
        "graceful_shutdown_timeout_s": max(config.shutdown_timeout + 5, 35.0),  # HAProxy sends requests for 30 s more
        "health_check_period_s": replicas.health_check_period_s,
        "max_constructor_retry_count": 1,  # a replica starts its engine three times before it gives up
        "max_ongoing_requests": bound,
    }
    if replicas.max_replicas is None:
        return chosen | {"num_replicas": replicas.num_replicas}
    if running is None and replicas.target_ongoing_requests is None:
        raise ConfigError("max_replicas: scaling needs max_num_seqs, or target_ongoing_requests")
    bounds = {"min_replicas": replicas.min_replicas, "max_replicas": replicas.max_replicas}
    target = replicas.target_ongoing_requests or 0.75 * (running or 1)
    return chosen | {"autoscaling_config": bounds | {"target_ongoing_requests": target}}


def cluster_device() -> str:
    """Return the kind of devices of the cluster that `serve run` joins or begins. Raises ConfigError for two kinds."""
    address = command.params["address"] if (command := click.get_current_context(silent=True)) else None
    with nullcontext() if ray.is_initialized() else ray.init(address, log_to_driver=False):
        resources = ray.cluster_resources()
    if {"NPU", "GPU"} <= resources.keys():
        raise ConfigError("the cluster has NPUs and GPUs: say device=npu, device=cuda or device=cpu")
    return "npu" if "NPU" in resources else "cuda" if "GPU" in resources else "cpu"


class Replica:
    """One server on one node, with an engine process. Ray starts, probes, drains and replaces it."""

    async def __init__(self, config: Config, hold_seconds: float) -> None:  # type: ignore[misc]
        """Load the model, and return once requests may come. Raises an error with the reason if they never can."""
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        log.set_up(config.engine.log_level, config.engine.log_format, [*config.api_keys(), *config.admin_key])
        check_torch_build(config.engine.device)
        check_settings(config)
        self._server = Server(*await asyncio.to_thread(checked_models, config), hold_seconds=hold_seconds)
        self._server.bind()
        self._server.start()
        await self._server.ready()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._server.app

    def check_health(self) -> None:
        """Raise if the engine cannot be started again. A replica whose engine is restarting is healthy."""
        state = self._server.engine.state
        if state.phase == "dead":
            raise RuntimeError(f"the engine is dead: {state.reason}")

    async def __del__(self) -> None:
        """Drain, and end the engine process. Ray calls it once no request is left, or after Ray's time limit."""
        if server := getattr(self, "_server", None):
            await server.drain()
            await server.stop()
