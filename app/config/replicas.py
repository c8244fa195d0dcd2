"""Arguments of a Ray application in addition to the server's settings."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from app.config.error import ConfigError


class Replicas(BaseModel):
    """With `max_replicas` their number follows the load. A request waits `hold_seconds` for an engine's restart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: PositiveInt = 1
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None
    target_ongoing_requests: PositiveFloat | None = None
    num_cpus: NonNegativeFloat = 1
    hold_seconds: NonNegativeFloat = 60.0
    health_check_period_s: FiniteFloat = 10.0
    allow_python_proxy: bool = False


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
