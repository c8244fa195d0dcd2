"""A report on an NPU has a load of its own."""

import pytest

from app.config.error import ConfigError
from tools.report.command import parse


def test_the_load_of_a_gpu_is_refused_on_an_npu() -> None:
    with pytest.raises(ConfigError, match="--model, --rounds: only a report on a GPU takes this"):
        parse(["--device", "npu:1", "--model", "qwen3-4b", "--rounds", "1"])
    assert parse(["--device", "npu:1"])[0].device == "npu:1"
    assert parse(["--device", "cuda", "--rounds", "1"])[0].rounds == 1
