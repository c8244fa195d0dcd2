"""`python -m app.doctor.report.npu SECTION DEVICE SKIP`, with `{"prompts", "stop_token_ids"}` on stdin.

Writes the names of the section's parts to stdout as one line of JSON, and one line for each part but the first SKIP. It
ends behind a part with an error. What libraries print goes to stderr.
"""

import importlib
import json
import os
import sys

from app.doctor.report.npu.part import Part, Prompts, answer


def main() -> None:
    section, device, skip = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as report:
        os.dup2(2, 1)
        given = json.load(sys.stdin)
        prompts = Prompts([tuple(prompt) for prompt in given["prompts"]], frozenset(given["stop_token_ids"]))
        parts = open_section(section, device, prompts)
        print(json.dumps([part.name for part in parts]), file=report, flush=True)
        for part in parts[int(skip) :]:
            found = answer(part)
            print(json.dumps(found), file=report, flush=True)
            if "error" in found:
                break
    sys.stderr.flush()
    os._exit(0)  # A device in a bad state can hang the interpreter's own exit.


def open_section(section: str, device: str, prompts: Prompts) -> list[Part]:
    """Its parts; one that says why, where the section itself cannot be loaded."""
    try:
        parts: list[Part] = importlib.import_module(f"app.doctor.report.npu.{section}").parts(device, prompts)
    except Exception as error:
        reason = error

        def fail() -> dict[str, object]:
            raise reason

        return [Part("start", fail)]
    return parts


if __name__ == "__main__":
    main()
