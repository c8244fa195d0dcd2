"""The error of a refused setting. It imports nothing, so that parts without pydantic may raise it too."""


class ConfigError(ValueError):
    """A setting that is refused. The message says in one line what was given; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
