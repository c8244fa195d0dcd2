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
        faults = self.faults + [f"unknown flag {flag}{self._meant(flag)}" for flag in unknown]
        if rest and not unknown:
            faults.append(f"unexpected argument {rest[0]}")
        if faults:
            raise ConfigError("\n".join(faults), f"`{self.prog} --help` lists all flags" if rest else "")
        return options

    def _meant(self, flag: str) -> str:
        """Return the question for the flag that `flag` is a typo of, or "". None leads to a flag that is refused."""
        actions = self._option_string_actions.items()
        whole = [(name, action) for name, action in actions if name.startswith("--")]
        usable = [name for name, action in whole if getattr(action.const, "kind", "") != "refused"]
        return f": did you mean {near}?" if (near := nearest(flag, usable)) else ""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return no flag that begins with this, because argparse takes `-t` for `-tp` even without abbreviations."""
        return []
