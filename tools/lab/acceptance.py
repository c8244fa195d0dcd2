"""Wishes of `--simulate-acceptance`: a mean acceptance length, or a rate for each position of the block."""

import argparse
from collections.abc import Sequence
from itertools import pairwise

from app.config.error import ConfigError
from app.doctor.report.simulated import even_rates

FLAG = "--simulate-acceptance"


def wish(text: str) -> tuple[float, ...]:
    """Parse a flag's value: "6.36" is a mean acceptance length, "0.86,0.72,0.6" a rate for each position."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor numbers with commas between") from None


def survival(wished: Sequence[float], block_size: int) -> list[float]:
    """Return the chance that the first k drafts are all accepted, for k = 1 .. block_size - 1.

    A single number is the mean acceptance length, bonus included; every draft behind accepted ones has the same chance.
    More numbers are these chances themselves, like the counters per position of vLLM and of this server. Later
    positions have none. Raises ConfigError for a length or a rate that cannot be.
    """
    most = block_size - 1
    if len(wished) == 1:
        (length,) = wished
        if not 1 <= length <= block_size:
            hint = f"1 to {block_size}, the bonus token included; or a rate for each position, with commas between"
            raise ConfigError(f"{FLAG} {length:g}: a block of {block_size} yields no such mean", hint)
        return even_rates(length, block_size)
    if len(wished) > most:
        raise ConfigError(f"{FLAG}: {len(wished)} rates, but a block of {block_size} has {most} drafts")
    if not all(0 <= rate <= 1 for rate in wished) or any(a < b for a, b in pairwise(wished)):
        hint = "rate k is how often the first k drafts are all accepted, so it never rises"
        raise ConfigError(f"{FLAG}: rates lie between 0 and 1 and never rise", hint)
    return [*wished, *[0.0] * (most - len(wished))]
