"""What is raised for a setting that cannot be. Imports nothing, so that parts without pydantic may raise it too."""


class ConfigError(ValueError):
    """A setting that cannot be. The message is one line saying what was given; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
