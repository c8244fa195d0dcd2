"""The path of a plain chat request through the API process stays short enough to read."""

import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fast.api.errors import CHAT
from tests.fast.api.served import serving

APP = str(Path(__file__).parents[3] / "app") + "/"
MAX_FUNCTIONS = 163
MAX_FILES = 25


def test_a_chat_request_runs_few_functions_in_few_files(model_folder: Path) -> None:
    """Functions without a name, like lambdas and comprehensions, do not count."""
    seen: set[CodeType] = set()
    is_on = False

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if is_on and event == "call" and frame.f_code.co_filename.startswith(APP):
            seen.add(frame.f_code)

    threading.setprofile(note)  # for the threads of the server, which start below
    try:
        with serving(model_folder) as server:
            server.ready()
            server.script.plan(server.ids("hello"), server.ids("world"), [2])
            assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200
            is_on = True
            assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200
            is_on = False
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    by_file: dict[str, list[str]] = defaultdict(list)
    for code in seen:
        if not code.co_name.startswith("<"):
            by_file[code.co_filename.removeprefix(APP)].append(code.co_qualname)
    num_functions = sum(map(len, by_file.values()))
    path = "\n".join(f"{file}: {', '.join(sorted(names))}" for file, names in sorted(by_file.items()))
    counts = f"{num_functions} functions in {len(by_file)} files"
    assert num_functions <= MAX_FUNCTIONS and len(by_file) <= MAX_FILES, f"{counts}:\n{path}"
    assert num_functions > MAX_FUNCTIONS / 2, f"too few were seen: {counts}:\n{path}"
