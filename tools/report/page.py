"""A report as a page in Markdown. Every number is the JSON's. Imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

from tools.report.expected import FIGURES

Report = dict[str, Any]

CHECKED = {
    "npu-report": """
The NPU code of dflash-server was checked against torch_npu's schemas, meta kernels and host checks on CPU; not run
on an Ascend device by its authors. This page says what this host's device did, and no other. What is `expected` is of
a model of a step or of other servers' reports, and was not measured with this server.""",
    "gpu-report": """
The CUDA code of dflash-server was checked in Triton's interpreter and compiled for sm_90. This page says what this
host's GPU did, and no other.""",
}
ABOUT = {
    "host": "What `dflash-server check` finds.",
    "operators": """
Each operator against PyTorch on the CPU in float32. A shape lists the sizes of the inputs, rows or sequences first.
`relative` is a share of the largest value; bfloat16 rounds at 0.004. `us` is one call, in a graph on a GPU. `share` is
of the memory's bandwidth; it may pass 1 where caches hold the inputs.""",
    "open_points": "Questions that only a device can answer.",
    "engine": """
The same greedy requests for the demo pair in bfloat16. Where a text first leaves another, `gap` is how far the
worse of the two tokens lies below the best logit, in float32 on the CPU.""",
    "pair": """
Real weights, greedy. Texts with drafts against texts without, of questions, of prompts of 40 to 3,000 tokens, and of
single requests whose contexts pass 1,024 and 8,192 tokens.""",
    "server": """
Real weights behind HTTP: a question behind others, about 3,500 tokens, and answers of 1,500 without thinking, which go
on behind their end. `accepted` counts a step's tokens.""",
    "step": """
The demo pair in bfloat16, whole blocks. `launch` is the host's time to schedule and launch a step, `read` its wait for
the result.""",
    "roofline": """
A floor is the time to read the weights once, or to multiply them, whichever is longer. Layers are those of Qwen3-8B,
and their time is the sum of their products. Figures of an H200 were measured. Figures of Ascend chips are assumptions
from secondary sources, good to 15 % at best. A copy counts bytes read and written.""",
    "costs": """
RANDOM WEIGHTS of the sizes of Qwen3-8B and its draft, in graphs unless said otherwise. The last line is a prediction
from these times.""",
    "collectives": """
Sums of rows of 4,096 over ranks with a device each, in the server's dtype, by the library that the server uses. A time
is of one sum, launched eagerly or among 20 in a graph. `same_bits_alone` False means that a row's bits depend on rows
beside it, so text depends on the batch within rounding. `added_in_order_of_ranks` True is the order that a CPU has. On
NPUs a graph of two ranks has a sum between two calls of attention: where its capture fails or its replay hangs, give
another HCCL_OP_EXPANSION_MODE, or --enforce-eager.""",
    "equality": """
RANDOM WEIGHTS: the tokens are meaningless. Texts from graphs, eager code and overlap. Tokens are alike before the
first difference from the text of another way. The same steps run without capture must be the same, drawn tokens too.
Eager code, other overlap and no draft round sums in another order, and random weights decide by little. They are
compared in fp32, where a near tie is rare, and one request of six may differ. With --batch-invariant all texts must be
the same.""",
    "speeds": """
RANDOM WEIGHTS, but for the real pair: the tokens are meaningless; the sizes, and so the times, are those of the models.
SIMULATED ACCEPTANCE, but for the real pair: how many drafts are accepted is drawn, not found out. Output tokens per
second are from the first request to the last one's end, prompts included. Steady is of the steps in which all requests
decode, `tok/s at the mean length` the same with the mean acceptance length in place of the drawn one, and refilled
where a request that ends makes room for the next. The real pair answers the same questions at each concurrency. Kernels
of a decode step are by CUPTI; what they do not fill of a step are gaps.""",
}
VERDICT_CHARS = 3000
HEADLINES = {"host": ("chip", "versions", "driver"), "open_points": ("combination",)}
"""Parts whose `found` stands in the summary. Of other sections it is all."""


def page(report: Report) -> str:
    """Return the page: what is wrong first, and last a GPU's figures beside what was predicted of them."""
    on_gpu, wrong = report["report"] == "gpu-report", _wrong(report)
    blocks = [
        f"# {report['report']}: {report.get('chip') or report['device']}",
        *([f"## Wrong\n\n{table(wrong)}"] if wrong else []),
        CHECKED[report["report"]].strip(),
        "\n".join(f"- {line}" for line in summary(report)),
        "\n".join(f"- {name}: {version}" for name, version in report.get("versions", {}).items()),
    ]
    for name, section in report["sections"].items():
        took = f" It took {section['seconds']:g} s." if "seconds" in section else ""
        blocks += [f"## {title(name)}", ABOUT[name].strip() + took, table(_parts(section)), table(_cases(section))]
    if on_gpu:
        blocks.append(f"## Figures\n\n{figures(report)}")
    return "\n\n".join(filter(None, blocks)) + "\n"


def figures(report: Report) -> str:
    """Return the table of what was predicted of a GPU and of what was measured."""
    results = {part["name"]: part["result"] for section in report["sections"].values() for part in section["parts"]}
    return table(
        {
            "figure": f"{part}: {figure}",
            "predicted": float(value),
            "by": "prototype" if part.startswith("products") else "model",
            "measured": (measured := results.get(part, {}).get(figure)),
            "measured / predicted": measured and round(measured / value, 2),
        }
        for part, values in FIGURES.items()
        for figure, value in values.items()
    )


def _wrong(report: Report) -> list[dict[str, Any]]:
    """Return a row for each case that did not pass, and for each part that failed without one."""
    rows = []
    for name, section in report["sections"].items():
        for part in section["parts"]:
            cases = [case for case in part["result"].get("cases", []) if case.get("passed") is False]
            if part["status"] == "failed":
                said = part.get("error", {}).get("says") or part["result"].get("found")
                rows += [{"section": name, "part": part["name"], "found": said} | case for case in cases or [{}]]
    return rows


def summary(report: Report) -> list[str]:
    """Return a line about the report, and one a section, for an issue."""
    what = " ".join(filter(None, (report["report"], report["device"], report.get("chip"))))
    lines = [f"dflash-server {report['server']} {what}, {report['time']}, {report['failed']} failed"]
    for name, section in report["sections"].items():
        parts, wanted = section["parts"], HEADLINES.get(name)
        told = [part for part in parts if part["status"] != "not tried" and (wanted is None or part["name"] in wanted)]
        found = [f"{part['name']}: {part['result']['found']}" for part in told if part["result"].get("found")]
        lines.append(f"{title(name)}: {'; '.join([_counts(parts), *found])}")
    return lines


def verdict(report: Report) -> str:
    """Return the summary again, in VERDICT_CHARS at most, for the end of the output: a reader may see no more.

    The longest lines are cut to the same length.
    """
    lines, most = summary(report), VERDICT_CHARS
    while sum(min(len(line), most) + 1 for line in lines) > VERDICT_CHARS:
        most -= 1
    return "\n".join(line if len(line) <= most else f"{line[: most - 4]} ..." for line in lines)


def title(section: str) -> str:
    return section.capitalize().replace("_", " ")


def _counts(parts: list[dict[str, Any]]) -> str:
    """Count each status. Parts that failed or were not tried are named."""
    statuses = [part["status"] for part in parts]
    counts = []
    for status in dict.fromkeys(statuses):
        names = [part["name"] for part in parts if part["status"] == status and status in ("failed", "not tried")]
        counts.append(f"{statuses.count(status)} {status}" + (f" ({', '.join(names)})" if names else ""))
    return ", ".join(counts) or "nothing was measured"


def _parts(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each part that says more than its cases do, with its number in the section."""
    rows = []
    for number, part in enumerate(section["parts"], 1):
        said = {key: value for key, value in part["result"].items() if key != "cases"}
        if said or part["status"] != "ok" or "error" in part:
            error = part.get("error", {})
            met = {"error": error["says"], "meaning": error.get("meaning")} if error else {}
            rows.append({"point": number, "part": part["name"], "status": part["status"]} | said | met)
    return rows


def _cases(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"part": part["name"]} | case for part in section["parts"] for case in part["result"].get("cases", [])]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with the columns of all rows, in the order in which they first occur; nothing without rows."""
    rows = list(rows)
    head = list(dict.fromkeys(key for row in rows for key in row))
    lines = [head, ["---"] * len(head), *([shown(row.get(key)) for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) if rows else ""


def shown(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
