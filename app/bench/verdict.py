"""What a bench claims."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What should be so, whether it is, and what was found."""

    claim: str
    holds: bool
    found: str

    def __str__(self) -> str:
        return f"{'met' if self.holds else 'MISSED'}: {self.claim} ({self.found})"
