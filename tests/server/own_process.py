"""`run` of app/api/process.py in a process of its own, with a scripted engine."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from app.text.tokenizer import Tokenizer
from tests import ROOT
from tests.fast.api.served import PATIENCE, Script

MAIN = f"""
import sys
from pathlib import Path
from app.engine_client import supervisor
from app.api import connection, process
from app.api.process import run
from app.config.settings import Config
connection.HEAD_SECONDS = process._GRACEFUL_SECONDS = supervisor.DEATHS_WINDOW_SECONDS = {PATIENCE}
port, shutdown_timeout, step_timeout, folder, *engine = sys.argv[1:]
config = Config.of(model="tiny", port=port, shutdown_timeout=shutdown_timeout, step_timeout=step_timeout, SETTINGS)
sys.exit(run(config.with_models(Path(folder), None), engine_command=engine))
"""
ASK = {"prompt": "hi"}


class Process:
    """`run` in a process of its own, with a scripted engine."""

    def __init__(
        self,
        script: Script,
        model_folder: Path,
        port: int = 0,
        shutdown_timeout: float = 10 * PATIENCE,
        step_timeout: float = 10 * PATIENCE,
        main: str = MAIN,
        settings: str = "",
        cwd: Path = ROOT,
        **environment: str,
    ) -> None:
        """`settings` are arguments of Config, as code."""
        self.script = script
        arguments = (str(port), str(shutdown_timeout), str(step_timeout), str(model_folder))
        temporary = {"TMPDIR": str(script.folder)}  # A killed server leaves its sockets behind.
        log = script.folder / "log"  # An unread pipe fills up.
        with log.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", main.replace("SETTINGS", settings), *arguments, *script.command],
                cwd=cwd,
                env=os.environ | temporary | environment,
                stderr=stderr,
            )
        self._log = log.open()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ready(self, **info: object) -> str:
        """Let the engine say that it is ready, and return the server's address once it says so too."""
        url = self.read_url()
        self.script.ready(**info)
        self.read_until("ready: ")
        return url

    def read_url(self) -> str:
        line = self.read_until("starting on")
        return re.search(r"http://\S+", line).group()

    def read_until(self, words: str) -> str:
        for line in self.lines():
            if words in line:
                return line
        raise AssertionError(f"never said {words!r}")

    def lines(self) -> Iterator[str]:
        """Yield its output from now on to its end."""
        line = ""
        while True:
            ended = self.popen.poll() is not None
            line += self._log.readline()
            if line.endswith("\n"):
                yield line
                line = ""
            elif ended:
                return
            else:
                time.sleep(0.01)

    def wait(self) -> int:
        return self.popen.wait(PATIENCE)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._log.close()


def ids(model_folder: Path, text: str) -> list[int]:
    return Tokenizer(model_folder).encode(text)
