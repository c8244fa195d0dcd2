"""Run an answer's code with little harm: limits, no network, hardly any files, and an end.

It guards against accidents of what models write, not against an attacker: the audit hook of tools/bench/sandboxed.py is
Python's, and knows not every way out.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SECONDS = 10.0
"""Wall-clock time, and processor time, of one program."""
MEMORY = 1 << 30
"""Bytes of address space."""
FILE_BYTES = 1 << 20


def passes(parts: Sequence[str], seconds: float = SECONDS) -> bool:
    """Execute parts of a program in one namespace, in turn, and return True if the last one ended without an error.

    Only then does the child write a word that the program does not know.
    """
    word = secrets.token_hex(16)
    limits = {"seconds": round(seconds + 1), "memory": MEMORY, "file": FILE_BYTES}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as program,
        tempfile.TemporaryFile() as said,
    ):
        program.write(json.dumps({"parts": parts, "word": word, **limits}).encode())
        program.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("sandboxed.py"))],
            stdin=program,
            stdout=said,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            ended_well = process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            ended_well = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return ended_well and said.read(len(word) + 1) == word.encode()
