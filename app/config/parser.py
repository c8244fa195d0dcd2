"""The argument parser of every command. It needs no pydantic, because `tools.report` runs without it too."""

import argparse
from typing import Any, NoReturn

from app.config.error import ConfigError


class Parser(argparse.ArgumentParser):
    """ArgumentParser without abbreviations that raises ConfigError for a mistake."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "), f"`{self.prog} --help` lists all flags")
