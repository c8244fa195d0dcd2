"""gpu-report.json as a page in Markdown, and its tokens per second as a picture."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Report = dict[str, Any]
PUBLISHED = "published (different workload)"
"""A column of the speeds."""

ABOUT = {
    "kernels": "Each kernel against PyTorch's operators in fp32: the largest difference as a share of the largest "
    "value (bf16 rounds at 0.4 %), microseconds of a call in a graph, and the bytes that it must move as a share of "
    "what the memory gives. Small inputs stay in the cache, so that shares may pass 1.",
    "equality": "Tokens before the first difference from the text of another way. The same steps run without capture "
    "must be the same, drawn tokens too. Eager code, other overlap and no draft round sums in another order, and "
    "random weights decide by little: they are compared in fp32, where a near tie is rare, and one request of six may "
    "differ.",
    "speeds": "Output tokens per second from the first request to the last one's end, prompts included. A floor is the "
    "time to read what must be read at 4.3 TB/s or to compute what must be computed at 790 TFLOP/s, as measured on an "
    "H200, stage after stage; no engine passes it. That of `auto` is of the width that has the lowest. Published: "
    "SGLang on one H200 with Qwen3-8B, GSM8K text and up to 2,048 tokens: a DIFFERENT WORKLOAD.",
    "attention": "Other launches of our attention: the five fastest, and the backend's own.",
    "prefill": "Attention of prompts, in microseconds a layer, and the first call for these lengths.",
    "device": "What this GPU gives: a copy counts bytes read and written.",
}
TITLES = {
    "device": "The device",
    "kernels": "Kernels",
    "equality": "Graphs, eager code and overlap",
    "speeds": "Tokens per second",
    "attention": "Launches of attention",
    "prefill": "Prompts",
}


def page(report: Report) -> str:
    blocks = [f"# gpu-report: {report['device']}", verdict(report)]
    blocks += [f"*** {banner} ***" for banner in report["banners"]]
    blocks.append("\n".join(f"- {key}: {value}" for key, value in report["versions"].items()))
    for name, section in report["sections"].items():
        blocks += [f"## {TITLES[name]}", f"{ABOUT[name]} It took {section['seconds']:.0f} s."]
        if "error" in section:
            blocks.append(f"**FAILED**: {section['error']['failed']}")
        blocks.append(table(section["rows"]))
    return "\n\n".join(filter(None, blocks)) + "\n"


def verdict(report: Report) -> str:
    """A line for each kind of check, for what failed, for each speed, and for what was left out."""
    lines = []
    for name, section in report["sections"].items():
        judged = [row["passed"] for row in section["rows"] if "passed" in row]
        if judged:
            lines.append(f"- {TITLES[name]}: {sum(judged)} of {len(judged)} passed")
        failed = [row for row in section["rows"] if "failed" in row and "passed" in row]
        lines += [f"- {TITLES[name]}: {row.get('part') or row['kernel']} FAILED: {row['failed']}" for row in failed]
        if "error" in section:
            lines.append(f"- {TITLES[name]}: FAILED: {section['error']['failed']}")
        if section["left_out"]:
            why = "" if "error" in section else ", for time was up"
            lines.append(f"- {TITLES[name]}: left out{why}: {'; '.join(section['left_out'])}")
    lines += [f"- {row['way']} at {row['concurrency']}: {_speed(row)}" for row in _speeds(report)]
    lines += [f"- {TITLES[name]}: left out, for time was up" for name in report["left_out"]]
    return "\n".join(lines)


def _speeds(report: Report) -> list[dict[str, Any]]:
    rows = report["sections"].get("speeds", {"rows": []})["rows"]
    return [row for row in rows if "tok/s" in row]


def _speed(row: Mapping[str, Any]) -> str:
    wanted, published = row["target"], row[PUBLISHED]
    met = "no target" if wanted is None else f"target {wanted}: {'met' if row['tok/s'] >= wanted else 'MISSED'}"
    text = f"{row['tok/s']:.0f} tok/s, {met}; {row['share of floor']:.0%} of the floor's {row['floor tok/s']:.0f}"
    return text if published is None else f"{text}; {PUBLISHED}: {published}"


def failures(report: Report) -> int:
    """Checks that failed or could not be made; a target that is missed is none."""
    sections = report["sections"].values()
    return sum("error" in section for section in sections) + sum(
        row.get("passed") is False for section in sections for row in section["rows"]
    )


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Columns are those of all rows, in the order they come up."""
    rows = list(rows)
    head = list(dict.fromkeys(key for row in rows for key in row if key != "traceback"))
    if not head:
        return ""
    lines = [head, ["---"] * len(head), *([shown(key, row.get(key)) for key in head] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, list):
        return ", ".join(shown(key, one) for one in value)
    if isinstance(value, float):
        return f"{value:.1%}" if "share" in key else f"{value:.4f}" if key == "error" else f"{value:.5g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def draw(report: Report, path: Path) -> None:
    """The speeds, their floors and what others published, if there are any speeds. Needs matplotlib."""
    rows = _speeds(report)
    if not rows:
        return
    from matplotlib.figure import Figure

    counts = sorted({row["concurrency"] for row in rows})
    figure = Figure(figsize=(4.5 * len(counts), 4), layout="constrained")
    for panel, count in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        own = [row for row in rows if row["concurrency"] == count]
        places = range(len(own))
        panel.bar(places, [row["floor tok/s"] for row in own], width=0.8, color="0.9", label="floor")
        panel.bar(places, [row["tok/s"] for row in own], width=0.5, label="measured")
        for key, mark in (("target", "_"), (PUBLISHED, "x")):
            known = [(place, row[key]) for place, row in zip(places, own, strict=True) if row[key] is not None]
            label = "SGLang, different workload" if key == PUBLISHED else key
            if known:
                panel.scatter(*zip(*known, strict=True), marker=mark, s=200, color="k", zorder=3, label=label)
        panel.set_xticks(list(places), [row["way"] for row in own])
        panel.set_title(f"{count} at once")
        panel.set_ylabel("output tok/s")
        panel.legend(fontsize=7)
    figure.suptitle(f"{report['device']}: random weights, simulated acceptance")
    figure.savefig(path, dpi=120)
