"""Tests of the server. The folder of a test says what it costs: tests/conftest.py."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
"""Recorded data that tests read."""
