"""The end of the process that started this one."""

import os
import sys


def leave_with_parent() -> None:
    """Wait for the end of stdin, and end this process."""
    while sys.stdin.read(1):
        pass
    os._exit(1)
