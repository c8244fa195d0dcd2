"""The operators as the installed torch_npu registers them: checked with 2.13.0."""

import pytest
import torch
import torch_npu

from tests.devices.npu.schemas import EXPECTED, OUT_EXTRAS, name_of, parsed, registered, registered_in
from tests.devices.npu.stubs import wheel_folder

ATTENTION = torch.ops.npu.npu_fused_infer_attention_score


def test_the_wheel_is_the_one_that_these_tests_speak_of() -> None:
    assert torch_npu.__version__.startswith("2.13.0")


@pytest.mark.parametrize("schema", EXPECTED, ids=name_of)
def test_a_registered_schema_is_the_contracts(schema: str) -> None:
    assert registered(getattr(torch.ops.npu, name_of(schema)).default) == parsed(schema)


def test_the_out_variant_of_attention_takes_a_workspace_and_a_list_of_outputs() -> None:
    plain, out = registered(ATTENTION.default), registered(ATTENTION.out)
    added = {a.name: a for a in out.arguments if a.name not in {b.name for b in plain.arguments}}
    assert tuple(added) == OUT_EXTRAS
    assert (str(added["workspace"].type), str(added["out"].type)) == ("Optional[Tensor]", "List[Tensor]")
    shared = [(a.name, str(a.type), a.default_value) for a in out.arguments if a.name not in added]
    assert shared == [(a.name, str(a.type), a.default_value) for a in plain.arguments]


@pytest.mark.parametrize("schema", EXPECTED, ids=name_of)
def test_a_wheels_file_tells_the_same_as_its_dispatcher(schema: str) -> None:
    written = registered_in(wheel_folder())[name_of(schema)]
    assert parsed(written) == registered(getattr(torch.ops.npu, name_of(schema)).default)
