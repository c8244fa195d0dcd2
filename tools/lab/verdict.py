"""What a bench claims."""

from dataclasses import dataclass

_WORDS = {True: "met", False: "MISSED", None: "inconclusive"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What should be so, whether it is, None where that cannot be told, and what was found."""

    claim: str
    holds: bool | None
    found: str

    def __str__(self) -> str:
        return f"{_WORDS[self.holds]}: {self.claim} ({self.found})"
