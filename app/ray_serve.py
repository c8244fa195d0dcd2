"""Replicas on a Ray cluster: `serve run app.ray_serve:application model=Qwen/Qwen3-8B device=npu num_replicas=2`.

Only this file imports Ray. Each replica is a whole server without its own socket: Ray's HTTP server and the proxy
in front of it take the place of ours. Arguments are those of `Replicas`, and the settings of `dflash-server serve`
with `_` for `-`. They are settled once, before a replica starts.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from app import log
from app.api.server import Server
from app.config.error import ConfigError
from app.config.replicas import Replicas, read_replicas
from app.config.requirements import check_settings
from app.config.settings import Config
from app.config.sources import load_config, settings_of
from app.engine.checkpoint.read import check_checkpoints, find_models
from app.engine.npu.torch_build import check_torch_build
from app.engine_client.admission import Admission

_PYTHON_PROXY = (
    "Ray's Python proxy hands each chunk of a stream through Ray: 148 ms a chunk at 32 streams on two cores, where "
    "HAProxy takes 4 ms. Set RAY_SERVE_ENABLE_HA_PROXY=1 where Ray is started and here, or say allow_python_proxy=true"
)
_RAYS = {"host": "http_options", "port": "http_options", "root_path": "route_prefix", "drain_delay": "Ray's own drain"}
"""Settings that Ray has in our place, and their names there."""
_MIN_SHUTDOWN_SECONDS = 35.0  # HAProxy sends requests for up to 30 s to a replica that is to end
_MARGIN = 16  # room for probes and refused requests, in addition to those that the server admits


def application(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of `serve run` and of a YAML file's `args`. Raises ConfigError for a wrong argument."""
    known = Replicas.model_fields.keys()
    replicas = read_replicas({name: value for name, value in args.items() if name in known})
    config = load_config(settings_of({name: value for name, value in args.items() if name not in known}))
    for name in sorted(config.model_fields_set & _RAYS.keys()):
        raise ConfigError(f"{name} is not read here, because Ray listens and drains: use {_RAYS[name]}")
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1" and not replicas.allow_python_proxy:
        raise ConfigError(_PYTHON_PROXY)
    check_settings(config)
    if all(name in (None, "demo") or Path(name).is_dir() for name in (config.model, config.draft_model)):
        checked_models(config)
    return serve.deployment(serve.ingress()(Replica), **options(config, replicas)).bind(config, replicas.hold_seconds)


def checked_models(config: Config) -> tuple[Path, Path | None]:
    """Return the folders of target and draft. Raises ConfigError for files that cannot be served."""
    target, draft = find_models(config.model, config.draft_model, speculation=config.speculation)
    check_checkpoints(config.for_engine(target, draft))
    return target, draft


def options(config: Config, replicas: Replicas) -> dict[str, Any]:
    """Return the options of Ray's deployment. Raises ConfigError if Ray cannot place or scale such replicas.

    Ray shows a replica only the devices that it takes of its node, from number 0 on.
    """
    count, running, device = config.engine.tensor_parallel_size, config.engine.max_num_seqs, config.engine.device
    devices: dict[str, Any] = {"cpu": {}, "cuda": {"num_gpus": count}, "npu": {"resources": {"NPU": count}}}
    if device not in devices:
        raise ConfigError(f"device={device}: say cpu, cuda or npu, by which Ray finds a node's devices")
    # The server's own bound answers 429 with a sentence.
    bound = 10_000 if running is None else Admission(config.max_queue).max_at_once(running) + _MARGIN
    chosen: dict[str, Any] = {
        "name": "dflash",
        "ray_actor_options": {"num_cpus": replicas.num_cpus, **devices[device]},
        "graceful_shutdown_timeout_s": max(config.shutdown_timeout + 5, _MIN_SHUTDOWN_SECONDS),
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


class Replica:
    """One server on one node, with its own engine process. Ray starts, probes, drains and replaces it."""

    async def __init__(self, config: Config, hold_seconds: float) -> None:  # type: ignore[misc]
        """Load the model, and return once requests may come. Raises an error with the reason if they never can."""
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        log.set_up(config.engine.log_level, config.engine.log_format, [*config.api_keys(), *config.admin_key])
        check_torch_build(config.engine.device)
        check_settings(config)
        target, draft = await asyncio.to_thread(checked_models, config)
        self._server = Server(config, target, draft, hold_seconds=hold_seconds)
        try:
            self._server.bind()
            self._server.start()
            await self._server.ready()
        except BaseException:
            await self._server.stop()
            raise

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._server.app

    def check_health(self) -> None:
        """Raise if the engine cannot be started again. One that is being started is no fault of the replica."""
        state = self._server.engine.state
        if state.phase == "dead":
            raise RuntimeError(f"the engine is dead: {state.reason}")

    def record_routing_stats(self) -> dict[str, float]:
        """Return the load, which Ray's request routers may read."""
        stats, running = self._server.engine.stats, self._server.engine.num_running
        usage = stats.used_pages / max(1, stats.num_pages) if stats else 0.0
        return {"num_running": running, "num_waiting": stats.num_waiting if stats else 0, "kv_usage": usage}

    async def __del__(self) -> None:
        """Drain, and end the engine process. Ray calls it once no request is left, or after its own time limit."""
        if server := getattr(self, "_server", None):
            await server.drain()
            await server.stop()
