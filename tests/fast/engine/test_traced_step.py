"""The length of the path of a decode step, in functions of app/ that the host runs for one."""

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType

from app.engine.device.torch import RerunGraph
from app.messages import Request
from tests.fast.engine.device_lengths import device_lengths
from tests.fast.engine.lossless import LUCKY, make_engine
from tests.fast.engine.pairs import make_pair

APP = Path(sys.modules["app"].__path__[0])
MOST_FUNCTIONS, MOST_FILES = 75, 18


class Trace:
    """Named functions of app/ that are called, by their files. What a graph reruns is the device's work, and none of
    the host's."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self._replays = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if code is RerunGraph.replay.__code__:
            self._replays += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not self._replays and not code.co_name.startswith("<"):
            path = Path(code.co_filename)
            if path.is_relative_to(APP):
                self.functions.add((str(path.relative_to(APP)), code.co_qualname))


def test_a_decode_step_with_graphs_and_overlap_has_a_short_path(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, **LUCKY)
    sizes = {"page_size": 4, "max_model_len": 96, "max_num_seqs": 4, "max_graphs": 4, "prefix_caching": True}
    with device_lengths():
        core = make_engine(pair.target, pair.draft, enforce_eager=False, verify=4, **sizes).core
    for name in ("a", "b"):
        core.add(Request(name, tuple(range(5)), 60))
    for _ in range(4):
        core.step()
    trace = Trace()
    sys.setprofile(trace)
    try:
        steps = [core.step() for _ in range(2)]
    finally:
        sys.setprofile(None)
    assert all(step.stats.num_drafting == 2 and not step.stats.not_ahead for step in steps)
    files = {
        file: [name for _, name in names] for file, names in groupby(sorted(trace.functions), lambda each: each[0])
    }
    lines = [f"{file}: {', '.join(names)}" for file, names in files.items()]
    found = f"{len(trace.functions)} functions in {len(files)} files:"
    assert len(trace.functions) <= MOST_FUNCTIONS and len(files) <= MOST_FILES, "\n".join([found, *lines])
    assert "EngineCore.step" in files["engine/core.py"]
