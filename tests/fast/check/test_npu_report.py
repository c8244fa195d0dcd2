"""`report --device npu` without torch_npu: its processes are stand-ins, and what fails leaves the rest."""

import importlib.util
import json
import re
import socket
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.check import command as check
from app.config.error import ConfigError
from tests import ROOT
from tests.fast.check.patient import HANG, Patient
from tools.report import runner
from tools.report.command import main, parse
from tools.report.page import page, summary, table
from tools.report.pair import without
from tools.report.part import answer
from tools.report.runner import Program, report, scrubbed
from tools.report.sections import SECTIONS

HAS_NPU = any(Path("/dev").glob("davinci*")) or importlib.util.find_spec("torch_npu") is not None


def part(name: str, status: str = "ok", **more: Any) -> dict[str, Any]:
    return {"name": name, "status": status, "seconds": 0.5, "result": {}} | more


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_NPU, reason="tells what a machine without an NPU is told")
def test_without_an_npu_it_says_so_in_a_line_and_writes_what_it_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.report", "--device", "npu", "--out", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    *_, written, error, hint = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert error.startswith("error: no NPU can be used here: ")
    assert "dflash-server check --device npu" in hint and "npu-report.json" in written
    found = json.loads((tmp_path / "new" / "npu-report.json").read_text())
    assert {p["name"]: p["status"] for p in found["sections"]["host"]["parts"]}["torch_npu"] == "failed"
    for name in SECTIONS["npu"]:
        assert [p["status"] for p in found["sections"][name]["parts"]] == ["not tried"]
    assert "no NPU can be used here" in (tmp_path / "new" / "npu-report.md").read_text()


def test_device_and_folder_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path, str]] = []
    monkeypatch.setattr(
        runner, "report", lambda device, folder, _, name, **more: asked.append((device, folder, name)) or 0
    )
    assert main(["--device", "npu:2", "--out", "there"]) == main(["--device", "npu"]) == 0
    assert asked == [("npu:2", Path("there"), "npu-report"), ("npu", Path(), "npu-report")]


# ---- sections and their processes -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runner, check):
        monkeypatch.setattr(module, "LineProcess", Patient)
    monkeypatch.setattr(runner, "START_SECONDS", 600.0)
    monkeypatch.setattr(runner, "END_SECONDS", 900.0)


def stand_in(program: str) -> tuple[str, ...]:
    """A process that has `sys`, `say`, `hang` and its arguments."""
    say = f"import json, os, sys, time\ndef say(x): print(json.dumps(x), flush=True)\ndef hang(): {HANG}\n"
    return (sys.executable, "-c", say + program)


HOST = stand_in(
    "say(['torch', 'chip'])\nfor n in ('torch', 'chip'): say(dict(name=n, status='ok', found='fine', hint=''))"
)
SECTION = """
section, skip, left = sys.argv[1:]
assert float(left) > 0
say({'parts': ['one', 'two', 'three'], 'chip': ''})
for name in ['one', 'two', 'three'][int(skip):]:
    if section == 'step' and name == 'two': os.abort()
    if section == 'engine' and name == 'two': hang()
    part = dict(name=name, status='ok', seconds=1.0, result={'process': os.getpid()})
    if section == 'roofline' and name == 'two':
        part |= dict(status='failed', over=True, error=dict(says='RuntimeError: 507015', meaning=None, traceback='...'))
    say(part)
    if 'error' in part: break
"""
KILLED, HANGS, RAISES, FINE = "step", "engine", "roofline", "operators"


def run(folder: Path, *names: str, section: str = SECTION, host: tuple[str, ...] = HOST) -> tuple[int, dict[str, Any]]:
    """(exit code, sections) of sections with these names."""
    sections = {name: Program((*stand_in(section), name), 600.0) for name in names}
    code = report("npu:1", folder, sections, name="npu-report", host=host)
    found = json.loads((folder / "npu-report.json").read_text())
    assert (folder / "npu-report.md").read_text() == page(found)
    assert {path.name for path in folder.iterdir()} == {"npu-report.json", "npu-report.md"}
    return code, found["sections"]


def test_all_parts_of_a_section_that_is_well_share_a_process(tmp_path: Path) -> None:
    code, sections = run(tmp_path, FINE)
    parts = sections[FINE]["parts"]
    assert code == 0 and [p["name"] for p in parts] == ["one", "two", "three"]
    assert len({p["result"]["process"] for p in parts}) == 1


def test_a_process_that_cannot_be_started_again_leaves_its_parts_untried(tmp_path: Path) -> None:
    again = "if sys.argv[2] != '0': sys.exit(3)\n" + SECTION
    _, sections = run(tmp_path, KILLED, section=again)
    assert [p["status"] for p in sections[KILLED]["parts"]] == ["ok", "failed", "failed", "not tried"]


def test_a_device_that_cannot_be_used_leaves_the_sections_untried(tmp_path: Path) -> None:
    host = stand_in("say(['devices'])\nsay(dict(name='devices', status='failed', found='sees no NPU', hint='npu-smi'))")
    code, sections = run(tmp_path, FINE, host=host)
    assert code == 1 and [p["result"]["found"] for p in sections[FINE]["parts"]] == [
        "no NPU can be used here: sees no NPU"
    ]


def test_the_sections_are_those_of_the_first_hour_in_its_order_each_with_a_limit() -> None:
    guide = (ROOT / "docs" / "ascend.md").read_text()
    hour = guide.partition("| minute |")[2].partition("\n\n")[0]
    told = [name for name in re.findall(r"`([a-z_]+)`", hour) if name in SECTIONS["npu"]]
    assert list(dict.fromkeys(told)) == list(SECTIONS["npu"])
    assert all(section.part_seconds <= section.all_seconds < inf for section in SECTIONS["npu"].values())
    *first, collectives, operators = (section.all_seconds for section in SECTIONS["npu"].values())
    assert sum(first) <= 75 * 60, "collectives and operators come behind"
    assert collectives < operators, "what takes hours comes last"
    begins, latest = dict[str, float](), 5 * 60.0  # `check` comes before
    for name, section in SECTIONS["npu"].items():
        begins[f"`{name}`"], latest = latest / 60, latest + section.all_seconds
    rows = re.findall(r"^\| (\d+) \| (`[a-z_]+`)[^|]*\|", hour, re.MULTILINE)
    assert len(rows) == 7 and all(begins[name] == int(minute) for minute, name in rows)
    (command,) = re.findall(r"python3 -m tools.report (--device npu --real-pair.*)", guide)
    with pytest.raises(
        ConfigError, match="--real-pair: /models/Qwen3-8B has no"
    ):  # all flags are known, and this host has none
        parse(command.split())


def test_what_is_expected_stands_beside_the_answers_of_an_npu_alone(tmp_path: Path) -> None:
    one = stand_in(
        "say(dict(parts=['gap between tasks', 'other'], chip=''))\n"
        "for n in ('gap between tasks', 'other'):"
        " say(dict(name=n, status='ok', seconds=1.0, result=dict(found='4 us.')))"
    )
    given: tuple[tuple[str, str | None], ...] = (("npu:0", "3 us, by the model of a step"), ("cuda:0", None))
    for device, expected in given:
        report(device, tmp_path, {"costs": Program(one, 600.0)}, name="npu-report", host=())
        found = json.loads((tmp_path / "npu-report.json").read_text())["sections"]["costs"]["parts"]
        assert [part["result"].get("expected") for part in found] == [expected, None]
        shown = (tmp_path / "npu-report.md").read_text()
        assert (f"| {expected} |" in shown) is (expected is not None)
        assert "| 1 | gap between tasks | ok |" in shown and "| 2 | other | ok |" in shown, "points have numbers"


def test_an_operator_that_fails_the_check_does_not_stop_the_report(tmp_path: Path) -> None:
    host = stand_in("say(['rope'])\nsay(dict(name='rope', status='failed', found='differs', hint=''))")
    code, sections = run(tmp_path, FINE, host=host)
    assert code == 1 and [p["status"] for p in sections[FINE]["parts"]] == ["ok"] * 3


def test_folders_of_the_user_and_the_hosts_name_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    monkeypatch.setattr(socket, "gethostname", lambda: "npu")
    says = f"{sys.prefix}/lib/x.py and {Path(cli.__file__)} of /home/alice/ on npu, 17"
    clean = scrubbed(
        {"device": "npu:0", "found": "CANN in /home/alice/Ascend, /home/alice2", "error": {"says": [says]}}
    )
    assert clean == {
        "device": "npu:0",
        "found": "CANN in ~/Ascend, /home/alice2",
        "error": {"says": ["ENVIRONMENT/lib/x.py and SERVER/app/cli.py of ~/ on HOST, 17"]},
    }


# ---- the page ---------------------------------------------------------------------------------------------------

NUMBERS = iter(x / 1000 for x in range(1001, 9999, 7))


def n() -> float:
    return next(NUMBERS)


def times() -> dict[str, float]:
    return {"median_ms": n(), "p90_ms": n()}


def section(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": n(), "parts": list(parts)}


CASES = [
    {"shape": "a|b", "absolute": n(), "relative": n(), "tolerance": n(), "passed": True},
    {"shape": "c", "absolute": None, "relative": None, "tolerance": n(), "passed": False},
]
AGAINST_CPU: dict[str, Any] = {
    "found": "22 of 24 texts are the same, acceptance length 3.1, on the CPU 3.2",
    "cases": [{"prompt": 3, "token": 37, "gap": n()}],
    "acceptance_length": {"device": n(), "CPU float32": n(), "CPU bfloat16": n()},
    "of_same_texts": {"device": n(), "CPU float32": n()},
    "prompts": 24,
    "tokens": 999,
    "identical": 22,
    "identical_to_bfloat16": 21,
}
GRAPHS = {"found": "24 of 24 texts are the same", "prompts": 24, "identical": 24, "cases": []}
STEP = {"step": times(), "launch": times(), "read": times(), "steps": 60, "found": "12.3 ms"}
FULL: dict[str, Any] = {
    "report": "npu-report",
    "server": "v",
    "time": "today",
    "device": "npu:0",
    "failed": 2,
    "sections": {
        "host": {"parts": [part("chip", result={"found": "Ascend910B3", "hint": ""})]},
        "operators": section(
            part("rope", "failed", result={"cases": CASES}),
            part("linear", "failed", error={"says": "RuntimeError: no", "meaning": "m", "traceback": "t"}),
        ),
        "open_points": section(part("float16", result={"tried": "float16", "found": "It is right."})),
        "engine": section(
            part("eager against the CPU", result=AGAINST_CPU),
            part("graphs against eager", result=GRAPHS | {"same_acceptance_in_every_step": True}),
        ),
        "step": section(part("eager, 4 sequences", result=STEP)),
        "roofline": section(
            part("figures", result={"chip": "Ascend910B3", "GB_s": n(), "source": "assumed"}),
            part("copy", result={"GB_s": n(), "share": n()}),
            part("matmul", result={"cases": [{"rows": 1, "weights_GB_s": n(), "TFLOP_s": n()}]}),
        ),
    },
}


def test_every_number_of_the_page_is_in_the_json() -> None:
    said = json.dumps(FULL)
    written = page(FULL)
    measured = re.findall(r"\d+\.\d+", written)
    assert len(set(measured)) > 20
    for number in measured:
        assert number in said or number == "0.004", number  # the rounding of bfloat16
    body = written[written.index("## Host") :]
    for number in re.findall(r"(?<![\w.])\d{2,}(?![\w.])", body):
        assert number in said or number == "15", number  # the assumed figures' 15 %


def test_every_measured_number_of_the_json_is_on_the_page() -> None:
    written = page(FULL)
    for number in re.findall(r"\d\.\d{3}", json.dumps(FULL)):
        assert f"{float(number):g}" in written, number


def test_the_summary_has_a_line_for_each_section_with_what_failed_and_what_matters_most() -> None:
    bare = {"report": "npu-report", "server": "v", "time": "today", "device": "npu", "failed": 0, "sections": {}}
    assert len(summary(bare)) == 1 and len(summary(FULL)) == 1 + len(FULL["sections"])
    first, host, operators, points, engine, step, roofline = summary(FULL)
    assert first == "dflash-server v npu-report npu:0, today, 2 failed"
    assert host == "Host: 1 ok; chip: Ascend910B3" and points == "Open points: 1 ok"
    assert operators == "Operators: 2 failed (rope, linear)"
    assert "; eager against the CPU: 22 of 24 texts are the same, acceptance length 3.1, on the CPU 3.2;" in engine
    assert engine.endswith("; graphs against eager: 24 of 24 texts are the same")
    assert step == "Step: 1 ok; eager, 4 sequences: 12.3 ms" and roofline == "Roofline: 3 ok"
    assert "not run on an Ascend device" in " ".join(page(bare).split())


def test_what_failed_is_on_the_page_with_its_reason() -> None:
    assert "| linear | failed | RuntimeError: no | m |" in page(FULL)
    assert "| rope | c | - | - |" in page(FULL) and "**NO**" in page(FULL)


def test_what_was_not_tried_is_counted_as_that_and_says_why() -> None:
    untried = answer(without("pair"))
    told = FULL | {"failed": 0, "sections": {"pair": section(untried)}}
    assert summary(told)[1] == "Pair: 1 not tried (pair)"
    assert "| pair | not tried | give --real-pair TARGET DRAFT |" in page(told) and "## Wrong" not in page(told)


def test_what_would_break_a_table_is_escaped() -> None:
    assert table([{"a": "x|y\nz"}, {"a": None}, {"b": True}, {"a": 0.5}]).splitlines()[2:] == [
        "| x\\|y z | - |",
        "| - | - |",
        "| - | yes |",
        "| 0.5 | - |",
    ]
