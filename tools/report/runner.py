"""Sections of a report, each in a separate process, restarted after a part that broke it. Imports no torch.

The files are whole at any moment: what a part has told is written before the next one begins.
"""

import asyncio
import fcntl
import json
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from app.check import command as check
from app.config.error import ConfigError
from app.engine_client.child_process import LineProcess
from tools.report.expected import EXPECTED
from tools.report.page import figures, page, verdict

Part = dict[str, Any]
"""Answer of one part, see part.py; `status` is ok, warning, failed or "not tried"."""

GPU_SECONDS = 460.0
"""Seconds of all sections on a GPU, which leaves some of eight minutes to end processes."""
START_SECONDS = 60.0
"""A process may take this long to name its parts, or as long as a part of its section."""
END_SECONDS = 10.0
HOST_SECONDS = 300.0
LATE = "no time was left"
NEEDED = ("probes", "torch", "torch_npu", "devices", "backend")
"""Probes of the host without which no section is tried."""


class Program(NamedTuple):
    """Command of a section's process, and its limits in seconds for one part and for all parts.

    The command is followed by the number of parts to skip and the seconds that are left.
    """

    command: tuple[str, ...]
    part: float
    whole: float = math.inf


def report(
    device: str,
    folder: Path,
    sections: dict[str, Program],
    *,
    name: str,
    host: Sequence[str] = (),
    limit: float = math.inf,
    **about: Any,
) -> int:
    """Write NAME.json and NAME.md into `folder`, and print the page. Return 1 if a part failed, else 0.

    `host` is the command of the probes to begin with. Raises OSError if `folder` cannot be written to, and ConfigError
    while another report is.
    """
    found: dict[str, Any] = {
        "report": name,
        "server": _version(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "chip": "",
        "failed": 0,
        "versions": {},
        **about,
        "sections": {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder), ends_like_an_interrupt():
        run = Run(found, folder, limit)
        try:
            asyncio.run(run.all(sections, host))
        except KeyboardInterrupt:
            return check.INTERRUPTED
        finally:
            run.save()
            _say(f"{found['failed']} failed; written: {folder / name}.json and {folder / name}.md")
    if run.missing:
        _say(f"error: no {kind(found)} can be used here: {run.missing}")
        _say(f"hint: `dflash-server check --device {device}` tells what is missing, and what to do")
    else:
        print(page(found))
        print(verdict(found))
        if found["report"] == "gpu-report":
            print(figures(found))
    if run.unsaved:
        _say(f"error: --out {folder}: {run.unsaved}: the files lack the end, and only the output above has it")
    return 1 if found["failed"] or run.unsaved else 0


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other reports out of `folder`. Raises ConfigError if one is being written there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                hint = "wait until it ends, or give another folder"
                raise ConfigError(f"--out {folder}: another report is being written there", hint) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def ends_like_an_interrupt() -> Iterator[None]:
    """Treat SIGTERM and the end of a terminal like SIGINT, so that no section's process is left running.

    asyncio cancels its task on SIGINT. An exception raised anywhere would lose a process that is being started.
    """
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGHUP)}
    replaced: dict[signal.Signals, signal.Handlers] = {
        name: signal.SIG_DFL for name, handler in before.items() if handler is signal.SIG_DFL
    }
    for name in replaced:
        signal.signal(name, lambda *_: signal.raise_signal(signal.SIGINT))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: SIGTERM must still end it
        replaced[signal.SIGINT] = signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for name, handler in replaced.items():
            signal.signal(name, handler)


class Run:
    """A report that grows part by part, and its files."""

    def __init__(self, found: dict[str, Any], folder: Path, limit: float) -> None:
        self.missing = ""
        self.unsaved = ""
        self._found, self._folder, self._limit = found, folder, limit
        _say(f"writing {found['report']}.json and {found['report']}.md to {folder.resolve()}")
        self._keep_earlier()
        self._write()

    def _keep_earlier(self) -> None:
        """Rename the files of an earlier report by their time."""
        name = self._found["report"]
        for file in (self._folder / f"{name}.json", self._folder / f"{name}.md"):
            if file.exists():
                at = datetime.fromtimestamp(file.stat().st_mtime, UTC).strftime("%Y%m%d-%H%M%S")
                _say(f"an earlier report is kept: {file.rename(file.with_stem(f'{name}-{at}'))}")

    def save(self) -> None:
        """Write both files, and keep in `unsaved` why that failed. What is measured goes on."""
        try:
            self._write()
            self.unsaved = ""
        except OSError as error:
            if not self.unsaved:
                _say(f"warning: --out {self._folder}: {error.strerror or error}; the report goes on")
            self.unsaved = error.strerror or str(error)

    def _write(self) -> None:
        """Write both files, each atomically."""
        parts = [part for section in self._found["sections"].values() for part in section["parts"]]
        self._found["failed"] = sum(part["status"] == "failed" for part in parts)
        for suffix, text in (("json", json.dumps(self._found, indent=1) + "\n"), ("md", page(self._found))):
            file = self._folder / f"{self._found['report']}.{suffix}"
            part = file.with_name(f"{file.name}.part")
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)

    async def all(self, sections: dict[str, Program], host: Sequence[str]) -> None:
        ends = time.monotonic() + self._limit
        if host:
            await self._probe(host)
        for name, section in sections.items():
            begun = time.monotonic()
            parts: list[Part] = []
            self._found["sections"][name] = {"seconds": 0.0, "parts": parts}
            missing = self.missing and f"no {kind(self._found)} can be used here: {self.missing}"
            if reason := missing or (LATE if begun >= ends else ""):
                parts.append(_not_tried(name, reason))
            else:
                await self._section(name, section, min(begun + section.whole, ends))
            self._found["sections"][name]["seconds"] = round(time.monotonic() - begun, 1)
            self.save()

    async def _probe(self, command: Sequence[str]) -> None:
        """Ask the probes of `dflash-server check`."""

        def tell(result: check.Result, names: list[str]) -> None:
            found = {"found": result["found"], "hint": result["hint"]}
            self._add("host", {"name": result["name"], "status": result["status"], "result": found})

        self._found["sections"]["host"] = {"parts": []}
        results = await check.ask([*command, self._found["device"]], HOST_SECONDS, tell)
        failed = [result["found"] for result in results if result["status"] == "failed" and result["name"] in NEEDED]
        self.missing = failed[0] if failed else ""

    async def _section(self, name: str, section: Program, ends: float) -> None:
        """Add the parts of a section until it `ends`. Behind one that broke its process, others run in a new one."""
        parts: list[Part] = self._found["sections"][name]["parts"]
        names: list[str] | None = None
        while names is None or len(parts) < len(names):
            left = ends - time.monotonic()
            process = await LineProcess.start([*section.command, str(len(parts)), f"{left:.0f}"])
            try:
                first, why = await _line(process, min(max(START_SECONDS, section.part), left))
                if not first:
                    late = time.monotonic() >= ends
                    rest = names[len(parts) :] if names else [name] * late
                    if not late:
                        self._add(name, _broken("start", why))
                    parts += [
                        _not_tried(part, LATE if late else "its process could not be started again") for part in rest
                    ]
                    return
                self._found["chip"], names = first["chip"], first["parts"]
                for part in names[len(parts) :]:
                    told, why = await _line(process, min(section.part, ends - time.monotonic()))
                    if not told and time.monotonic() >= ends:
                        parts += [_not_tried(rest, LATE) for rest in names[len(parts) :]]
                        return
                    self._add(name, told or _broken(part, why))
                    if not told or told.pop("over", False):
                        break
            finally:
                await _end(process)

    def _add(self, section: str, part: Part) -> None:
        part = scrubbed(part)
        expected = EXPECTED.get(section, {}).get(part["name"])
        if expected and kind(self._found) == "NPU":
            part["result"] |= {"expected": expected}
        self._found["sections"][section]["parts"].append(part)
        found = part.get("error", {}).get("says") or part["result"].get("found", "")
        took = f" ({part['seconds']:g} s)" if "seconds" in part else ""
        _say(f"{section}: {part['name']}: {part['status']}{took}{': ' if found else ''}{found}")
        self.save()


def kind(found: dict[str, Any]) -> str:
    """Return "NPU" or "CUDA"."""
    return str(found["device"]).partition(":")[0].upper()


async def _line(process: LineProcess, seconds: float) -> tuple[dict[str, Any], str]:
    """Return the next line of a process, or nothing and why there is none."""
    line = await process.line(max(0.0, seconds))
    if not line.endswith(b"\n"):
        return {}, await _end(process)
    return json.loads(line), ""


async def _end(process: LineProcess) -> str:
    """End a process, and return why it says no more. One that waits in the device's driver may outlive being killed."""
    try:
        return await asyncio.wait_for(process.end(), END_SECONDS)
    except TimeoutError:
        return "could not be ended"


def _broken(name: str, why: str) -> Part:
    return {"name": name, "status": "failed", "result": {}, "error": {"says": f"its process {why}"}}


def _not_tried(name: str, why: str) -> Part:
    return {"name": name, "status": "not tried", "result": {"found": why}}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def scrubbed(value: Any, *, in_error: bool = False) -> Any:
    """Return `value` without folders of this user and of this installation; errors lose the name of the host too."""
    if isinstance(value, dict):
        return {key: scrubbed(item, in_error=in_error or key == "error") for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item, in_error=in_error) for item in value]
    if not isinstance(value, str):
        return value
    folders = {str(Path(__file__).parents[2]): "SERVER", sys.prefix: "ENVIRONMENT", sys.base_prefix: "PYTHON"}
    for folder, name in sorted((folders | {str(Path.home()): "~"}).items(), key=lambda item: -len(item[0])):
        if len(folder) > 1:
            value = re.sub(rf"{re.escape(folder)}(?=[/\\]|\b)", name, value)
    if in_error and (host := socket.gethostname()):
        value = re.sub(rf"(?<!\w){re.escape(host)}(?!\w)", "HOST", value)
    return value


def _version() -> str:
    try:
        return version("dflash-server")
    except PackageNotFoundError:
        return "unknown"
