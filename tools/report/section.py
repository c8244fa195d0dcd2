"""One section of a report in a separate process, because a part may break the device for its process.

python -m tools.report.section NAME OPTIONS SKIP SECONDS

OPTIONS are JSON of `part.Options`. The process writes `{"parts": names, "chip": name}` to stdout as a line of JSON,
and then a line for each part but the first SKIP. All should be over in SECONDS. Output of libraries goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tools.report.part import Options, Part, answer
from tools.report.sections import SECTIONS


def main(arguments: Sequence[str]) -> None:
    name, wishes, skip, seconds = arguments
    options, ends = Options(**json.loads(wishes)), time.monotonic() + float(seconds)
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        tell(
            lambda: (chip(options), SECTIONS[options.kind][name].make(options, ends)),
            int(skip),
            lambda line: print(json.dumps(line), file=lines, flush=True),
            lambda: usable(options),
        )
    sys.stderr.flush()
    os._exit(0)  # A device in a bad state can hang the interpreter's exit.


def tell(
    make: Callable[[], tuple[str, list[Part]]],
    skip: int,
    say: Callable[[dict[str, Any]], None],
    usable: Callable[[], bool],
) -> None:
    """Write the names of all parts that `make` returns, then the answer of each after the first `skip`.

    A part with an error that leaves the device not `usable` is the last one, and has `over`. If `make` raises, a part
    "start" says why.
    """
    try:
        chip, made = make()
    except Exception as error:
        reason = error

        def fail() -> dict[str, Any]:
            raise reason

        chip, made = "", [Part("start", fail)]
    say({"parts": [part.name for part in made], "chip": chip})
    for part in made[skip:]:
        result = answer(part)
        over = "error" in result and not usable()
        say(result | ({"over": True} if over else {}))
        if over:
            return


def chip(options: Options) -> str:
    """Choose the GPU for this process and return its name; an NPU is opened by its parts."""
    if options.kind != "cuda":
        return ""
    import torch

    torch.cuda.set_device(options.index)
    return torch.cuda.get_device_name(options.index)


def usable(options: Options) -> bool:
    """Return False if the device may be in no state for more: a GPU after an illegal access, an NPU after any error."""
    if options.kind != "cuda":
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
