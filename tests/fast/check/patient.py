"""A stand-in for processes of ours, with all the time there is for those that are slow, and none for one that hangs."""

from app.engine_client.child_process import LineProcess

LONGEST = 600.0
"""Most seconds that a test waits for a line, because a wait without a limit may never end."""
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
