"""Replicas on a Ray cluster: `serve run app.ray_serve:application model=Qwen/Qwen3-8B num_replicas=2`.

Each replica is a whole server without its own socket, because Ray's HTTP server and the proxy in front of it listen.
Arguments are those of `Replicas`, and the settings of `dflash-server serve` with `_` for `-`. They are settled once,
before a replica starts.
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
from ray import serve
from starlette.types import ASGIApp

from app import log
from app.api.server import Server
from app.config.error import ConfigError
from app.config.replicas import Replicas, read_replicas
from app.config.requirements import check_settings
from app.config.settings import Config
from app.config.sources import SETTINGS, load_config, settings_of
from app.engine.checkpoint.read import find_models
from app.engine.load.refusals import check_models
from app.engine.npu.torch_build import check_torch_build
from app.engine_client.admission import Admission

_USE_HAPROXY = "set RAY_SERVE_ENABLE_HA_PROXY=1 where Ray is started and here, or say allow_python_proxy=true"
_RAYS = {"host": "http_options", "port": "http_options", "root_path": "route_prefix", "drain_delay": "Ray's own drain"}
"""Settings that Ray has in our place, and their names there."""


def application(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of `serve run` and of a YAML file's `args`. Raises ClickException for a wrong argument."""
    try:
        given = list(settings_of(args, known=SETTINGS.keys() | Replicas.model_fields.keys()))
        replicas = read_replicas({one.field: one.value for one in given if one.field in Replicas.model_fields})
        config = load_config(one for one in given if one.field not in Replicas.model_fields)
        for name in sorted(config.model_fields_set & _RAYS.keys()):
            raise ConfigError(f"{name} is not read here, because Ray listens and drains: use {_RAYS[name]}")
        if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1" and not replicas.allow_python_proxy:
            raise ConfigError("Ray's Python proxy takes 148 ms a chunk at 32 streams, and HAProxy 4 ms", _USE_HAPROXY)
        check_settings(config)
        if all(name in (None, "demo") or Path(name).is_dir() for name in (config.model, config.draft_model)):
            checked_models(config)
        if config.engine.device == "auto":
            config = config.model_copy(update={"engine": replace(config.engine, device=cluster_device())})
        chosen = options(config, replicas)
    except ConfigError as error:  # `serve run` shows click's errors without a traceback
        raise click.ClickException(f"{error} ({error.hint})" if error.hint else str(error)) from None
    return serve.deployment(serve.ingress()(Replica), **chosen).bind(config, replicas.hold_seconds)


def checked_models(config: Config) -> tuple[Config, Mapping[str, Any]]:
    """Return the settings with the models' folders, and the target's config.json. Raises ConfigError for files that
    cannot be served."""
    config = config.of_models(*find_models(config.model, config.draft_model, speculation=config.speculation))
    return config, check_models(config.engine)


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
    """One server on one node, with its own engine process. Ray starts, probes, drains and replaces it."""

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
        """Raise if the engine cannot be started again. One that is being started is no fault of the replica."""
        state = self._server.engine.state
        if state.phase == "dead":
            raise RuntimeError(f"the engine is dead: {state.reason}")

    async def __del__(self) -> None:
        """Drain, and end the engine process. Ray calls it once no request is left, or after its own time limit."""
        if server := getattr(self, "_server", None):
            await server.drain()
            await server.stop()
