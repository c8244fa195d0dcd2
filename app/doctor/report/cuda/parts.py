"""A section of gpu-report is a list of parts, told one by one, so that what breaks in one takes no other along."""

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]
"""`passed` is there where something was checked, `failed` where it could not be done, with a reason."""


class Part(NamedTuple):
    name: str
    run: Callable[[], list[Row]]


def tell(
    make: Callable[[], tuple[str, list[Part]]],
    skip: int,
    say: Callable[[dict[str, Any]], None],
    usable: Callable[[], bool],
) -> int:
    """Say the device and the names of all parts that `make` gives, then the rows of each behind the first `skip`.

    A part that raises has one row, which says so. Where the device is not `usable` after a failure, as behind an
    illegal access, that part is the last one: it is said to be `over`. Returns an exit code.
    """
    try:
        device, parts = make()
    except Exception as error:  # whatever it is: the rest of the report is worth as much
        say(failure(error))
        return 1
    say({"device": device, "parts": [part.name for part in parts]})
    for part in parts[skip:]:
        try:
            rows = part.run()
        except Exception as error:
            rows = [{"part": part.name} | failure(error)]
        over = any("failed" in row for row in rows) and not usable()
        say({"rows": rows, "over": over})
        if over:
            return 1
    return 0


def failure(error: Exception) -> Row:
    return {"passed": False, "failed": in_a_line(error), "traceback": "".join(traceback.format_exception(error))}


def in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
