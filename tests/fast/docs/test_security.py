"""The code that serves runs no data as code, and measures no time by a clock that jumps."""

import ast
import asyncio
import hashlib
import re
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from app.engine_client import link as engine_link
from tests import ROOT

APP = ROOT / "app"
OFFLINE = ("demo",)
RUNS_DATA = re.compile(
    r"(cP|p)ickle|marshal|shelve|dill|joblib|(builtins\.)?(eval|exec|__import__)"
    r"|torch\.(load|save|hub\..*|package\..*)|yaml\.(load|load_all|full_load|unsafe_load|Loader|UnsafeLoader)"
    r"|.*\.(recv_pyobj|send_pyobj|recv_serialized)|np\.load|numpy\.load|os\.(system|popen)"
)
WALL_CLOCK = re.compile(r"time\.(time|time_ns)|(datetime\.)*(now|utcnow|today)")
PLUG_INS = ("engine/cpu/", "engine/cuda/", "engine/npu/")
NAMES_A_DEVICE = re.compile(r"device(\.|_)type\s*(==|!=|in\b|not in\b)")
SAYS_WHEN = {
    "engine_client/kv_events.py": 1,
    "api/tracing.py": 1,
    "api/answers.py": 1,  # `created` of an answer
    "api/responses_answers.py": 2,  # `created_at` and `completed_at` of a response
    "engine/cache_folder.py": 1,  # the age of files
    "api/services.py": 1,  # `created` of the model
    "text/chat_template.py": 1,  # strftime_now, for templates that name the day
}


@cache
def sources() -> list[tuple[str, ast.Module]]:
    paths = sorted(APP.rglob("*.py"))
    return [(str(path.relative_to(APP)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def names(tree: ast.AST) -> Iterator[str]:
    """Everything that is imported, called or passed on, as it is written: "torch.load"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (module + alias.name for alias in node.names)
            yield module.removesuffix(".")
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield dotted(node)


def dotted(node: ast.expr) -> str:
    """Return a name with its attributes; what is no name is a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def runs_data(tree: ast.AST) -> list[str]:
    return [name for name in names(tree) if RUNS_DATA.fullmatch(name)]


def test_nothing_that_comes_from_outside_is_run() -> None:
    found = {path: names for path, tree in sources() if (names := runs_data(tree))}
    reader = "engine/dflash/model.py"
    assert found == {reader: ["torch.load"]}
    assert (APP / reader).read_text(encoding="utf-8").count("torch.load(file, weights_only=True") == 1


def test_the_pages_library_is_the_published_file() -> None:
    """No line of it was changed by hand, and an update changes the version, the digest and the licences together."""
    static = APP / "api" / "static"
    told = re.findall(r"^sha256: (\w{64})$", (static / "markdown-it.LICENSE.txt").read_text("utf-8"), re.MULTILINE)
    assert told == [hashlib.sha256((static / "markdown-it.js").read_bytes()).hexdigest()]


def test_no_code_of_a_checkpoint_is_asked_for() -> None:
    for path, tree in sources():
        keywords = [node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)]
        assert "trust_remote_code" not in keywords, path


def test_durations_are_never_measured_by_a_clock_that_can_be_set() -> None:
    for path, tree in sources():
        if not path.startswith(OFFLINE):
            calls = [dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
            assert len([call for call in calls if WALL_CLOCK.fullmatch(call)]) == SAYS_WHEN.get(path, 0), path


def test_the_sockets_to_the_engine_lie_where_no_other_user_may_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    link = engine_link.EngineLink()
    try:
        assert stat.S_IMODE(link.folder.stat().st_mode) == 0o700
        assert all(address.startswith(f"ipc://{link.folder}/") for address in link.addresses)
    finally:
        asyncio.run(link.close())


def test_where_no_folder_can_be_written_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "_parents", lambda: ["/proc"])
    with pytest.raises(OSError, match=r"/proc cannot be written to or are full\. Set TMPDIR"):
        engine_link.EngineLink()


def test_a_folder_whose_path_is_too_long_for_a_socket_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    link = engine_link.EngineLink()
    asyncio.run(link.close())
    assert len(str(link.folder)) < 80


def test_no_module_of_the_tools_is_named_in_app() -> None:
    """The server knows no instrument: neither by import, which a contract holds, nor as a program that it starts."""
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"tools(\.\w+)+", node.value), path


@pytest.mark.parametrize(
    "planted", ['if x.device.type == "cpu":', "device_type != kind", 'device.type in ("cpu", "npu")']
)
def test_no_file_outside_the_plug_ins_compares_the_type_of_a_device(planted: str) -> None:
    """It asks a property of the backend, which has a reason."""
    assert NAMES_A_DEVICE.search(planted)
    for path in sorted(APP.rglob("*.py")):
        name = path.relative_to(APP).as_posix()
        found = None if name.startswith(PLUG_INS) else NAMES_A_DEVICE.search(path.read_text(encoding="utf-8"))
        assert not found, f"{name}: {found}"
