"""Products with int8 weights on device "npu:0", whose rows of activations are quantised one by one."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.engine.device.base import ExpertWeights
from app.engine.device.moe import MoeConfig, mixture
from app.engine.npu.backend import NpuBackend, _by_two_experts
from app.engine.npu.rules import NZ, NZ_TILE
from app.engine.quantised import QuantisedWeight
from app.messages import StepOutput
from tests.costs import landing_ones
from tests.devices.npu.calls import normal
from tests.devices.npu.engines import HOST_PROCESSOR, LUCKY, engine, requests
from tests.devices.npu.null_device import traced
from tests.devices.npu.numerics import Numerics
from tests.fast.engine.pairs import make_pair
from tests.fast.engine.quantised import quantise

pytestmark = pytest.mark.usefixtures("numerics")


@pytest.fixture
def backend() -> NpuBackend:
    return NpuBackend(torch.device("npu:0"))


def magnitudes(rows: int) -> Tensor:
    """Return [rows, 1], a hundredfold apart, so that the scale of another row shows."""
    return torch.logspace(-2, 2, rows)[:, None]


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("parts", [(48,), (40, 8, 16)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 257])
def test_a_product_is_that_of_the_quantised_numbers(backend, rows, parts, has_bias):
    weights = [QuantisedWeight.rounded((normal(n, 96, seed=n) * magnitudes(n)).bfloat16(), torch.int8) for n in parts]
    x = (normal(rows, 96, seed=rows) * magnitudes(rows)).bfloat16()
    bias = normal(sum(parts)) if has_bias else None
    put = [replace(weight, data=weight.data.to("npu:0"), scales=weight.scales.to("npu:0")) for weight in weights]
    packed, x_put, bias_put = backend.pack_linear(*put), x.to("npu:0"), None if bias is None else bias.to("npu:0")
    assert isinstance(packed, QuantisedWeight)
    with traced() as trace:
        found = backend.linear(x_put, packed, bias_put)
    product = "aclnnQuantMatmulV5" if sum(parts) % NZ_TILE else "aclnnQuantMatmulWeightNz"
    assert trace.launches == {"aclnnDynamicQuantV2": 1, product: 1} and trace.waits == []
    assert found.dtype == torch.bfloat16

    numbers = torch.cat([weight.data.double() * weight.scales.double() for weight in weights])
    wanted = x.double() @ numbers.t() + (0.0 if bias is None else bias.double())
    half_a_step = x.double().abs().amax(1, keepdim=True) / 127 / 2
    bound = half_a_step * numbers.abs().sum(1) * 1.0001 + wanted.abs() * 2**-8
    error = (found.cpu().double() - wanted).abs()
    assert (error <= bound).all() and error.max() > 0


@pytest.mark.parametrize("shape", [(64, 96), (2, 64, 96)], ids=["one weight", "experts"])
def test_an_int8_weight_of_whole_tiles_is_in_nz(backend: NpuBackend, shape: tuple[int, ...]) -> None:
    data = torch.ones(shape, dtype=torch.int8, device="npu:0")
    packed = backend.pack_linear(QuantisedWeight(data, torch.ones(*shape[:-1], 1, device="npu:0"), torch.bfloat16))
    assert packed.data.shape == shape and torch_npu.get_npu_format(packed.data) == NZ
    assert packed.data.mT.is_contiguous()
    assert packed.data.untyped_storage().nbytes() == data.nbytes, "NZ pads nothing"
    assert torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") == b"disable", "nothing else may have the format"
    rows = torch.ones(3, 96, dtype=torch.bfloat16, device="npu:0")
    with traced() as trace:
        out = backend.linear(rows, packed) if len(shape) == 2 else _by_two_experts(rows, packed)
    name = "aclnnQuantMatmulWeightNz" if len(shape) == 2 else "aclnnGroupedMatmulWeightNz"
    assert trace.launches[name] == 1 and torch.equal(out.cpu(), torch.full((3, 64), 96.0).bfloat16())


def refused(*args: Any) -> None:
    raise RuntimeError("aclnnQuantMatmulWeightNz or its GetWorkspaceSize not in libopapi.so")


def wrong(x: Tensor, number: int) -> Tensor:
    return torch.ops.npu.npu_format_cast(x.roll(1), number)


@pytest.mark.parametrize("cast", [refused, wrong], ids=["refused", "wrong"])
def test_int8_weights_stay_in_rows_where_nz_is_wrong_or_refused(backend, cast, monkeypatch, caplog):
    monkeypatch.setattr(torch_npu, "npu_format_cast", cast)
    packed = [backend.pack_linear(int8(64, 96)) for _ in range(2)]
    assert all(torch_npu.get_npu_format(one.data) != NZ and one.data.is_contiguous() for one in packed)
    (line,) = [line for line in caplog.messages if "stay in rows" in line]
    assert ("not in libopapi.so" in line) == (cast is refused)


def test_int8_weights_stay_in_rows_where_a_product_by_nz_forgets_its_bias(backend, monkeypatch):
    product = torch_npu.npu_quant_matmul

    def forgets(x: Tensor, weight: Tensor, scale: Tensor, *, bias: Tensor | None, **others: Any) -> Tensor:
        bias = None if torch_npu.get_npu_format(weight) == NZ else bias
        return product(x, weight, scale, bias=bias, **others)

    monkeypatch.setattr(torch_npu, "npu_quant_matmul", forgets)
    assert torch_npu.get_npu_format(backend.pack_linear(int8(64, 96)).data) != NZ


def inverted(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return an operator's results with factors where products take scales."""
    return tuple(1 / it if it.dtype == torch.float32 else it for it in results)


@pytest.mark.parametrize("fault", ["refused", "wrong"])
@pytest.mark.parametrize("name", ["npu_add_rms_norm_dynamic_quant", "npu_moe_init_routing_v2"])
def test_rows_are_quantised_by_a_launch_more_where_the_operator_before_is_wrong_or_refused(
    backend: NpuBackend, name: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_norm, operator = "norm" in name, getattr(torch_npu, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if not is_norm and kwargs["quant_mode"] == -1:
            return operator(*args, **kwargs)
        return refused() if fault == "refused" else inverted(operator(*args, **kwargs))

    def result() -> Tensor:
        x = normal(3, 96).to("npu:0")
        if is_norm:
            weight = backend.pack_linear(int8(48, 96))
            return backend.linear(backend.norm_for(x, x, x[0], 1e-6, [weight])[0], weight)
        moe = MoeConfig(num_experts=2, num_experts_per_tok=1, intermediate_size=32, norm_topk_prob=True)
        gate_up, down = backend.pack_gate_up(experts(2, 64, 96)), backend.pack_linear(experts(2, 96, 32))
        return backend.moe(x, ExpertWeights(normal(2, 96, seed=2).float().to("npu:0"), gate_up, down), moe)

    wanted = result().cpu().float()
    backend = NpuBackend(torch.device("npu:0"))
    monkeypatch.setattr(torch_npu, name, faulty)
    for _ in range(2):
        torch.testing.assert_close(result().cpu().float(), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
    (line,) = [line for line in caplog.messages if "by a launch more" in line]
    assert name in line and ("not in libopapi.so" in line) == (fault == "refused")


def with_(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def spoil(call: dict[str, Any]) -> None:
        (own,) = call[name]
        call[name] = [change(own.cpu()).to("npu:0")]

    return spoil


SPOILED: dict[str, Callable[[dict[str, Any]], None]] = {
    "refused": lambda call: refused(),
    "up is gated": with_("weight", lambda it: it.roll(it.shape[2] // 2, 2)),
    "gate and up by turns": with_("weight", lambda it: torch.stack(it.chunk(2, 2), 3).flatten(2)),
    "rows of a tile only": with_("weight", lambda it: it.index_fill(1, torch.arange(128, it.shape[1]), 0)),
    "tiles that a core takes first only": lambda call: call["x"][24 * 64 :].zero_(),
    "a weight of another expert": with_("weight", lambda it: it.roll(1, 0)),
    "one scale for all columns": with_("weight_scale", lambda it: it[:, :1].expand_as(it).contiguous()),
    "scales of another expert": with_("weight_scale", lambda it: it.roll(1, 0)),
    "one scale for all rows": lambda call: call.update(x_scale=torch.ones_like(call["x_scale"])),
}


@pytest.mark.parametrize("fault", [*SPOILED, "inverted scales", "a row left out", "no such operator"])
def test_experts_swiglu_takes_two_launches_more_where_its_operator_is_wrong_or_refused(
    numerics: Numerics, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "npu_grouped_matmul_swiglu_quant_v2"
    operator = getattr(torch_npu, name)
    monkeypatch.setattr(numerics, "lift", frozenset({"N45"}))  # what the operator makes of a right call is wrong

    def faulty(*args: Any, **kwargs: Any) -> Any:
        x, *others = args
        call = dict(zip(("weight", "weight_scale", "x_scale", "group_list"), others, strict=True)) | kwargs
        call["x"] = x.clone()
        SPOILED.get(fault, lambda call: None)(call)
        found = operator(**call)
        if fault == "a row left out":
            found[0][-1].fill_(-1)
        return inverted(found) if fault == "inverted scales" else found

    moe = MoeConfig(num_experts=2, num_experts_per_tok=1, intermediate_size=32, norm_topk_prob=True)
    x, router = normal(3, 96).to("npu:0"), normal(2, 96, seed=2).float().to("npu:0")
    launches = []
    for _ in range(2):
        backend = NpuBackend(torch.device("npu:0"))
        gate_up, down = backend.pack_gate_up(experts(2, 64, 96)), backend.pack_linear(experts(2, 96, 32))
        assert torch_npu.get_npu_format(gate_up.data) == NZ
        with traced() as trace:
            backend.moe(x, ExpertWeights(router, gate_up, down), moe)
        launches.append(sum(trace.launches.values()))
        if fault == "no such operator":
            monkeypatch.delattr(torch_npu, name, raising=False)
        else:
            monkeypatch.setattr(torch_npu, name, faulty)
    assert launches[1] == launches[0] + 2
    (line,) = [line for line in caplog.messages if "two launches more" in line]
    assert name in line and ("not in libopapi.so" in line) == (fault == "refused")


@pytest.mark.parametrize(("inner", "fuses"), [(5120, True), (5136, False)])
def test_gate_and_up_that_are_too_wide_are_multiplied_alone(backend: NpuBackend, inner: int, fuses: bool) -> None:
    packed = backend.pack_gate_up(experts(2, 2 * inner, 32))
    assert isinstance(packed, QuantisedWeight) and torch_npu.get_npu_format(packed.data) == NZ
    assert packed.scales.dtype == (torch.float32 if fuses else torch.bfloat16)


def test_gate_and_up_of_no_whole_tiles_are_multiplied_alone(backend: NpuBackend) -> None:
    packed = [backend.pack_gate_up(experts(2, 64, size)) for size in (96, 80)]
    assert [torch_npu.get_npu_format(each.data) == NZ for each in packed] == [True, False]
    assert [each.scales.dtype for each in packed] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("changes", [{"swiglu_limit": 7.0}, {"has_bias": True}], ids=str)
def test_gate_and_up_with_a_limit_or_a_bias_are_multiplied_alone(backend: NpuBackend, changes: dict[str, Any]) -> None:
    moe = MoeConfig(num_experts=2, num_experts_per_tok=1, intermediate_size=32, norm_topk_prob=True, **changes)
    shapes = [(2,), (2, 64), (2, 96)] if moe.has_bias else []
    router, *biases = (torch.zeros(shape, device="npu:0") for shape in [(2, 96), *shapes])
    gate_up, down = backend.pack_gate_up(experts(2, 64, 96)), backend.pack_linear(experts(2, 96, 32))
    with traced() as trace:
        backend.moe(normal(3, 96).to("npu:0"), ExpertWeights(router, gate_up, down, *biases), moe)
    assert trace.launches["aclnnGroupedMatmulWeightNz"] == 2, trace.launches


def experts(*shape: int) -> QuantisedWeight:
    data = (torch.arange(prod(shape)) % 5 - 2).view(shape).to("npu:0", torch.int8)
    return QuantisedWeight(data.mT.contiguous().mT, torch.ones(*shape[:-1], 1, device="npu:0"), torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 257])
def test_the_norm_of_quantised_readers_hands_its_rows_on_in_int8(backend: NpuBackend, rows: int) -> None:
    x, residual, norm = ((normal(n, 96, seed=n) * 4).bfloat16() for n in (rows, rows + 1, 1))
    residual, norm = residual[:rows], norm[0]
    weight = QuantisedWeight.rounded((normal(48, 96) * magnitudes(48)).bfloat16(), torch.int8)
    packed = backend.pack_linear(replace(weight, data=weight.data.to("npu:0"), scales=weight.scales.to("npu:0")))
    put = [it.to("npu:0") for it in (x, residual, norm)]
    with traced() as trace:
        normed, total = backend.norm_for(*put, 1e-6, [packed, packed])
        found = backend.linear(normed, packed)
    assert trace.launches == {"aclnnAddRmsNormDynamicQuantV2": 1, "aclnnQuantMatmulV5": 1} and trace.waits == []
    assert torch.equal(total.cpu(), x + residual)
    wanted = torch.nn.functional.rms_norm((x + residual).double(), (96,), norm.double(), 1e-6)
    numbers = weight.data.double() * weight.scales.double()
    bound = wanted.abs().amax(1, keepdim=True) / 127 / 2 * numbers.abs().sum(1) * 1.001
    bound += (wanted @ numbers.t()).abs() * 2**-8
    assert ((found.cpu().double() - wanted @ numbers.t()).abs() <= bound).all()


@pytest.mark.parametrize("why", ["no residual", "a plain reader", "no reader", "a norm in float32"])
def test_the_norm_of_other_readers_is_plain(backend: NpuBackend, why: str) -> None:
    packed, plain_weight = backend.pack_linear(int8(48, 96)), normal(48, 96).to("npu:0")
    x, residual, norm = (normal(n, 96).to("npu:0") for n in (3, 3, 1))
    norm = norm[0].float() if why == "a norm in float32" else norm[0]
    readers = {"a plain reader": [packed, plain_weight], "no reader": []}.get(why, [packed])
    normed, total = backend.norm_for(x, None if why == "no residual" else residual, norm, 1e-6, readers)
    assert isinstance(normed, Tensor)
    wanted = x if why == "no residual" else x + residual
    assert torch.equal(total.cpu(), wanted.cpu())
    assert torch.equal(normed.cpu(), backend.rms_norm(wanted, norm, 1e-6).cpu())


def test_a_row_of_zeros_is_the_bias_and_one_that_is_not_finite_stays_so(backend: NpuBackend) -> None:
    weight = QuantisedWeight.rounded(normal(48, 96).to("npu:0"), torch.int8)
    x, bias = normal(4, 96), normal(48).to("npu:0")
    x[0], x[1, 5], x[2, 6] = 0.0, torch.nan, torch.inf
    found = backend.linear(x.to("npu:0"), backend.pack_linear(weight), bias).cpu()
    assert torch.equal(found[0], bias.cpu()) and found[3].isfinite().all()
    assert not found[1:3].isfinite().any()


def int8(out: int, columns: int, scales: int = 1, dtype: torch.dtype = torch.bfloat16) -> QuantisedWeight:
    data = torch.ones(out, columns, dtype=torch.int8, device="npu:0")
    return QuantisedWeight(data, torch.full((out, scales), 0.5, device="npu:0"), dtype)


@pytest.mark.parametrize("shape", [(65535, 1), (1, 65535)], ids=str)
def test_the_longest_axes_are_multiplied_in_int8(backend: NpuBackend, shape: tuple[int, int]) -> None:
    packed = backend.pack_linear(int8(*shape))
    assert isinstance(packed, QuantisedWeight)
    x = torch.ones(2, shape[1], dtype=torch.bfloat16, device="npu:0")
    torch.testing.assert_close(backend.linear(x, packed).cpu(), torch.full((2, shape[0]), shape[1] / 2).bfloat16())


@pytest.mark.parametrize(
    "weight",
    [(65536, 1), (1, 65536), (16, 64, 2), (16, 64, 1, torch.float32)],
    ids=["too many rows", "too many columns", "two scales a row", "float32"],
)
def test_what_the_operator_does_not_take_is_dequantised(backend, weight):
    made = int8(*weight)
    packed = backend.pack_linear(made)
    assert isinstance(packed, Tensor) and packed.dtype == made.dtype
    assert torch.equal(packed.cpu(), torch.full(made.data.shape, 0.5, dtype=made.dtype))


def test_float8_is_not_multiplied(backend: NpuBackend) -> None:
    data = torch.ones(16, 64, device="npu:0").to(torch.float8_e4m3fn)
    assert not backend.multiplies(QuantisedWeight(data, torch.ones(16, 1, device="npu:0"), torch.bfloat16))


@pytest.mark.parametrize(
    ("how", "eager"),
    [("W8A8 dynamic", False), ("some layers plain", True)],
    ids=["graphs", "eager, q and down plain"],
)
def test_a_w8a8_target_has_the_same_text_with_drafts_and_without(tmp_path: Path, how: str, eager: bool) -> None:
    pair = make_pair(tmp_path / "pair", seed=11, block_size=16, num_kv_heads=4, **LUCKY)
    pair = replace(pair, target=quantise(pair.target, tmp_path, how)[0])
    asked, steps = requests(vocab_size=5), list[StepOutput]()
    plain = engine(pair, enforce_eager=eager, draft=None).run(asked)
    core = engine(pair, enforce_eager=eager)
    assert isinstance(core.runner.forward.target.layers[0].gate_up, QuantisedWeight)
    with traced() as trace:
        assert core.run(asked, steps.append) == plain
    assert trace.waits == ["aclrtSynchronizeEvent"] * len(steps), "the one read of a step"
    assert not HOST_PROCESSOR.intersection(trace.launches)
    assert any(delta.steps[0].n_accepted for step in steps for delta in step.deltas)


@pytest.mark.parametrize("eager", [True, False])
def test_a_draft_in_int8_changes_no_text(tmp_path: Path, eager: bool) -> None:
    pair = make_pair(tmp_path, seed=11, block_size=16, num_kv_heads=4, **LUCKY)
    asked = requests(vocab_size=5)
    core = engine(pair, enforce_eager=eager, draft_quantization="int8")
    draft = core.runner.forward.drafter.model
    assert all(isinstance(weight, QuantisedWeight) for weight in (draft.layers[0].down, draft.lm_head))
    assert core.run(asked) == engine(pair, enforce_eager=eager, draft=None).run(asked)


class NoFloat8(TorchDispatchMode):
    """No operator gets float8 on the device, for Ascend A2 and A3 have no such numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            assert (
                not isinstance(tensor, Tensor)
                or tensor.device.type in ("cpu", "meta")
                or "float8" not in str(tensor.dtype)
            ), func
        return result


def test_float8_is_widened_before_it_comes_to_the_device(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=11, block_size=16, num_kv_heads=4, **LUCKY)
    quantised, dense = quantise(pair.target, tmp_path, "fp8 in blocks")
    with NoFloat8():
        found = engine(replace(pair, target=quantised), enforce_eager=True).run(requests(2, vocab_size=5))
    assert found == engine(replace(pair, target=dense), enforce_eager=True).run(requests(2, vocab_size=5))


def test_no_draft_becomes_float8(tmp_path: Path, caplog) -> None:
    pair = make_pair(tmp_path, seed=11, block_size=16, num_kv_heads=4, **LUCKY)
    with NoFloat8():
        draft = engine(pair, enforce_eager=True, draft_quantization="fp8").runner.forward.drafter.model
    assert isinstance(draft.layers[0].down, Tensor) and "--draft-quantization fp8: left out" in caplog.text


def test_experts_in_int8_are_those_of_the_quantised_numbers(backend: NpuBackend) -> None:
    """Rows are a hundredfold apart, so that a scale of another row or expert would show."""
    moe = MoeConfig(num_experts=6, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)
    x, router = (normal(7, 64) * magnitudes(7)).bfloat16(), normal(6, 64, seed=2).float()
    shapes = {"gate_up": (64, 64), "down": (64, 32)}
    parts = {
        name: [
            QuantisedWeight.rounded((normal(*shape, seed=e) * magnitudes(64) ** 0.25).bfloat16(), torch.int8)
            for e in range(6)
        ]
        for name, shape in shapes.items()
    }
    put: dict[str, Any] = {"router": router.to("npu:0")}
    for name, weights in parts.items():
        data = torch.stack([weight.data for weight in weights]).to("npu:0")
        scales = torch.stack([weight.scales for weight in weights]).to("npu:0")
        own = QuantisedWeight(backend.empty_experts(data, *data.shape).copy_(data), scales, torch.bfloat16)
        put[name] = backend.pack_gate_up(own) if name == "gate_up" else backend.pack_linear(own)
        assert torch_npu.get_npu_format(put[name].data) == NZ
    rows = x.to("npu:0")
    with traced() as trace:
        found = backend.moe(rows, ExpertWeights(**put), moe)
    assert trace.waits == []
    products = {"aclnnGroupedMatmulSwigluQuantWeightNzV2": 1, "aclnnGroupedMatmulWeightNz": 1}
    assert ({"aclnnMoeInitRoutingV3": 1} | products).items() <= trace.launches.items()
    assert trace.launches.keys().isdisjoint({"aclnnDynamicQuantV2", "aclnnSwiGlu"})
    dense = {name: torch.stack([weight.dequantised().float() for weight in weights]) for name, weights in parts.items()}
    wanted = mixture(x.float(), ExpertWeights(router, **dense), moe)
    errors = (found.cpu().float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert errors.max() < 0.03 and errors.min() > 0


@pytest.mark.parametrize("how", landing_ones(["W8A8 dynamic", "some layers plain"], ("some layers plain",)))
def test_a_w8a8_target_with_experts_has_the_same_text_with_drafts_and_without(tmp_path: Path, how: str) -> None:
    pair = make_pair(tmp_path / "pair", seed=11, block_size=16, num_kv_heads=4, experts=8, **LUCKY)
    pair = replace(pair, target=quantise(pair.target, tmp_path, how)[0])
    asked = requests(vocab_size=5)
    plain = engine(pair, enforce_eager=False, draft=None).run(asked)
    core = engine(pair, enforce_eager=False)
    _, experts = core.runner.forward.target.layers[0].mixture
    assert experts.gate_up.data.dtype == torch.int8 and experts.gate_up.scales.dtype == torch.float32
    assert isinstance(experts.down, Tensor) == (how == "some layers plain")
    assert core.runner.backend.quantised_bytes > experts.gate_up.data.numel() * len(core.runner.forward.target.layers)
    assert core.run(asked) == plain


def test_experts_of_which_some_are_plain_are_widened(tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "pair", seed=11, block_size=16, num_kv_heads=4, experts=8, **LUCKY)
    quantised, _ = quantise(pair.target, tmp_path, "W8A8 dynamic")
    file, name = quantised / "model.safetensors", "model.layers.1.mlp.experts.3.up_proj"
    tensors = load_file(file)
    plain = {f"{name}.weight": tensors[f"{name}.weight"].float()}
    save_file({key: tensor for key, tensor in tensors.items() if not key.startswith(name)} | plain, file)
    core = engine(replace(pair, target=quantised), enforce_eager=True)
    kinds = [layer.mixture[1] for layer in core.runner.forward.target.layers[:2]]
    assert [isinstance(own.gate_up, Tensor) for own in kinds] == [False, True]
    wide, scales = kinds[1].gate_up, tensors["model.layers.1.mlp.experts.5.gate_proj.weight_scale"]
    numbers = tensors["model.layers.1.mlp.experts.5.gate_proj.weight"].float() * scales
    assert torch.equal(wide[5, : len(numbers)].cpu(), numbers.bfloat16())
    assert wide.stride() == kinds[1].gate_up.transpose(1, 2).contiguous().transpose(1, 2).stride()
    assert core.run(requests(2, vocab_size=5))
