"""A stand-in for processes of ours, with all the time there is for those that are slow, and none for one that hangs."""

from app.client.child_process import LineProcess

LONGEST = 600.0
"""Seconds that a test gives a line at most: who waits without a limit of its own would wait for ever."""
HANG = "print('\"hang\"', flush=True); time.sleep(6000)"
"""Line that makes a program hang."""


class Patient(LineProcess):
    """From HANG on it says nothing, however long it is given."""

    _end_seconds = LONGEST

    async def line(self, seconds: float) -> bytes:
        assert 0 <= seconds <= LONGEST
        said = await super().line(seconds)
        if said != b'"hang"\n':
            return said
        self._end_seconds = 0.1
        return b""
