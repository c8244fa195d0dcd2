"""A row of `python -m tools.lab products` compares a product with what the machine reads and multiplies."""

import torch

from tools.lab import products


def test_a_row_has_the_rates_of_a_product_beside_the_machines() -> None:
    weights = [torch.ones(1000, 1000), torch.ones(1000, 500)]
    row = products.row(weights, 4, (0.001, 0.002), bytes_read=12e9, multiplications=24e9)
    assert row["dtype"] == "float32" and row["ms"] == "1.00" and row["PyTorch's time"] == "2.00"
    assert row["GB/s"] == "6.0" and row["of reading"] == "0.50"
    assert row["GFLOP/s"] == "12" and row["of multiplying"] == "0.50"


def test_rounds_are_interleaved_and_the_first_does_not_count() -> None:
    called: list[str] = []
    assert len(products.median_seconds(3, lambda: called.append("a"), lambda: called.append("b"))) == 2
    assert called == ["a", "b"] * 4
