"""npu-report.json as a page in Markdown. Every number in it is the JSON's, or counts what the JSON lists."""

from collections.abc import Iterable
from typing import Any

from app.doctor.report.npu_summary import summary

CHECKED = (
    "The NPU code of dflash-server was checked against torch_npu's schemas, meta kernels and host checks on CPU; not "
    "run on an Ascend device by those who wrote it. What stands below is what this host's device did, and no other."
)
ROOFLINE = (
    "Figures of the chip are assumptions from secondary sources, good to 15 % at best; shares are of those. A floor is "
    "the time to read all weights once, or to multiply them, whichever is longer."
)
ENGINE = (
    "The same greedy requests for the demo pair in bfloat16. Where a text first leaves another, `gap` is how far the "
    "worse of the two tokens lies below the best logit, in float32 on the CPU."
)
STEP = (
    "The demo pair in bfloat16. `launch` is the host's time to schedule and launch a step, `read` its wait for the "
    "result. Operators are counted at the dispatcher without views; graph replays are not among them, attention calls "
    "that are given new lengths are."
)


def page(report: dict[str, Any]) -> str:
    sections = report["sections"]
    blocks = [
        f"# dflash-server npu-report, {report['device']}",
        f"{CHECKED}",
        "```text\n" + "\n".join(summary(report)) + "\n```",
        *_block("Host", sections.get("host"), _host, "What `dflash-server check` finds."),
        *_block(
            "Operators",
            sections.get("operators"),
            _operators,
            "Against the CPU in float32; `relative` is of the largest value.",
        ),
        *_block("Open points", sections.get("open_points"), _open_points, "What only a device can answer."),
        *_block("Engine", sections.get("engine"), _engine, ENGINE),
        *_block("Step", sections.get("step"), _step, STEP),
        *_block("Roofline", sections.get("roofline"), _roofline, ROOFLINE),
        *_errors(sections),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Nothing without rows."""
    cells = [list(head), *(list(row) for row in rows)]
    if len(cells) == 1:
        return ""
    lines = ["| " + " | ".join(map(shown, row)) + " |" for row in cells]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in cells[0]) + " |", *lines[1:]])


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _block(title: str, section: dict[str, Any] | None, body: Any, about: str) -> list[str]:
    if section is None:
        return []
    took = f" It took {section['seconds']:g} s." if "seconds" in section else ""
    return [f"## {title}", about + took, *body(section["parts"])]


def _host(parts: list[dict[str, Any]]) -> list[str]:
    rows = [(part["name"], part["status"], said(part), part["result"].get("hint", "")) for part in parts]
    return [table(("probe", "status", "found", "what to do"), rows)]


def _operators(parts: list[dict[str, Any]]) -> list[str]:
    keys = ("shape", "absolute", "relative", "tolerance", "passed")
    rows = [(part["name"], *(case[key] for key in keys)) for part in parts for case in part["result"].get("cases", [])]
    return [*_unmeasured(parts, "cases"), table(("operator", *keys), rows)]


def _open_points(parts: list[dict[str, Any]]) -> list[str]:
    return [
        table(
            ("what was tried", "what came out"),
            [(part["result"].get("tried", part["name"]), said(part)) for part in parts],
        )
    ]


def _engine(parts: list[dict[str, Any]]) -> list[str]:
    measured = [(part["name"], part["result"], part["status"]) for part in parts if "prompts" in part["result"]]
    rows = [
        (
            name,
            f"{found['identical']} of {found['prompts']}",
            found.get("identical_to_bfloat16"),
            _lengths(found.get("acceptance_length")),
            _lengths(found.get("of_same_texts")),
            found.get("same_acceptance_in_every_step"),
            status,
        )
        for name, found, status in measured
    ]
    head = (
        "compared",
        "texts the same",
        "the same as the CPU's in bfloat16",
        "acceptance length",
        "of the same texts",
        "every step accepts the same",
        "status",
    )
    differences = [
        (name, *(d[key] for key in ("prompt", "token", "gap")))
        for name, found, _ in measured
        for d in found["differences"]
    ]
    return [
        *_unmeasured(parts, "prompts"),
        table(head, rows),
        table(("compared", "prompt", "token", "gap"), differences),
    ]


def _lengths(lengths: dict[str, float] | None) -> str | None:
    return ", ".join(f"{where} {x:g}" for where, x in lengths.items()) if lengths else None


def _step(parts: list[dict[str, Any]]) -> list[str]:
    rows = []
    for part in parts:
        if found := part["result"].get("step") and part["result"]:
            times = [found[name][key] for name in ("step", "launch", "read") for key in ("median_ms", "p90_ms")]
            rows.append((part["name"], *times, found["operators"], found["copies"]))
    head = (
        "step",
        "median ms",
        "p90 ms",
        "launch median",
        "launch p90",
        "read median",
        "read p90",
        "operators",
        "copies",
    )
    return [*_unmeasured(parts, "step"), table(head, rows)]


def _roofline(parts: list[dict[str, Any]]) -> list[str]:
    blocks = []
    for part in parts:
        numbers = {key: value for key, value in part["result"].items() if key != "cases"}
        blocks.append(
            f"**{part['name']}**: "
            + ("; ".join(f"{key} {shown(value)}" for key, value in numbers.items()) or said(part))
        )
        if cases := part["result"].get("cases"):
            blocks.append(table(cases[0], [case.values() for case in cases]))
    return blocks


def _unmeasured(parts: list[dict[str, Any]], key: str) -> list[str]:
    """One list of the parts whose result has no `key`."""
    lines = [f"- {part['name']}: {part['status']}: {said(part)}" for part in parts if key not in part["result"]]
    return ["\n".join(lines)]


def _errors(sections: dict[str, Any]) -> list[str]:
    """Each with what its code means; tracebacks are in the JSON."""
    rows = [
        (name, part["name"], part["error"]["says"], part["error"].get("meaning"))
        for name, section in sections.items()
        for part in section["parts"]
        if "error" in part
    ]
    head = ("section", "part", "error", "meaning")
    return ["## Errors", "Their tracebacks are in npu-report.json.", table(head, rows)] if rows else []


def said(part: dict[str, Any]) -> str:
    return str(part["result"].get("found") or part.get("error", {}).get("says", ""))
