"""Every kernel compiles for an H200 (sm_90) in the sizes of the published models, and fits; that takes no GPU."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import ROOT
from tools.lab.random_weights import TARGETS

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on sm_90."""
REGISTERS = 65536
"""Limits of a multiprocessor."""
KERNELS = (
    "attend combine norm gated convolved rope_and_write locate_rows embed accept advance route sort_pairs "
    "expert_rows expert_rows4 expert_rows8 add_shared mix recur solve scan gate_heads product product8 quantise"
).split()


@pytest.fixture(scope="module", params=[["qwen3-8b"], pytest.param(list(TARGETS), marks=pytest.mark.slow)], ids=len)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """In a process of its own, for here kernels are interpreted."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.devices.cuda.compiled", *request.param]
    root = ROOT
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_sm_90(kernels: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in kernels} == set(KERNELS)


def test_attention_with_sinks_is_compiled_causal_and_in_windows(kernels: list[dict[str, Any]]) -> None:
    assert [kernel["kernel"] for kernel in kernels if kernel["model"] == "sinks"].count("attend") == 3


def test_none_spills_and_all_fit(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        print(kernel)
        if kernel["model"] != "wide":
            assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= REGISTERS, kernel


def test_recurrent_layers_in_fp32_or_with_wide_heads_spill_little(kernels: list[dict[str, Any]]) -> None:
    wide = [kernel for kernel in kernels if kernel["model"] == "wide"]
    assert [kernel["kernel"] for kernel in wide].count("solve") == 3
    for kernel in wide:
        assert kernel["stack"] <= (4096 if kernel["kernel"] in ("solve", "scan") else 8) and not kernel["local"], kernel


def test_attention_over_whole_blocks_is_on_the_tensor_cores_own_instructions(kernels: list[dict[str, Any]]) -> None:
    attends = [kernel for kernel in kernels if kernel["kernel"] == "attend" and kernel["model"] == "qwen3-8b"]
    assert sum(kernel["wgmma"] for kernel in attends) == 4  # causal and both ways, in parts and not
    assert all(2 * kernel["shared"] <= SHARED_MEMORY for kernel in attends), "two programs stand beside one another"


def test_products_of_few_rows_are_on_them_and_a_multiprocessor_holds_two(kernels: list[dict[str, Any]]) -> None:
    found = [kernel for kernel in kernels if kernel["model"] == "few rows"]
    assert len(found) == 16 and all(kernel["kernel"] == "product" and kernel["wgmma"] for kernel in found)
    assert all(2 * kernel["shared"] <= SHARED_MEMORY for kernel in found)
    assert all(2 * kernel["registers"] * kernel["warps"] * 32 <= REGISTERS for kernel in found)


def test_fixed_launches_are_on_them_too(kernels: list[dict[str, Any]]) -> None:
    fixed = [kernel for kernel in kernels if kernel["model"] == "fixed"]
    products = [kernel["wgmma"] for kernel in fixed if kernel["kernel"] == "product"]
    attends = [kernel["wgmma"] for kernel in fixed if kernel["kernel"] == "attend"]
    assert len(products) > 4 and sum(products) > len(products) // 2
    assert len(attends) == 5 * 2 * 4 and sum(attends) == 4 * 2 * 4  # in fp32 it is on other ones
    assert {kernel["kernel"] for kernel in fixed} == {"product", "attend", "combine"}


def test_products_in_8_bits_convert_no_number(kernels: list[dict[str, Any]]) -> None:
    """The tensor core takes tiles from shared memory as they were read. Moving bytes would need PRMT."""
    loops = [set(kernel["loop"]) for kernel in kernels if kernel["kernel"] == "product8"]
    assert sum("QGMMA" in loop for loop in loops) >= 10 and sum("IGMMA" in loop for loop in loops) >= 10
    assert all(("QGMMA" in loop) != ("IGMMA" in loop) and "PRMT" not in loop for loop in loops)


def test_experts_in_8_bits_convert_no_number_and_two_stand_beside_one_another(kernels) -> None:
    """Of tiles for few pairs a multiprocessor holds two, and of those of a prompt one."""
    found = [kernel for kernel in kernels if kernel["kernel"] == "expert_rows8"]
    assert len(found) == 2 * 2 * 2, "kinds, products, tiles"
    for kernel in found:
        loop, beside = set(kernel["loop"]), 1 if kernel["registers"] > 128 else 2
        assert ("QGMMA" in loop) != ("IGMMA" in loop) and "PRMT" not in loop
        assert beside * kernel["registers"] * kernel["warps"] * 32 <= REGISTERS, kernel
        assert beside * kernel["shared"] <= SHARED_MEMORY, kernel
    assert sum(kernel["registers"] <= 128 for kernel in found) == 4, "tiles of 16 pairs"


def test_packed_experts_are_on_them_too_and_a_multiprocessor_holds_five(kernels: list[dict[str, Any]]) -> None:
    """That is of tiles for few pairs, and of those of a prompt it holds one."""
    found = [kernel for kernel in kernels if kernel["model"] == "packed" and kernel["kernel"] == "expert_rows4"]
    assert len(found) == 2 * 2 * 2 and all(kernel["wgmma"] for kernel in found)  # slices, products, tiles
    for kernel in found:
        beside = 5 if kernel["warps"] == 4 else 1
        assert beside * kernel["registers"] * kernel["warps"] * 32 <= REGISTERS, kernel
        assert beside * kernel["shared"] <= SHARED_MEMORY, kernel
