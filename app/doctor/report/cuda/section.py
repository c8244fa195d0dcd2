"""One section of gpu-report in a process of its own, which an illegal access may break for good.

python -m app.doctor.report.cuda.section NAME OPTIONS SKIP SECONDS

OPTIONS are the command's, as JSON; the first SKIP parts are left out, and all should be over in SECONDS. Says lines of
JSON, as `gpu_report_parts.tell` does; whatever else is printed goes to stderr.
"""

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence

from app.doctor.report.cuda.parts import Part, tell


def main(arguments: Sequence[str]) -> int:
    name, options, skip, seconds = arguments
    until = time.monotonic() + float(seconds)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return tell(
        lambda: parts(name, Namespace(**json.loads(options)), until),
        int(skip),
        lambda line: print(json.dumps(line), file=lines, flush=True),
        usable,
    )


def parts(name: str, options: Namespace, until: float) -> tuple[str, list[Part]]:
    """(the device's name, the section's parts). Raises what keeps them all from being run."""
    import torch

    from app.doctor.report.cuda import equality, kernels, speeds, trials
    from app.doctor.report.cuda.floor import Load
    from app.engine.cuda.backend import CudaBackend

    torch.cuda.set_device(options.device)
    device = torch.cuda.get_device_name(options.device)
    if name == "equality":
        return device, equality.parts("qwen3-0.6b", options.device)
    if name == "speeds":
        loads = [Load(concurrency, options.prompt, options.answer) for concurrency in options.concurrency]
        return device, speeds.parts(options.model, loads, options.device, options.rounds, until)

    backend = CudaBackend(torch.device(options.device))

    def seconds(run: Callable[[], object]) -> float:
        return kernels.seconds_in_a_graph(backend, run)

    if name == "device":
        return device, kernels.of_device(backend.device, seconds)
    cases = kernels.Cases(backend, kernels.Sizes(), torch.bfloat16)
    if name == "kernels":
        return device, kernels.parts(cases, seconds)
    if name == "prefill":
        return device, trials.of_prompts(backend, cases, seconds, trials.seconds_at_once)
    return device, trials.of_launches(backend, cases, kernels.Sizes(), seconds)


def usable() -> bool:
    """Whether the device still does anything for this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
