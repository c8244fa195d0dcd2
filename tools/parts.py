"""The command line of every tool."""

import sys
from typing import Any, NoReturn

from app.config.error import ConfigError
from app.config.parser import Parser


class ToolParser(Parser):
    """Parser that ends the process after a mistake, which it prints."""

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
