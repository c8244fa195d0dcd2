"""The process that compiles an engine's forwards while that serves: `python -m app.engine.compiler NICE`.

The first line of stdin is an EngineConfig, and stdin's end means that the engine is gone. The last line of
stderr about an error says why the process fails.
"""

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path


def main() -> None:
    os.nice(int(sys.argv[1]))
    with contextlib.suppress(OSError):  # where memory runs out, Linux ends this process, and not the engine
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    settings = sys.stdin.readline()
    threading.Thread(target=_end_with_engine, daemon=True).start()
    from app.engine.compile.packages import keep_compiled  # PyTorch takes seconds, at that priority too
    from app.engine.load.engine import traced_forward
    from app.wire import decode_config

    keep_compiled(traced_forward(decode_config(settings)))


def _end_with_engine() -> None:
    """Wait for the end of stdin, and kill this process group, g++ included."""
    while sys.stdin.read(1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
