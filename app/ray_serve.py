"""Replicas on a Ray cluster: `serve run app.ray_serve:application model=Qwen/Qwen3-8B device=npu num_replicas=2`.

Only this file imports Ray. Each replica is a whole server without its own socket: Ray's HTTP server and the proxy
in front of it take the place of ours. Arguments are those of REPLICAS, and the settings of `dflash-server serve` with
`_` for `-`. They are settled once, before a replica starts.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError
from ray import serve
from starlette.types import ASGIApp

from app import log
from app.api.server import Server
from app.config.error import ConfigError
from app.config.requirements import check_settings
from app.config.settings import Config
from app.config.sources import load_config, settings_of
from app.config.torch_build import check_torch_build
from app.engine.checkpoint.read import check_checkpoints, find_models
from app.engine_client.admission import MAX_QUEUED_PER_RUNNING

_PYTHON_PROXY = (
    "Ray's Python proxy hands each chunk of a stream through Ray: 148 ms a chunk at 32 streams on two cores, where "
    "HAProxy takes 4 ms. Set RAY_SERVE_ENABLE_HA_PROXY=1 where Ray is started and here, or say allow_python_proxy=true"
)
_RAYS = {"host": "http_options", "port": "http_options", "root_path": "route_prefix", "drain_delay": "Ray's own drain"}
"""Settings that Ray has in our place, and their names there."""
_MIN_SHUTDOWN_SECONDS = 35.0
"""HAProxy sends requests for up to 30 s to a replica that is to end."""
_HOLD_SECONDS = 60.0
"""Longest wait of a request for an engine that is being started again."""
_MARGIN = 16
"""Room for probes and refused requests, in addition to those that the server admits."""


class Replicas(BaseModel):
    """Arguments of Ray's own. With `max_replicas` their number follows the load, from `min_replicas` on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: PositiveInt = 1
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    target_ongoing_requests: PositiveFloat | None = None
    num_cpus: NonNegativeFloat = 1
    hold_seconds: NonNegativeFloat = _HOLD_SECONDS
    health_check_period_s: FiniteFloat = 10.0
    allow_python_proxy: bool = False


def application(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of `serve run` and of a YAML file's `args`. Raises ConfigError for a wrong argument."""
    known = Replicas.model_fields.keys()
    replicas = _replicas({name: value for name, value in args.items() if name in known})
    given = {name: value for name, value in args.items() if name not in known}
    config = load_config(settings_of(given))
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


def _replicas(given: Mapping[str, Any]) -> Replicas:
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


def options(config: Config, replicas: Replicas) -> dict[str, Any]:
    """Return the options of Ray's deployment. Raises ConfigError if Ray cannot place or scale such replicas."""
    shutdown = max(config.shutdown_timeout + 5, _MIN_SHUTDOWN_SECONDS)
    chosen: dict[str, Any] = {
        "name": "dflash",
        "num_replicas": replicas.num_replicas,
        "ray_actor_options": _resources(config, replicas),
        "graceful_shutdown_timeout_s": shutdown,
        "health_check_period_s": replicas.health_check_period_s,
        "max_constructor_retry_count": 1,  # a replica starts its engine three times before it gives up
        "max_ongoing_requests": 10_000,  # the server's own bound answers 429 with a sentence
    }
    running = config.engine.max_num_seqs
    if running is not None:
        queue = MAX_QUEUED_PER_RUNNING * running if config.max_queue is None else config.max_queue
        chosen["max_ongoing_requests"] = running + queue + _MARGIN
    if replicas.max_replicas is not None:
        if running is None and replicas.target_ongoing_requests is None:
            raise ConfigError("max_replicas: scaling needs max_num_seqs, or target_ongoing_requests")
        del chosen["num_replicas"]
        chosen["autoscaling_config"] = {
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests or 0.75 * (running or 1),
        }
    return chosen


def _resources(config: Config, replicas: Replicas) -> dict[str, Any]:
    """Return what a replica takes of its node. Ray shows it only these devices, from number 0 on."""
    count = config.engine.tensor_parallel_size
    if config.engine.device == "npu":
        return {"num_cpus": replicas.num_cpus, "resources": {"NPU": count}}
    if config.engine.device == "cuda":
        return {"num_cpus": replicas.num_cpus, "num_gpus": count}
    if config.engine.device == "cpu":
        return {"num_cpus": replicas.num_cpus}
    raise ConfigError(f"device={config.engine.device}: say cpu, cuda or npu, by which Ray finds a node and its devices")


class Replica:
    """One server on one node, with an engine process of its own. Ray starts, probes, drains and replaces it."""

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
