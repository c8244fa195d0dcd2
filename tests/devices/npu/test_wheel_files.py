"""torch_npu 2.10.0.post4, the version that the image ships, read from its wheel: nothing of it is loaded."""

import ast
import os
import zipfile
from pathlib import Path

import pytest

from tests.devices.npu.schemas import ATTENTION_OUT, EXPECTED, IN_THE_IMAGE, name_of, parsed, registered_in
from tests.devices.npu.stubs import wheel_folder

VERSION = "2.10.0.post4"
GRAPHS = "torch_npu/npu/graphs.py"
HANDLERS = "torch_npu/npu/_npugraph_handlers/ifa_handler.py"


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = sorted(Path("build/npu-image-wheel").glob(f"torch_npu-{VERSION}-*.whl"))
    if not found:
        message = f"no wheel of torch_npu {VERSION} in build/npu-image-wheel; `make test-npu` downloads it"
        assert not os.environ.get("CI"), message
        pytest.skip(message)
    return found[0]


@pytest.fixture(scope="module")
def registered(wheel: Path) -> dict[str, str]:
    return registered_in(wheel)


@pytest.mark.parametrize("schema", EXPECTED, ids=name_of)
def test_the_images_version_registers_the_same_schema(registered: dict[str, str], schema: str) -> None:
    wanted = schema
    for argument, shipped in IN_THE_IMAGE.get(name_of(schema), {}).items():
        wanted = wanted.replace(argument, shipped)
    assert parsed(registered[name_of(schema)]) == parsed(wanted)


def test_the_images_version_has_the_same_out_variant_of_attention(registered: dict[str, str]) -> None:
    assert registered[ATTENTION_OUT] == registered_in(wheel_folder())[ATTENTION_OUT]


def test_the_images_version_updates_attention_in_graphs_alike(wheel: Path) -> None:
    """The handler that swaps `.default` for `.out` while a graph is captured, and that NPUGraph.update goes through."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = archive.read(HANDLERS).decode()
    installed = (wheel_folder().parent / HANDLERS).read_text()
    assert [line.rstrip() for line in shipped.splitlines()] == [line.rstrip() for line in installed.splitlines()]


@pytest.mark.parametrize("name", ["_GraphDispatchRecord", "_GraphDispatchMode"])
def test_the_images_version_records_attention_in_graphs_alike(wheel: Path, name: str) -> None:
    """`NpuGraph` repeats the recorded calls itself, as `_GraphDispatchMode.update_capture_record` does."""
    with zipfile.ZipFile(wheel) as archive:
        sources = archive.read(GRAPHS).decode(), (wheel_folder().parent / GRAPHS).read_text()
    shipped, installed = (
        next(ast.unparse(node) for node in ast.parse(source).body if getattr(node, "name", "") == name)
        for source in sources
    )
    assert shipped == installed
