"""The threads that share the works of an operator: `Team` of app/engine/cpu/work.h, under the thread sanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from app.engine.cpu import library

PROGRAM = Path(__file__).with_name("threads.cpp")
PROMISES = [
    "others take the parts of a slow thread",
    "each thread begins with its own share in order",
    "who has no part sleeps while another has the last",
    "threads without work do not run",
    "threads may run on all cores of the process, whoever waited for them",
    "a call returns with all cores of the process",
    "results are equal however slow a thread is",
    "calls of many threads take turns",
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which(library.compiler()):
        pytest.skip("there is no g++")
    target = tmp_path_factory.mktemp("threads") / "threads"
    command = [library.compiler(), "-std=c++20", "-O1", "-DOPERATORS=tested", f"-I{Path(library.__file__).parent}"]
    command += [str(PROGRAM), "-o", str(target), "-lpthread"]
    if subprocess.run([*command, "-fsanitize=thread"], capture_output=True).returncode:  # without libtsan
        subprocess.run(command, check=True)
    return target


@pytest.mark.parametrize("promise", PROMISES)
def test_of_threads(program: Path, promise: str) -> None:
    environment = os.environ | {"TSAN_OPTIONS": "atexit_sleep_ms=0"}
    done = subprocess.run([program, promise], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
