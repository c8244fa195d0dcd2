"""Mistakes of a user at start-up."""


class UnsupportedError(ValueError):
    """A checkpoint, size or device that this engine would run wrongly, or not at all. The message says what to do."""
