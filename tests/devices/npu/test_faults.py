"""On device "npu:0" a sequence whose logits are NaN ends alone, and an error of the device ends the engine."""

from typing import Any

import pytest
import torch

from app.engine.npu.backend import NpuBackend
from tests.devices.npu.engines import SMALL, engine
from tests.fast.engine.nan_in_one import check_that_nan_ends_one_alone
from tests.fast.engine.pairs import make_pair


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(("temperature", "experts"), [(0.0, 0), (0.8, 0), (0.0, 8)])
def test_a_sequence_whose_logits_are_nan_ends_alone(tmp_path, temperature, experts):
    pair = make_pair(tmp_path, **SMALL | {"experts": experts})
    sizes = {"max_num_seqs": 3, "max_graphs": 2, "max_model_len": 64}
    check_that_nan_ends_one_alone(engine(pair, dtype="float32", **sizes), temperature)


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (RuntimeError("NPU function error: AclrtSynchronizeDevice, error code is 507015"), True),
        (torch.OutOfMemoryError("NPU out of memory"), True),
        (RuntimeError("shapes do not match"), False),
    ],
    ids=["code", "memory", "code of ours"],
)
def test_only_an_error_that_leaves_the_device_unknown_ends_the_engine(error: Exception, is_fatal: bool) -> None:
    assert NpuBackend(torch.device("npu", 0)).is_fatal(error) == is_fatal


def test_another_error_of_the_page_write_is_no_sign_of_an_older_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulted(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("NPU function error: error code is 507015")

    monkeypatch.setattr("torch_npu.npu_scatter_pa_kv_cache", faulted)
    with pytest.raises(RuntimeError, match="507015"):
        NpuBackend(torch.device("npu", 0))
