"""The error of a refused setting, and what a typo meant. Without pydantic, so that every part may use it."""

import sys
from collections.abc import Iterable
from difflib import SequenceMatcher


class ConfigError(ValueError):
    """Settings that are refused. The message has a line for each, with what was given; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def show(self) -> int:
        """Print error and hint, and return the exit code of a user's mistake."""
        lines = [f"error: {line}" for line in str(self).splitlines()] + [f"hint: {self.hint}"] * bool(self.hint)
        print(*lines, sep="\n", file=sys.stderr)
        return 2


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that `name` is a typo of, or "": at most a quarter of it and two letters are wrong, or two
    have changed places, and the first word is right, or of one word the first letter."""

    def num_wrong(other: str) -> int:
        if sorted(name) == sorted(other):
            return sum(a != b for a, b in zip(name, other, strict=True)) // 2  # letters that changed places
        steps = SequenceMatcher(None, name, other).get_opcodes()
        return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in steps if kind != "equal")

    word, dash, _ = name.lstrip("-").replace("_", "-").partition("-")
    start = word + dash if dash else word[:1]
    alike = [other for other in known if other.lstrip("-").replace("_", "-").startswith(start)]
    near = min(alike, key=num_wrong, default="")
    return near if num_wrong(near) <= min(2, len(name.strip("-")) // 4) else ""
