"""Mistakes of a user at startup, and one-line texts of errors."""

from app.config.error import ConfigError


class UnsupportedError(ConfigError):
    """A checkpoint, size or device that this engine would run wrongly, or not at all. The message says what to do."""


class GraphsRefusedError(UnsupportedError):
    """A model whose operators the device refuses in graphs. Its steps run without."""


def last_words(error: Exception) -> str:
    """Return why a process ends. If the backend knew the device's error code, its meaning follows the first line."""
    said = f"{type(error).__name__}: {error}"
    notes = getattr(error, "__notes__", [])
    return f"{said.splitlines()[0]} ({notes[0]})" if notes else said
