"""Llama 3 (arXiv 2407.21783), and older ones of the same layout."""

from app.engine.models.target import Target


class Llama(Target):
    """Decoder without norms of q and k."""
