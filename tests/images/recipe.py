"""The steps of a Dockerfile, run one by one in a folder in place of the image's root: no Docker, no base image.

A step runs as the Dockerfile has it, but for absolute paths, which are moved into the folder. Commands that would
change this machine are replaced by STAND_INS.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

STAND_INS = {
    # Debian's packages are downloaded and unpacked into the root. None of them is configured.
    "apt-get": """
[ "$1" = install ] || exit 0
for word in "${@:2}"; do [[ $word = -* ]] || names+=("$word"); done
cd "$(mktemp --directory)" && /usr/bin/apt-get -qq download "${names[@]}" || exit
for file in *.deb; do dpkg -x "$file" "$ROOT"; done""",
    "groupadd": 'exec /usr/sbin/groupadd --prefix "$ROOT" "$@"',
    "useradd": 'exec /usr/sbin/useradd --prefix "$ROOT" "$@"',
}
"""Command -> its script in bash."""
_ABSOLUTE = re.compile(r"(?<![\w.:/}])/(?=(?:etc|home|src|usr|var)\b)")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return (instruction, its text) for each line, with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line.strip()]


class Recipe:
    """The image that a Dockerfile makes of `context`, in folders below `work`.

    `arguments` are build arguments. `base` is the folder that the last stage begins with. `settings` has the last text
    of each instruction that runs nothing, such as ENTRYPOINT.
    """

    def __init__(self, dockerfile: Path, context: Path, work: Path, base: Path, arguments: Mapping[str, str]) -> None:
        self.root = base
        self.settings: dict[str, str] = {}
        self._context, self._work, self._base, self._arguments = context, work, base, arguments
        self._variables: dict[str, str] = {}
        self._stages: dict[str, Path] = {}
        self._commands = work / "commands"
        self._commands.mkdir()
        for name, script in STAND_INS.items():
            (self._commands / name).write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
            (self._commands / name).chmod(0o755)
        for instruction, text in instructions(dockerfile):
            getattr(self, f"_{instruction.lower()}", self._set)(text, instruction)

    def moved(self, text: str) -> str:
        return _ABSOLUTE.sub(f"{self.root}/", text)

    def run(self, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command with the image's environment. Its output has standard error too."""
        path = f"{self._commands}:{next(self.root.glob('usr/local/python*'), self.root)}/bin:{self.root}/usr/local/bin"
        image = {"PATH": f"{path}:{os.environ['PATH']}", "ROOT": str(self.root)} | self._variables | environment
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DFLASH_"))}
        return subprocess.run(
            command, cwd=self.root, env=clean | image, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _from(self, text: str, _: str) -> None:
        _, _, name = text.partition(" AS ")
        self._variables = {}
        self.root = self._work / name if name else self._base
        self.root.mkdir(exist_ok=True)
        self._stages[name] = self.root

    def _arg(self, text: str, _: str) -> None:
        name, given, default = text.partition("=")
        if given or name in self._arguments:
            self._variables[name] = self._arguments.get(name, default)

    def _env(self, text: str, _: str) -> None:
        self._variables |= {name: self.moved(value) for name, value in (pair.split("=", 1) for pair in text.split())}

    def _copy(self, text: str, _: str) -> None:
        *flags, source, target = re.sub(r"\$\{(\w+)\}", lambda match: self._variables[match[1]], text).split()
        options = dict(flag.removeprefix("--").split("=") for flag in flags)
        folder = self._stages[options["from"]] if "from" in options else self._context
        (found,) = folder.glob(source.lstrip("/"))
        to = self.root / target.lstrip("/")
        to = to / found.name if target.endswith("/") else to
        to.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir():
            shutil.copytree(found, to)
            return
        shutil.copy2(found, to)
        if found.suffix == ".sh":
            to.write_text(self.moved(found.read_text(encoding="utf-8")), encoding="utf-8")
        if mode := options.get("chmod"):
            to.chmod(int(mode, 8))

    def _run(self, text: str, _: str) -> None:
        source, mounts = self.root / "src", re.findall(r"--mount=(\S+) ", text)
        if "type=bind,target=/src,rw" in mounts:
            shutil.copytree(self._context, source)
        done = self.run("bash", "-c", self.moved(re.sub(r"--mount=\S+ ", "", text)))
        shutil.rmtree(source, ignore_errors=True)
        if done.returncode:
            raise RuntimeError(f"RUN {text}\n{done.stdout[-4000:]}")

    def _set(self, text: str, instruction: str) -> None:
        self.settings[instruction] = text
