"""Runs the sections, each in a process of its own, and again behind a part that ended it; writes files as it goes."""

import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from app.client.child_process import LineProcess
from app.doctor.report.npu_page import page

Part = dict[str, Any]
"""`{"name", "status", "seconds", "result"}`, and `error` where there was one; `status` is ok, warning, failed or "not
tried"."""

SECTIONS = {"operators": 600.0, "open_points": 600.0, "engine": 1200.0, "step": 900.0, "roofline": 900.0}
"""Seconds that a part may take: a first run loads and compiles kernels."""
NEEDED = ("torch", "torch_npu", "devices", "backend")
"""Probes of the host without which no section is tried."""
HOST_SECONDS = 300.0
NUM_PROMPTS = 24
INTERRUPTED = 130


class Commands(NamedTuple):
    """What is started: the probes with the device behind it, the prompts with their number, and a section with its
    name, the device and how many parts to skip."""

    host: tuple[str, ...] = (sys.executable, "-P", "-m", "app.doctor.device_check")
    prompts: tuple[str, ...] = (sys.executable, "-P", "-m", "tools.demo_pair.prompts")
    section: tuple[str, ...] = (sys.executable, "-P", "-m", "app.doctor.report.npu")


COMMANDS = Commands()


def report(device: str, folder: Path, commands: Commands = COMMANDS, seconds: dict[str, float] = SECTIONS) -> int:
    """Write npu-report.json and npu-report.md into `folder`. Returns 0 if nothing failed, else 1.

    Raises OSError if `folder` cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "report": 1,
        "server": _version(),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "failed": 0,
        "sections": {},
    }
    write(found, folder)
    try:
        asyncio.run(_run(found, folder, commands, seconds))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        write(found, folder)
        _say(f"{found['failed']} failed; written: {folder / 'npu-report.json'} and {folder / 'npu-report.md'}")
    missing = _missing(found["sections"]["host"]["parts"])
    if missing:
        _say(f"error: no NPU can be used here: {missing}")
        _say(f"hint: `dflash-server check --device {device}` tells what is missing, and what to do")
    return 1 if found["failed"] else 0


def write(found: dict[str, Any], folder: Path) -> None:
    """Both files, as far as there is something to tell."""
    parts = [part for section in found["sections"].values() for part in section["parts"]]
    found["failed"] = sum(part["status"] == "failed" for part in parts)
    clean = scrubbed(found)
    (folder / "npu-report.json").write_text(json.dumps(clean, indent=1) + "\n", encoding="utf-8")
    (folder / "npu-report.md").write_text(page(clean), encoding="utf-8")


async def _run(found: dict[str, Any], folder: Path, commands: Commands, seconds: dict[str, float]) -> None:
    device, sections = found["device"], found["sections"]
    host = await _host([*commands.host, device], HOST_SECONDS)
    sections["host"] = {"parts": host}
    missing = _missing(host)
    prompts = "" if missing else await _prompts([*commands.prompts, str(NUM_PROMPTS)], HOST_SECONDS)
    for name, limit in seconds.items():
        write(found, folder)
        started = time.perf_counter()
        sections[name] = {"parts": []}
        command = [*commands.section, name, device]
        tried = [] if missing else await _section(command, prompts, limit, lambda part, name=name: _tell(name, part))  # type: ignore[misc]
        parts = tried or [_not_tried(name, f"no NPU can be used here: {missing}")]
        sections[name] = {"seconds": round(time.perf_counter() - started, 1), "parts": parts}


async def _host(command: Sequence[str], limit: float) -> list[Part]:
    """The probes of `dflash-server check`."""

    def told(result: dict[str, Any]) -> Part:
        return {"name": result["name"], "status": result["status"], "result": {k: result[k] for k in ("found", "hint")}}

    parts, _ = await _lines(command, "", limit, lambda part: _tell("host", part), 0, told)
    return parts


async def _section(command: list[str], prompts: str, limit: float, tell: Callable[[Part], None]) -> list[Part]:
    """All parts; behind one that ended its process, or had an error, the others run in a new one."""
    parts, names = await _lines([*command, "0"], prompts, limit, tell, 0)
    while len(parts) < len(names):
        done = len(parts)
        more, again = await _lines([*command, str(done)], prompts, limit, tell, done)
        parts += more
        if again != names:
            return parts + [_not_tried(name, "its process could not be started again") for name in names[done:]]
    return parts


async def _lines(
    command: Sequence[str],
    said: str,
    limit: float,
    tell: Callable[[Part], None],
    skip: int,
    told: Callable[[dict[str, Any]], Part] = lambda line: line,
) -> tuple[list[Part], list[str]]:
    """(parts, names of all): a process's parts behind the first `skip`, up to one with an error or with no answer."""
    process = await LineProcess.start(command, said)
    try:
        first = await process.line(limit)
        if not first:
            parts = [_broken("start", await process.end())]
            tell(parts[0])
            return parts, []
        names: list[str] = json.loads(first)
        parts = []
        for name in names[skip:]:
            line = await process.line(limit)
            part = told(json.loads(line)) if line else _broken(name, await process.end())
            parts.append(part)
            tell(part)
            if "error" in part:
                break
        return parts, names
    finally:
        await process.end()


async def _prompts(command: Sequence[str], limit: float) -> str:
    """What every section hears; no prompts where they cannot be made."""
    process = await LineProcess.start(command)
    try:
        line = await process.line(limit)
    finally:
        await process.end()
    return line.decode() or '{"prompts": [], "stop_token_ids": []}'


def _broken(name: str, says: str) -> Part:
    return {"name": name, "status": "failed", "result": {}, "error": {"says": f"its process {_past(says)}"}}


def _past(says: str) -> str:
    return f"was {says}" if says.startswith("killed") else says


def _not_tried(name: str, why: str) -> Part:
    return {"name": name, "status": "not tried", "result": {"found": why}}


def _missing(host: list[Part]) -> str:
    """Why no section is tried: what the first needed probe says that failed."""
    failed = [part for part in host if part["status"] == "failed" and part["name"] in (*NEEDED, "start")]
    if not failed:
        return ""
    return str(failed[0]["result"].get("found") or failed[0]["error"]["says"])


def _tell(section: str, part: Part) -> None:
    says = part.get("error", {}).get("says") or part["result"].get("found", "")
    took = f" ({part['seconds']:g} s)" if "seconds" in part else ""
    _say(f"{section}: {part['name']}: {part['status']}{took}{': ' if says else ''}{says}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def scrubbed(value: Any, *, in_error: bool = False) -> Any:
    """The same without this user's and this installation's folders; in errors without the host's name too."""
    if isinstance(value, dict):
        return {key: scrubbed(item, in_error=in_error or key == "error") for key, item in value.items()}
    if isinstance(value, list):
        return [scrubbed(item, in_error=in_error) for item in value]
    if not isinstance(value, str):
        return value
    folders = {str(Path(__file__).parents[3]): "SERVER", sys.prefix: "ENVIRONMENT", sys.base_prefix: "PYTHON"}
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
