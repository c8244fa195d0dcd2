"""`dflash-server check`: start the probes of a device in a process of their own, and print what they find."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TypedDict

from app.client.child_process import LineProcess

COMMAND = (sys.executable, "-P", "-m", "app.doctor.device_check")
PROBE_SECONDS = 300.0
"""A first run on an NPU loads and compiles kernels; what takes longer than this hangs."""
START_SECONDS = 300.0
"""The process may take to name its probes: for `auto` it imports torch before it does."""
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
    process = await LineProcess.start(command)
    try:
        results: list[Result] = []
        first = await process.line(START_SECONDS)
        names: list[str] = json.loads(first) if first else ["probes"]
        broken_off = ""
        for name in names:
            if broken_off:
                result = Result(name=name, status="not tried", found=broken_off, hint="")
            elif line := await process.line(probe_seconds):
                result = json.loads(line)
            else:
                broken_off = f"{name} broke the run off"
                found = await process.end()
                result = Result(name=name, status="failed", found=found, hint="report it with this output")
            results.append(result)
            if as_text:
                print(text(result, max(map(len, names))), flush=True)
        return results
    finally:
        await process.end()
