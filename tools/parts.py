"""The command line of every tool."""

import argparse
import sys
from typing import Any, NoReturn

from app.config.error import ConfigError
from app.config.parser import Parser


class ToolParser(Parser):
    """Parser that shows its description as it is written, and ends the process after a mistake, which it prints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except ConfigError as error:
            sys.exit(error.show())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            return super().parse_args(args, namespace)
        except ConfigError as error:
            sys.exit(error.show())
