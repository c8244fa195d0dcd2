"""`dflash-server check`: start the probes of a device in a separate process, and print what they find."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from typing import TypedDict

from app.engine_client.child_process import LineProcess

COMMAND = (sys.executable, "-P", "-m", "app.check.probes")
PROBE_SECONDS = 300.0
"""A first run on an NPU loads and compiles kernels; a probe that takes longer hangs."""
START_SECONDS = 300.0
"""The process imports torch before it names its probes, if the device is `auto`."""
INTERRUPTED = 130


class Result(TypedDict):
    """Finding of one probe. `status` is ok, warning, failed or "not tried"; `hint` says what to do, or is empty."""

    name: str
    status: str
    found: str
    hint: str


def report(
    device: str,
    *,
    as_json: bool,
    ranks: int = 1,
    command: Sequence[str] = COMMAND,
    limit: float = PROBE_SECONDS,
) -> int:
    """Print a line for every probe as it comes, or all of them as one JSON object. Return 1 if one failed, else 0.

    Several `ranks` of one model each have a device, and add up.
    """

    def tell(result: Result, names: list[str]) -> None:
        if not as_json:
            print(text(result, max(map(len, names))), flush=True)

    try:
        results = asyncio.run(ask([*command, device, str(ranks)], limit, tell))
    except KeyboardInterrupt:
        return INTERRUPTED
    failures = sum(result["status"] == "failed" for result in results)
    if as_json:
        print(json.dumps({"device": device, "failed": failures, "results": results}, indent=2), flush=True)
    else:
        print(f"{failures} failed" if failures else "nothing failed", flush=True)
    return 1 if failures else 0


def text(result: Result, width: int) -> str:
    """Return a result as text. Names are padded to `width`, and the hint comes under the finding."""
    head = f"{result['name']:{width}}  {result['status']:9}  {result['found']}"
    return f"{head}\n{'':{width + 13}}-> {result['hint']}" if result["hint"] else head


async def ask(command: Sequence[str], probe_seconds: float, tell: Callable[[Result, list[str]], None]) -> list[Result]:
    """Return the results of the probes that `command` runs. `tell` gets each as it comes, with all probes' names."""
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
            tell(result, names)
        return results
    finally:
        await process.end()
