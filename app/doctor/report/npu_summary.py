"""Ten lines of a report that can be pasted into an issue."""

from typing import Any


def summary(report: dict[str, Any]) -> list[str]:
    """Always ten; a line of what was not measured says so."""
    parts = {name: section["parts"] for name, section in report["sections"].items()}
    results = {(name, part["name"]): part["result"] for name, some in parts.items() for part in some}
    told = {
        part["name"]: part["result"]["found"] for part in parts.get("host", []) if part["status"] in ("ok", "warning")
    }
    return [
        f"dflash-server {report['server']} npu-report, {report['device']}, {report['time']}, {report['failed']} failed",
        f"host: {_versions(results, told)}",
        f"check: {_counts(parts.get('host', []))}",
        f"operators: {_operators(parts.get('operators', []))}",
        f"open points: {_counts(parts.get('open_points', []))}",
        f"texts as the CPU's in float32: {_texts(results, 'against the CPU', ('plain', 'eager', 'graphs'))}",
        f"texts as the eager engine's: {_texts(results, 'against eager', ('plain', 'graphs'))}",
        f"step of the demo pair, median ms: {_steps(parts.get('step', []), 'median_ms')}",
        f"operators launched a step: {_steps(parts.get('step', []), 'operators')}",
        f"roofline: {_roofline(results)}",
    ]


def _versions(results: dict[tuple[str, str], Any], host: dict[str, str]) -> str:
    versions = results.get(("open_points", "combination"), {}).get("versions")
    if versions:
        return ", ".join(f"{name} {said}" for name, said in versions.items())
    return "; ".join(host[name] for name in ("chip", "versions", "driver") if name in host) or "no NPU can be used here"


def _counts(parts: list[dict[str, Any]]) -> str:
    """How many of each status, with the names of those that failed."""
    statuses = [part["status"] for part in parts]
    counted = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    failed = [part["name"] for part in parts if part["status"] == "failed"]
    return (", ".join(counted) or "not measured") + (f": {', '.join(failed)}" if failed else "")


def _operators(parts: list[dict[str, Any]]) -> str:
    cases = [case for part in parts for case in part["result"].get("cases", [])]
    wrong = [part["name"] for part in parts if part["status"] == "failed"]
    if not cases and not wrong:
        return "not measured"
    right = sum(case["passed"] for case in cases)
    return f"{right} of {len(cases)} cases within tolerance" + (
        f"; WRONG OR FAILED: {', '.join(wrong)}" if wrong else ""
    )


def _texts(results: dict[tuple[str, str], Any], against: str, ways: tuple[str, ...]) -> str:
    said = []
    for way in ways:
        found = results.get(("engine", f"{way} {against}"), {})
        if "identical" in found:
            lengths = found.get("acceptance_length", {})
            drafts = (
                f" (acceptance {lengths['device']:g}, CPU {lengths['CPU float32']:g})"
                if lengths and way != "plain"
                else ""
            )
            said.append(f"{way} {found['identical']} of {found['prompts']}{drafts}")
    return ", ".join(said) or "not measured"


def _steps(parts: list[dict[str, Any]], key: str) -> str:
    said = [
        f"{part['name']} {part['result']['step'].get(key, part['result'].get(key)):g}"
        for part in parts
        if "step" in part["result"]
    ]
    return "; ".join(said) or "not measured"


def _roofline(results: dict[tuple[str, str], Any]) -> str:
    said = []
    if rate := results.get(("roofline", "copy"), {}).get("GB_s"):
        said.append(f"copy {rate:g} GB/s")
    if cases := results.get(("roofline", "matmul"), {}).get("cases"):
        said.append(f"matrix-vector {cases[0]['weights_GB_s']:g} GB/s")
        said.append(f"matmul {max(case['TFLOP_s'] for case in cases):g} TFLOP/s")
    for name in ("layers of Qwen3-8B", "demo pair"):
        if cases := results.get(("roofline", name), {}).get("cases"):
            case = cases[-1] if name == "demo pair" else cases[0]
            share = f", {case['share']:g} of the assumed roofline" if case["share"] else ""
            said.append(f"{name} {case['ms']:g} ms{share}")
    return "; ".join(said) or "not measured"
