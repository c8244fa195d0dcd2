"""No code outside the device plug-ins names a device: it asks a property of the backend, which has a reason."""

import re

import pytest

from app.engine.checkpoint.files import DEMO

APP = DEMO.parent.parent
PLUG_INS = ("engine/cpu/", "engine/cuda/", "engine/npu/")
NAMES_A_DEVICE = re.compile(r"device(\.|_)type\s*(==|!=|in\b|not in\b)")


def named_devices() -> list[str]:
    return [
        f"{path.relative_to(APP)}:{number}"
        for path in sorted(APP.rglob("*.py"))
        if not path.relative_to(APP).as_posix().startswith(PLUG_INS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMES_A_DEVICE.search(line)
    ]


def test_no_file_outside_the_plug_ins_compares_the_type_of_a_device():
    assert named_devices() == []


@pytest.mark.parametrize("line", ['if x.device.type == "cpu":', "device_type != kind", 'device.type in ("cpu", "npu")'])
def test_a_comparison_is_seen(line: str):
    assert NAMES_A_DEVICE.search(line)
