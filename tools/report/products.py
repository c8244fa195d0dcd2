"""Products of a layer in 8 and 4 bits beside 16, in graphs on a GPU: the figures that decide which of them are used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor

from app.engine.checkpoint.families import target_config
from app.engine.checkpoint.files import Checkpoint
from app.engine.cuda import eight_bits
from app.engine.cuda.backend import CudaBackend
from app.engine.device.base import Backend
from app.engine.device.factory import make_backend
from app.engine.load.loader import target_class
from app.engine.models.layers import DecoderLayer
from app.engine.models.weights import LayerSource
from app.engine.quantised import QuantisedRows, QuantisedWeight, Rows, Weight
from tools.lab.random_weights import TARGETS, RandomWeights, in_16_bits, write_configs
from tools.report.part import Options, Part, Result
from tools.report.timing import seconds_in_a_graph

EXPERTS_TOLERANCE = 0.08
"""By the norm. Rows of both products are rounded to e4m3 for experts in e4m3, which makes 0.05."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """Models and numbers of rows. Products of the last of `dense` whose W has few rows are timed for `split_rows` with
    each of `splits` of K."""

    dense: tuple[tuple[str, dict[str, Any]], ...] = (
        ("qwen3-8b", TARGETS["qwen3-8b-fp8"]),
        ("qwen3.8-27b", TARGETS["qwen3.8-27b-fp8"]),
    )
    experts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("qwen3-30b-a3b in e4m3", TARGETS["qwen3-30b-a3b-fp8"]),
        ("gpt-oss-20b in mxfp4", TARGETS["gpt-oss-20b"]),
    )
    rows: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 512)
    split_rows: tuple[int, ...] = (128, 256, 512)
    splits: tuple[int, ...] = (1, 2, 4)


def parts(options: Options, sizes: ProductSizes) -> list[Part]:
    opened = cast(Callable[[], CudaBackend], cache(partial(make_backend, options.device)))
    made = [
        Part(f"products of {name} in e4m3", partial(compared, opened, config, sizes.rows, of_matrices))
        for name, config in sizes.dense
    ]
    made.append(Part("products by splits of K", partial(by_splits, opened, sizes)))
    for name, config in sizes.experts:
        made.append(Part(f"numbers of experts of {name}", partial(same_numbers, opened, config, sizes.rows)))
        made.append(Part(f"experts of {name}", partial(compared, opened, config, sizes.rows, of_experts)))
    return made


def layer_of(config: dict[str, Any], backend: Backend) -> DecoderLayer:
    """Return the first layer of a target with random weights."""
    with TemporaryDirectory() as folder:
        target, _ = write_configs(config, Path(folder))
        weights = RandomWeights(Checkpoint(target), backend.device, torch.bfloat16, lambda *_: None)
    shape, family = target_config(config), target_class(config["model_type"])
    source = LayerSource(0, shape, family.adapt(weights, shape), backend, family.expert_layout)
    return family.layer_class(source)


def matrices(layer: DecoderLayer) -> list[Weight]:
    """Return the weights of a dense layer's products. Together no cache holds them."""
    mixer = layer.attention
    names = ("in_proj", "out_proj") if hasattr(mixer, "in_proj") else ("qkv", "o")
    return [*(getattr(mixer, name) for name in names), layer.gate_up, layer.down]


def rows_for(backend: Backend, weight: Weight, count: int) -> Rows:
    """Return random rows, as the norm before a product writes them."""
    data = weight.data
    x = torch.empty(count, data.shape[1], dtype=torch.bfloat16, device=backend.device).normal_()
    return eight_bits.quantised(x, data.dtype) if isinstance(weight, QuantisedWeight) else x


def of_matrices(backend: Backend, layer: DecoderLayer, count: int) -> Call:
    """Return the products of a dense layer, one after another, as they are served."""
    pairs = [(rows_for(backend, weight, count), weight) for weight in matrices(layer)]
    return lambda: [backend.linear(x, weight) for x, weight in pairs]


def of_experts(backend: Backend, layer: DecoderLayer, count: int) -> Call:
    assert layer.mixture
    moe, weights = layer.mixture
    x = torch.empty(count, weights.router.shape[1], dtype=torch.bfloat16, device=backend.device).normal_()
    return lambda: backend.moe(x, weights, moe)


@torch.inference_mode()
def compared(
    opened: Callable[[], CudaBackend],
    config: dict[str, Any],
    counts: Sequence[int],
    make: Callable[[Backend, DecoderLayer, int], Call],
) -> Result:
    """Time a layer in 16 bits and as its config says, for each number of rows."""
    backend, cases, result = opened(), list[Result](), Result()
    plain, quantised = (layer_of(each, backend) for each in (in_16_bits(config), config))
    for count in counts:
        wide, narrow = (microseconds(backend, make(backend, layer, count)) for layer in (plain, quantised))
        result[f"ratio at {count}"] = wide / narrow
        cases.append({"rows": count, "us in 16 bits": wide, "us": narrow, "ratio": wide / narrow})
    return result | {"cases": cases}


@torch.inference_mode()
def same_numbers(opened: Callable[[], Backend], config: dict[str, Any], counts: Sequence[int]) -> Result:
    """Compare experts as their config says with the same numbers in 16 bits."""
    backend, cases = opened(), list[Result]()
    mixture = layer_of(config, backend).mixture
    assert mixture
    moe, weights = mixture
    gate_up, down = (
        each if isinstance(each, Tensor) else each.dequantised() for each in (weights.gate_up, weights.down)
    )
    wide = replace(weights, gate_up=gate_up, down=down)
    for count in counts:
        x = torch.empty(count, weights.router.shape[1], dtype=torch.bfloat16, device=backend.device).normal_()
        expected = backend.moe(x, wide, moe).float()
        relative = float((backend.moe(x, weights, moe).float() - expected).norm() / expected.norm())
        cases.append({"rows": count, "relative": relative, "passed": relative <= EXPERTS_TOLERANCE})
    return {"cases": cases, "passed": all(case["passed"] for case in cases)}


@torch.inference_mode()
def by_splits(opened: Callable[[], CudaBackend], sizes: ProductSizes) -> Result:
    """Time products whose W has few rows in 16 bits, by our kernel with each number of splits of K, and by cuBLAS."""
    backend, cases = opened(), list[Result]()
    _, config = sizes.dense[-1]
    wide, narrow = (matrices(layer_of(each, backend))[1::2] for each in (in_16_bits(config), config))
    for count in sizes.split_rows:
        for plain, weight in zip(wide, narrow, strict=True):
            assert isinstance(plain, Tensor) and isinstance(weight, QuantisedWeight)
            x, x8 = rows_for(backend, plain, count), rows_for(backend, weight, count)
            assert isinstance(x8, QuantisedRows)
            case = {"rows": count, "W": list(plain.shape)}
            case["us in 16 bits"] = microseconds(backend, partial(backend.linear, x, plain))
            case["us as served"] = microseconds(backend, partial(backend.linear, x8, weight))
            if backend.has_scaled_mm:
                case["us by scaled_mm"] = microseconds(backend, partial(eight_bits.scaled_mm, x8, weight, None))
            for splits in sizes.splits:
                with split_by(splits):
                    run = partial(eight_bits.linear, x8, weight, None, backend.multiprocessors)
                    case[f"us in {splits} splits"] = microseconds(backend, run)
            cases.append(case)
    return {"cases": cases}


@contextmanager
def split_by(splits: int) -> Iterator[None]:
    """Let products of rows in 8 bits have so many splits of K."""
    original = eight_bits.product_of
    eight_bits.product_of = lambda *given: original(*given)._replace(splits=splits)
    try:
        yield
    finally:
        eight_bits.product_of = original


def microseconds(backend: Backend, run: Call) -> float:
    return 1e6 * seconds_in_a_graph(backend, run, calls=3)
