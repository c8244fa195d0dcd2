"""The classes of the families in app/config/families.py."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from app.config.error import ConfigError
from app.config.families import family_of
from app.engine.errors import UnsupportedError
from app.engine.models.target import Target


def target_class(raw: Mapping[str, Any]) -> type[Target]:
    """Return the class of a target's config.json. Raises UnsupportedError for a family that is not supported."""
    try:
        module, name = family_of(raw).location.rsplit(".", 1)
    except ConfigError as error:
        raise UnsupportedError(str(error)) from None
    target: type[Target] = getattr(import_module(f"app.engine.models.{module}"), name)
    return target
