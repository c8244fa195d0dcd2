"""A stand-in for processes of ours, with all the time there is for those that are slow, and none for one that hangs."""

from app.child_process import LineProcess

HANG = "print('\"hang\"', flush=True); time.sleep(6000)"
"""What a program that hangs does instead of its next line."""


class Patient(LineProcess):
    """From HANG on it says nothing, however long it is given."""

    _hangs = False

    async def line(self, seconds: float) -> bytes:
        said = await super().line(seconds)
        self._hangs = said == b'"hang"\n'
        return b"" if self._hangs else said

    async def end(self, seconds: float = 600.0) -> str:
        return await super().end(0.1 if self._hangs else seconds)
