"""Code of answers is judged by its tests, and cannot lie, hang or do harm."""

import os
import time
from pathlib import Path

import pytest

from tools.bench.sandbox import FILE_BYTES, MEMORY, passes

RIGHT = "def f(x):\n    return x + 1\n"
TEST = "assert f(1) == 2\n"
IN_A_TRY = "try:\n    {}\nexcept BaseException:\n    pass\n" + RIGHT


@pytest.mark.parametrize(
    "code",
    [
        RIGHT,
        "import collections, math, re, random, typing, heapq, doctest, unittest\nrandom.random()\nprint(1)\n" + RIGHT,
        "with open('own', 'w') as file:\n    file.write('x')\nassert open('own').read() == 'x'\n" + RIGHT,
    ],
)
def test_right_code_passes(code: str) -> None:
    assert passes([code, TEST])


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return x",
        "def f(x):",
        "",
        "raise SystemExit(0)",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "print('passed' * 99)\nimport sys\nsys.stdout.flush()\nsys.exit(0)",
        "import os\n[os.write(fd, b'passed') for fd in (1, 2)]\nos._exit(0)",
        f"hog = bytearray({MEMORY})\n{RIGHT}",
        f"file = open('own', 'wb')\nfile.write(bytes({2 * FILE_BYTES}))\nfile.close()\n{RIGHT}",
        f"for i in range(99):\n    open(str(i), 'w')\n{RIGHT}",
        "input()\n" + RIGHT,
        "import builtins\nbuiltins.exec = builtins.compile = print",
        *map(
            IN_A_TRY.format,
            (
                "open('/etc/passwd')",
                "open('../other', 'w')",
                "open(0)",
                f"open({os.__file__!r}, 'a')",
                "import os; os.listdir('/')",
                "import os; os.fork()",
                "import os; os.kill(1, 0)",
                "import os; os.system('true')",
                "import os; os.remove('/tmp/none')",
                "import subprocess; subprocess.run(['true'])",
                "import socket; socket.create_connection(('127.0.0.1', 9))",
                "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
                "import sqlite3; sqlite3.connect('own')",
                "import _xxsubinterpreters",
                "import ctypes; ctypes.CDLL(None).fork()",
            ),
        ),
    ],
)
def test_wrong_and_hostile_code_does_not_pass(code: str) -> None:
    assert not passes([code, TEST])


@pytest.mark.parametrize(
    "code", ["while True:\n    pass", "import time\ntime.sleep(99)", IN_A_TRY.format("while 1: pass")]
)
def test_code_without_an_end_is_ended(code: str) -> None:
    started = time.perf_counter()
    assert not passes([code, TEST], seconds=0.4)
    assert time.perf_counter() - started < 60


def test_nothing_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert passes(["open('own', 'w').write('x')\n" + RIGHT, TEST])
    assert list(tmp_path.iterdir()) == []
    assert not passes(["import os\nassert 'SECRET' in os.environ", "pass"])
