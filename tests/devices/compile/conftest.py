"""Fixtures of what is compiled."""

from tests.fast.engine.kept import kept

__all__ = ["kept"]
