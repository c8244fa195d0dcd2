"""The classes of the families in app/engine/checkpoint/families.py."""

from importlib import import_module

from app.engine.checkpoint.families import FAMILIES
from app.engine.models.target import Target


def target_class(model_type: str) -> type[Target]:
    """Return the class of a supported family."""
    module, name = FAMILIES[model_type].location.rsplit(".", 1)
    target: type[Target] = getattr(import_module(f"app.engine.models.{module}"), name)
    return target
