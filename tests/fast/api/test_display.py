"""Lines about the start, for people who wait for it."""

from app.api.display import stage_line
from app.wire import LoadProgress


def test_the_line_of_timing_says_how_many_seconds_are_left() -> None:
    assert stage_line(LoadProgress(1, "timing steps", 3, 10)) == "timing steps, at most 7 s left"
    assert stage_line(LoadProgress(1, "target", 3, 10)) == "target"
