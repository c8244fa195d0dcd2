"""Tests of the server. The folder of a test says what it costs: tests/conftest.py."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
"""Recorded data that tests read."""
UNTIMED: dict[str, Any] = {"verify": "full"}
"""Settings of an engine that times nothing at its start."""
