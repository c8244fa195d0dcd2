"""`dflash-server check`: start the probes of a device in a process of their own, and print what they find."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from typing import TypedDict

from app.engine_link import engine_environment

COMMAND = (sys.executable, "-P", "-m", "app.engine.device_check")
PROBE_SECONDS = 300.0
"""A first run on an NPU loads and compiles kernels; what takes longer than this hangs."""
INTERRUPTED = 130


class Result(TypedDict):
    """`status` is ok, warning, failed or "not tried"; `hint` says what to do, where there is something to do."""

    name: str
    status: str
    found: str
    hint: str


def report(
    device: str, *, as_json: bool, command: Sequence[str] = COMMAND, probe_seconds: float = PROBE_SECONDS
) -> int:
    """Print a line for every probe as it comes, or all of them as one JSON object. Returns 1 if one failed, else 0."""
    try:
        results = asyncio.run(_run([*command, device], probe_seconds, as_text=not as_json))
    except KeyboardInterrupt:
        return INTERRUPTED
    failures = sum(result["status"] == "failed" for result in results)
    if as_json:
        print(json.dumps({"device": device, "failed": failures, "results": results}, indent=2))
    else:
        print(f"{failures} failed" if failures else "nothing failed")
    return 1 if failures else 0


def text(result: Result, width: int) -> str:
    """A result for people: names are padded to `width`, and the hint stands under what was found."""
    head = f"{result['name']:{width}}  {result['status']:9}  {result['found']}"
    return f"{head}\n{'':{width + 13}}-> {result['hint']}" if result["hint"] else head


async def _run(command: Sequence[str], probe_seconds: float, *, as_text: bool) -> list[Result]:
    # In a session of its own: Ctrl-C reaches this process alone, which then ends it.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, env=engine_environment(), start_new_session=True
    )
    try:
        results: list[Result] = []
        first = await _line(process, probe_seconds)
        names: list[str] = json.loads(first) if first else ["probes"]
        broken_off = ""
        for name in names:
            if broken_off:
                result = Result(name=name, status="not tried", found=broken_off, hint="")
            elif line := await _line(process, probe_seconds):
                result = json.loads(line)
            else:
                broken_off = f"{name} broke the run off"
                found = await _end(process)
                result = Result(name=name, status="failed", found=found, hint="report it with this output")
            results.append(result)
            if as_text:
                print(text(result, max(map(len, names))), flush=True)
        return results
    finally:
        await _end(process)


async def _line(process: Process, seconds: float) -> bytes:
    """The next line, or nothing where the process ended or said none for so long."""
    assert process.stdout is not None
    try:
        return await asyncio.wait_for(process.stdout.readline(), seconds)
    except TimeoutError:
        return b""


async def _end(process: Process) -> str:
    """Why the process says no more, in words; it is ended if it has not yet."""
    try:
        code = await asyncio.wait_for(process.wait(), 2.0)
    except TimeoutError:
        process.kill()
        await process.wait()
        return "did not answer in time, and was ended"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
