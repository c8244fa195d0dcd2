"""The child of tools/bench/sandbox.py: reads a program from stdin, shuts itself in and executes it.

A forbidden act ends the process at once, so that no `except` hides it.
"""

import ctypes
import json
import os
import resource
import sys
from typing import Any

NEW_USER_AND_NETWORK = 0x10000000 | 0x40000000
"""CLONE_NEWUSER | CLONE_NEWNET of <sched.h>: without privileges, and with no interface but a loopback that is down."""
MODULES = (
    "_ctypes",
    "_dbm",
    "_gdbm",
    "_interp",
    "_multiproc",
    "_posix",
    "syslog",
    "_socket",
    "_test",
    "_xx",
    "readline",
)
"""Beginnings of the names of modules that open files, start code or call the system where no event says so."""
EVENTS = ("ctypes.", "fcntl.", "mmap.", "os.", "pty.", "resource.", "shutil.", "signal.", "socket.", "sqlite3.")
MAX_FILES = 16
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
READING = {"os.listdir", "os.scandir", "os.walk", "open"}


def main() -> None:
    task = json.load(sys.stdin)
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    programs = [compile(part, "answer", "exec") for part in task["parts"]]
    execute = exec  # by a name of ours, because the program may replace that of `builtins`
    _limit(task)
    _forbid()
    namespace: dict[str, Any] = {"__name__": "answer"}
    for program in programs:
        execute(program, namespace)
    os.write(out, task["word"].encode())
    os._exit(0)  # neither threads nor exit handlers of the program may go on


def _limit(task: dict[str, Any]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(NEW_USER_AND_NETWORK)  # where it is refused, the hook still stops sockets
    for kind, bound in (
        (resource.RLIMIT_CPU, task["seconds"]),
        (resource.RLIMIT_AS, task["memory"]),
        (resource.RLIMIT_FSIZE, task["file"]),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (bound, bound))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes", "resource")]:
        del sys.modules[name]


def _forbid() -> None:
    """Let the program read Python's library and its own folder, write there, and do little else outside of itself."""
    library, own = (os.path.realpath(path) + os.sep for path in (os.path.dirname(os.__file__), "."))  # noqa: PTH120
    realpath, fsdecode, end = os.path.realpath, os.fsdecode, os._exit
    may_write = iter(range(MAX_FILES))

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event in READING:
            path = arguments[0]
            if isinstance(path, int):
                end(1)
            place = realpath(fsdecode("." if path is None else path)) + os.sep
            for_reading = event != "open" or not arguments[2] & WRITING
            if not place.startswith((own, library) if for_reading else own):
                end(1)
            if not for_reading and next(may_write, None) is None:
                end(1)
        elif event.startswith(EVENTS) or (event == "import" and arguments[0].startswith(MODULES)):
            end(1)

    sys.addaudithook(check)


if __name__ == "__main__":
    main()
