"""The argument parser of every command. It needs no pydantic, because `tools.report` runs without it too."""

import argparse
from typing import Any, NoReturn

from app.config.error import ConfigError, nearest


class Parser(argparse.ArgumentParser):
    """ArgumentParser that takes whole flags only, and raises one ConfigError with a line for each flag at fault.

    An action may add such a line to `faults`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.faults: list[str] = []

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "), f"`{self.prog} --help` lists all flags")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        unknown = list(dict.fromkeys(word.partition("=")[0] for word in rest if word.startswith("-")))
        faults = self.faults + [f"unknown flag {flag}" for flag in unknown]
        if rest and not unknown:
            faults.append(f"unexpected argument {rest[0]}")
        if faults:
            near = [name for flag in unknown if (name := nearest(flag, self._option_string_actions))]
            hint = f"did you mean {' '.join(near)}?" if near else f"`{self.prog} --help` lists all flags"
            raise ConfigError("\n".join(faults), hint if rest else "")
        return options

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return no flag that begins with this, because argparse takes `-t` for `-tp` even without abbreviations."""
        return []
