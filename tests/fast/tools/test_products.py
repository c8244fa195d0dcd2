"""The floor of code on a CPU: the matrix products that are recorded."""

import pytest
import torch
import torch.nn.functional as F

from app.engine.checkpoint.files import DEMO
from tools.lab import in_process, loads
from tools.lab.products import Products

torch.set_num_threads(1)


def test_a_floor_is_made_of_the_matrix_products_and_of_nothing_else():
    weights = [torch.randn(6, 4), torch.randn(4, 5)]
    with Products() as products:
        x = torch.randn(3, 6) @ weights[0]
        (x.relu() + 1).softmax(dim=-1)
        x[:2] @ weights[1]
    assert [(rows, weight.data_ptr()) for rows, weight in products.seen] == [
        (3, weights[0].data_ptr()),
        (2, weights[1].data_ptr()),
    ]
    assert products.seconds() > 0


def test_the_products_of_a_run_are_those_of_all_its_layers():
    """The forward of the prompt has four products a layer, and one for the choice."""
    core = in_process.engine("plain", DEMO / "target", DEMO / "draft", max_num_seqs=1)
    (request,) = loads.requests("math", 1)
    core.add(request)
    with Products() as products:
        core.step()
    rows = [rows for rows, _ in products.seen]
    assert rows == [len(request.token_ids)] * 4 * 5 + [1]


@pytest.mark.parametrize("inference", [True, False])
def test_a_linear_layer_is_a_product_by_whatever_name(inference):
    weight = torch.randn(5, 4)
    with torch.inference_mode(inference), Products() as products:
        F.linear(torch.randn(3, 4), weight)
    ((rows, seen),) = products.seen
    assert rows == 3 and seen.shape == (4, 5) and seen.data_ptr() == weight.data_ptr()


def test_sixteen_bit_weights_have_a_floor_too():
    with Products() as products:
        torch.randn(3, 6, dtype=torch.bfloat16) @ torch.randn(6, 4, dtype=torch.bfloat16)
    assert products.seconds() > 0
