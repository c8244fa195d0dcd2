"""Checks of operator calls against the rules of docs/npu-contract.md, because a card may accept a wrong call.

`check_call` reads shapes, dtypes and lists, which the host has. `check_values` reads tensors (block tables, slots,
masks), which makes the host wait on a card. `Checked` applies both to every operator while it is entered.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.npu.rules import (
    EVERY_TOKEN,
    HEAD_DIMS,
    MASK_SIZE,
    MAX_AXIS,
    MAX_BLOCK_ROWS,
    MAX_DELTA_ROWS,
    MAX_DELTA_SIZE,
    MAX_GATED_AXIS,
    MAX_TOP_K,
    MIN_EXPERTS,
    NZ,
    NZ_TILE,
    PAGE_SIZE,
    ROTARY_PAIR_DIMS,
)

MAX_REQUESTS = 4096
MAX_SINK_DIM = 128
"""Head size up to which attention takes sinks."""
SCRATCH_BLOCK = 0
"""First block of padding requests, which may have more rows than a DFlash block."""
FLOAT32, BFLOAT16 = 6, 15
"""Dtypes of torch as an operator's integer arguments."""


class ContractError(ValueError):
    """Call that breaks a rule. `rule` is its id in docs/npu-contract.md."""

    def __init__(self, rule: str, operator: str, message: str) -> None:
        super().__init__(f"{rule}: {operator}: {message}")
        self.rule = rule


class _Holder:
    """Judge of one call. It raises ContractError for a broken rule that is not lifted."""

    def __init__(self, operator: str, lift: Collection[str]) -> None:
        self._operator, self._lift = operator, lift

    def __call__(self, rule: str, holds: bool, message: str) -> None:
        if not holds and rule not in self._lift:
            raise ContractError(rule, self._operator, message)


def check_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lift: Collection[str] = ()) -> None:
    """Raise ContractError if shapes, dtypes or lists break a rule. `func` is the operator's overload."""
    operator = func._schema.name.removeprefix("npu::")
    if operator in _CALL_RULES:
        _CALL_RULES[operator](_Holder(operator, lift), _named(func, args, kwargs))


def check_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], lift: Collection[str] = ()) -> None:
    """Raise ContractError if the tensors' values break a rule."""
    operator = func._schema.name.removeprefix("npu::")
    if operator in _VALUE_RULES:
        _VALUE_RULES[operator](_Holder(operator, lift), _named(func, args, kwargs))


class Checked(TorchDispatchMode):
    """Mode that checks every call of an `npu::` operator before it runs. `lift` names rules that are not held.

    It does not work in graphs, because their values cannot be read.
    """

    def __init__(self, lift: Collection[str] = ()) -> None:
        super().__init__()
        self._lift = lift
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.calls += 1
            check_call(func, args, kwargs or {}, self._lift)
            check_values(func, args, kwargs or {}, self._lift)
        return func(*args, **(kwargs or {}))


def check_lengths(operator: str, kwargs: Mapping[str, Any]) -> None:
    """Check N1 before dispatch, because the dispatcher reads a tensor into a list and waits for the card."""
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen"):
        if operator in (*_ATTENTION, *_ATTENTION_V2) and name in kwargs:
            on_host = _is_int_list(kwargs[name]) or isinstance(kwargs[name], torch._C.ScriptList)
            _Holder(operator, ())("N1", on_host, f"{name} is {_kind(kwargs[name])}, not a list[int]")


def _named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments if not argument.kwarg_only)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


# ---- npu_fused_infer_attention_score ----------------------------------------------------------------------------


def _attention(hold: _Holder, call: Mapping[str, Any]) -> None:
    query, key, value = call["query"], call["key"], call["value"]
    q_ends, host_seq_lens = call.get("actual_seq_lengths"), call.get("actual_seq_lengths_kv")
    for name, lengths in (("actual_seq_lengths", q_ends), ("actual_seq_lengths_kv", host_seq_lens)):
        hold("N1", _is_int_list(lengths), f"{name} is {_kind(lengths)}, not a list[int]")
    layout, scale = call.get("input_layout", "BSH"), call.get("scale")
    hold("N14", layout == "TND", f"input_layout is {layout!r}, not 'TND'")
    hold("N14", scale is not None and scale != 1.0, "scale was left at 1.0")

    heads, kv_heads = call.get("num_heads", 1), call.get("num_key_value_heads", 0)
    fits = query.dim() == 3 and query.is_contiguous() and query.shape[1] == heads
    hold("N5", fits, f"query {_shape(query)} is not contiguous [T, {heads} heads, D]")
    grouped = 0 < kv_heads <= heads <= 256 and heads % kv_heads == 0 and heads // kv_heads <= 64
    hold("N5", grouped, f"{heads} heads over {kv_heads} KV heads")
    if query.dim() != 3:
        return
    total, _, dim = query.shape
    hold("N8", dim in HEAD_DIMS, f"head size {dim} is not one of {HEAD_DIMS}")
    width = kv_heads * dim
    for name, pool in (("key", key), ("value", value)):
        fits = pool.dim() == 3 and pool.shape == key.shape and pool.is_contiguous() and pool.shape[-1] == width <= 65535
        hold("N6", fits, f"{name} {_shape(pool)} is not contiguous [blocks, block_size, {kv_heads} x {dim}]")
    kinds = {tensor.dtype for tensor in (query, key, value)}
    hold("N7", kinds == {torch.bfloat16}, f"query, key, value are {kinds}, not bfloat16")
    size = call.get("block_size", 0)
    hold(
        "N9",
        size == key.shape[1] and size % PAGE_SIZE == 0 and PAGE_SIZE <= size <= 512,
        f"block_size {size}, key {_shape(key)}",
    )

    table = call.get("block_table")
    fits = isinstance(table, Tensor) and table.dim() == 2 and table.dtype == torch.int32
    hold("N4", fits, f"block_table is {_kind(table)}, not int32 [S, P]")
    if not (_is_int_list(q_ends) and _is_int_list(host_seq_lens) and isinstance(table, Tensor) and fits):
        return
    counts = {len(q_ends), len(host_seq_lens), len(table)}
    hold("N4", len(counts) == 1 and 0 < len(q_ends) <= MAX_REQUESTS, f"ends, KV lengths, block rows count {counts}")
    query_lens = [end - start for start, end in pairwise([0, *q_ends])]
    hold("N2", min(query_lens) > 0 and q_ends[-1] == total, f"ends {q_ends} do not grow to {total} query rows")
    hold(
        "N3",
        min(host_seq_lens) > 0 and max(host_seq_lens) <= table.shape[1] * size,
        f"KV {host_seq_lens} in {table.shape[1]} x {size}",
    )

    mode, mask = call.get("sparse_mode", 0), call.get("atten_mask")
    hold("N10", (mode, mask is None) in ((0, True), (3, False), (4, False)), f"sparse_mode {mode}, mask {_kind(mask)}")
    before, after = call.get("pre_tokens", EVERY_TOKEN), call.get("next_tokens", EVERY_TOKEN)
    band = 0 <= before < EVERY_TOKEN and after in (0, before)
    fits = band if mode == 4 else before == after == EVERY_TOKEN
    hold("N10", fits, f"sparse_mode {mode} with pre_tokens {before} and next_tokens {after}")
    if mask is not None:
        fits = mask.dtype == torch.int8 and tuple(mask.shape) == (MASK_SIZE, MASK_SIZE)
        hold("N10", fits, f"mask {mask.dtype} {_shape(mask)} is not int8 [{MASK_SIZE}, {MASK_SIZE}]")
    if mode in (3, 4):
        short = [(q, kv) for q, kv in zip(query_lens, host_seq_lens, strict=False) if q > kv]
        hold("N11", not short, f"(rows, KV) with fewer KV than causal rows: {short}")


def _attention_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    table, size, blocks = call["block_table"], call["block_size"], len(call["key"])
    q_ends, host_seq_lens = call["actual_seq_lengths"], call["actual_seq_lengths_kv"]
    starts = torch.arange(0, table.shape[1] * size, size, device=table.device)
    ids = table[starts < torch.tensor(host_seq_lens, device=table.device)[:, None]]
    hold("N13", int(ids.min()) >= 0 and int(ids.max()) < blocks, f"block ids {ids.tolist()} of {blocks} blocks")
    if call.get("sparse_mode", 0) in (3, 4):
        right = torch.equal(call["atten_mask"].cpu(), _causal_mask())
        hold("N10", right, "the mask is not 1 strictly above the diagonal and 0 elsewhere")
    if call.get("sparse_mode", 0) == 0 or call.get("next_tokens") not in (0, None, EVERY_TOKEN):  # a draft's
        rows = [end - start for start, end in pairwise([0, *q_ends])]
        firsts = table[:, 0].tolist()
        long = [n for n, block in zip(rows, firsts, strict=True) if n > MAX_BLOCK_ROWS and block != SCRATCH_BLOCK]
        hold("N12", not long, f"{long} query rows for one request; a block has at most {MAX_BLOCK_ROWS}")


_FIRST_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
}
"""Names of the operator's second version, and of the first."""


def _attention_v2(hold: _Holder, call: Mapping[str, Any]) -> None:
    query, sinks = call["query"], call.get("learnable_sink")
    fits = isinstance(sinks, Tensor) and sinks.dtype == query.dtype and tuple(sinks.shape) == tuple(query.shape[1:2])
    hold("N38", fits, f"learnable_sink is {_kind(sinks)}, for query {_shape(query)}")
    hold("N38", query.shape[-1] <= MAX_SINK_DIM, f"head size {query.shape[-1]} is above {MAX_SINK_DIM}")
    _attention(hold, {_FIRST_NAMES.get(name, name): value for name, value in call.items()})


def _attention_v2_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    _attention_values(hold, {_FIRST_NAMES.get(name, name): value for name, value in call.items()})


@cache
def _causal_mask() -> Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu_(1)


# ---- other operators --------------------------------------------------------------------------------------------


def _write_kv(hold: _Holder, call: Mapping[str, Any]) -> None:
    key, slot_mapping = call["key"], call["slot_mapping"]
    mode = call.get("cache_mode", "PA_NZ")
    hold("N15", mode == "Norm", f"cache_mode is {mode!r}, not 'Norm'")
    for name in ("key", "value"):
        rows, cache = call[name], call[f"{name}_cache"]
        fits = rows.dim() == 3 and rows.shape == key.shape and rows.is_contiguous()
        hold("N15", fits, f"{name} {_shape(rows)} is not contiguous [T, KV heads, D]")
        fits = cache.dim() == 4 and cache.is_contiguous() and cache.shape[2:] == rows.shape[1:]
        hold("N15", fits, f"{name}_cache {_shape(cache)} is not contiguous [blocks, block_size, *{_shape(rows)[1:]}]")
        hold("N15", cache.dtype == rows.dtype, f"{name} is {rows.dtype}, its cache {cache.dtype}")
    fits = (
        slot_mapping.dtype == torch.int32 and tuple(slot_mapping.shape) == (len(key),) and slot_mapping.is_contiguous()
    )
    hold("N15", fits, f"slot_mapping {slot_mapping.dtype} {_shape(slot_mapping)} is not contiguous int32 [{len(key)}]")


def _write_kv_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    blocks, size = call["key_cache"].shape[:2]
    _places(hold, call["slot_mapping"], blocks * size)


def _scatter(hold: _Holder, call: Mapping[str, Any]) -> None:
    target, indices, updates = call["input"], call["indices"], call["updates"]
    fits = indices.dim() >= 2 and not indices.is_floating_point() and 0 < indices.shape[-1] <= target.dim()
    hold("N17", fits, f"indices {indices.dtype} {_shape(indices)} for input {_shape(target)}; [T, 1] for rows")
    wanted = (*indices.shape[:-1], *target.shape[indices.shape[-1] :])
    hold("N17", tuple(updates.shape) == wanted, f"updates {_shape(updates)}, not {list(wanted)}")
    hold("N17", updates.dtype == target.dtype, f"updates are {updates.dtype}, input {target.dtype}")


def _scatter_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    target, indices = call["input"], call["indices"]
    if indices.shape[-1] == 1:
        _places(hold, indices.flatten(), len(target))


def _places(hold: _Holder, places: Tensor, size: int) -> None:
    if not places.numel():
        return
    hold("N16", int(places.min()) >= 0 and int(places.max()) < size, f"slots {places.tolist()} of {size}")
    hold("N16", places.unique().numel() == places.numel(), f"slots {places.tolist()} repeat")


def _rms_norm(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, gamma = call.get("input", call.get("x1")), call["gamma"]
    fits = tuple(gamma.shape) == tuple(x.shape[-1:]) and gamma.dtype in (x.dtype, torch.float32)
    hold("N18", fits, f"gamma {gamma.dtype} {_shape(gamma)} for x {x.dtype} {_shape(x)}")
    if "x2" in call:
        other = call["x2"]
        hold("N18", gamma.dtype == x.dtype, f"gamma is {gamma.dtype}, x1 {x.dtype}")
        hold("N18", (other.shape, other.dtype) == (x.shape, x.dtype), f"x2 {other.dtype} {_shape(other)}")


def _swiglu(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, dim = call["input"], call.get("dim", -1)
    fits = x.shape[dim] % 2 == 0 and x.is_contiguous()
    hold("N19", fits, f"input {_shape(x)} is not contiguous with an even axis {dim}")


def _rotary(hold: _Holder, call: Mapping[str, Any]) -> None:
    hold("N20", call.get("rotary_mode", "half") == "half", f"rotary_mode {call.get('rotary_mode')!r}, not 'half'")
    rows = [call[name] for name in ("input", "query", "key") if name in call]
    tables = [call[name] for name in ("r1", "r2", "cos", "sin") if name in call]
    for x in rows:
        fits = x.dim() == 3 and x.shape[1] < 1000 and x.shape[2] < 896 and x.shape[2] % 2 == 0 and x.is_contiguous()
        hold("N20", fits, f"{_shape(x)} is not contiguous [T, heads < 1000, even D < 896]")
        for table in tables:
            fits = tuple(table.shape) == (x.shape[0], 1, x.shape[2]) and table.dtype == x.dtype
            hold("N20", fits, f"cos, sin {table.dtype} {_shape(table)} for {x.dtype} {_shape(x)}; [T, 1, D] alike")
    if "query" in call:
        hold("N21", call.get("layout", "BSND") == "TND", f"layout {call.get('layout', 'BSND')!r}, not 'TND'")
        sizes = {x.shape[-1] for x in rows}
        hold("N21", sizes.issubset(ROTARY_PAIR_DIMS), f"head sizes {sizes}, not one of {ROTARY_PAIR_DIMS}")


def _gating(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, k = call["x"], call.get("k", 1)
    fits = x.dim() == 2 and x.is_contiguous() and x.dtype == torch.float32 and 0 < k <= min(x.shape[1], MAX_TOP_K)
    hold("N33", fits, f"{k} of logits {x.dtype} {_shape(x)}, not of contiguous float32 [T, E]")


def _init_routing(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, chosen, experts = call["x"], call["expert_idx"], call.get("expert_num", -1)
    fits = x.dim() == chosen.dim() == 2 and len(x) == len(chosen) and chosen.dtype == torch.int32
    hold("N34", fits and x.is_contiguous(), f"rows {_shape(x)} with experts {chosen.dtype} {_shape(chosen)}")
    given = {name: call.get(name) for name in ("expert_tokens_num_type", "expert_tokens_num_flag", "active_num")}
    wanted = {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_num": chosen.numel()}
    hold("N34", given == wanted, f"given are {given}, not {wanted}")
    hold("N34", call.get("active_expert_range") == [0, experts], f"active_expert_range, not [0, {experts}]")
    others = (call.get("drop_pad_mode", 0), call.get("row_idx_type", 0))
    hold("N34", others == (0, 0), f"drop_pad_mode, row_idx_type are {others}")
    mode, scale = call.get("quant_mode", -1), call.get("scale")
    fits = mode == -1 or (mode == 1 and x.dtype == torch.bfloat16)
    hold("N34", fits and scale is None, f"quant_mode is {mode} for {x.dtype}, scale {_kind(scale)}")


def _init_routing_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    chosen, experts = call["expert_idx"], call["expert_num"]
    if chosen.numel():
        hold("N34", 0 <= int(chosen.min()) <= int(chosen.max()) < experts, f"ids {chosen.tolist()} of {experts}")


def _grouped_matmul(hold: _Holder, call: Mapping[str, Any]) -> None:
    (x, *more), (weight, *weights) = call["x"], call["weight"]
    fits = not more and not weights and x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1]
    hold("N35", fits, f"x {_shape(x)} with weight {_shape(weight)}, not one [R, in] and one [E, in, out]")
    hold("N35", x.is_contiguous() and weight.is_contiguous(), "x or weight is not contiguous")
    hold("N35", max(x.shape[1], weight.shape[2]) <= MAX_AXIS, f"an axis of {_shape(weight)} is above {MAX_AXIS}")
    hold("N35", x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}")
    if x.dtype == torch.int8:
        scales = {
            "scale": ((len(weight), weight.shape[2]), torch.bfloat16),
            "per_token_scale": ((len(x),), torch.float32),
        }
        for name, (shape, dtype) in scales.items():
            (scale,) = call.get(name) or (None,)
            fits = isinstance(scale, Tensor) and (tuple(scale.shape), scale.dtype) == (shape, dtype)
            hold("N35", fits, f"{name} is {_kind(scale)}, not {dtype} {list(shape)}")
    counts = call.get("group_list")
    fits = isinstance(counts, Tensor) and counts.dtype == torch.int64 and tuple(counts.shape) == (len(weight),)
    hold("N35", fits and len(weight) >= MIN_EXPERTS, f"group_list is {_kind(counts)}, not int64 of two or more")
    modes = (call.get("split_item", 0), call.get("group_type"), call.get("group_list_type", 0))
    hold("N35", modes == (2, 0, 1), f"split_item, group_type, group_list_type are {modes}")
    for bias in call.get("bias") or ():
        wanted = (len(weight), weight.shape[2])
        hold("N35", bias.dtype == torch.float32 and tuple(bias.shape) == wanted, f"bias {bias.dtype} {_shape(bias)}")


def _grouped_matmul_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    counts, rows = call["group_list"], len(call["x"][0])
    hold("N35", int(counts.min()) >= 0 and int(counts.sum()) == rows, f"{counts.tolist()} rows of {rows}")


def _grouped_swiglu(hold: _Holder, call: Mapping[str, Any]) -> None:
    (weight, *weights), x = call["weight"], call["x"]
    fits = not weights and x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1] and x.is_contiguous()
    hold("N45", fits, f"x {_shape(x)} with weight {_shape(weight)}, not contiguous [R, in] with one [E, in, out]")
    hold("N45", {x.dtype, weight.dtype} == {torch.int8}, f"x is {x.dtype}, weight {weight.dtype}")
    hold("N45", _in_nz(weight) and weight.is_contiguous(), f"weight {_shape(weight)} is not contiguous in NZ")
    hold("N45", x.shape[1] <= MAX_AXIS, f"x {_shape(x)} is wider than {MAX_AXIS}")
    hold("N45", weight.shape[2] <= MAX_GATED_AXIS, f"weight {_shape(weight)} is wider than {MAX_GATED_AXIS}")
    (scale, *_), counts = call["weight_scale"], call["group_list"]
    wanted = {
        "weight_scale": (scale, (len(weight), weight.shape[2]), torch.float32),
        "x_scale": (call["x_scale"], (len(x),), torch.float32),
        "group_list": (counts, (len(weight),), torch.int64),
    }
    for name, (it, shape, dtype) in wanted.items():
        fits = tuple(it.shape) == shape and it.dtype == dtype and it.is_contiguous()
        hold("N45", fits, f"{name} is {_kind(it)}, not contiguous {dtype} {list(shape)}")
    given = (call.get("group_list_type", 0), call.get("dequant_dtype", FLOAT32))  # a default that 2.10.0 has not
    hold("N45", given == (1, FLOAT32), f"group_list_type, dequant_dtype are {given}")
    named = {"x", "weight", "weight_scale", "x_scale", "group_list", "group_list_type", "dequant_dtype"}
    hold("N45", call.keys() <= named, f"{sorted(call.keys() - named)} are given")


def _grouped_swiglu_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    counts, rows = call["group_list"], len(call["x"])
    hold("N45", int(counts.min()) >= 0 and int(counts.sum()) == rows, f"{counts.tolist()} rows of {rows}")


def _unpermute(hold: _Holder, call: Mapping[str, Any]) -> None:
    rows, places, shares = call["permuted_tokens"], call["sorted_indices"], call.get("probs")
    fits = rows.dim() == 2 and places.dtype == torch.int32 and tuple(places.shape) == (len(rows),)
    hold("N36", fits, f"rows {_shape(rows)} at {places.dtype} {_shape(places)}")
    fits = shares is not None and shares.dim() == 2 and shares.numel() == len(rows) and shares.dtype == rows.dtype
    hold("N36", fits, f"probs {_kind(shares)} for {len(rows)} rows of {rows.dtype}")


def _unpermute_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    places = call["sorted_indices"]
    whole = torch.arange(len(places), dtype=places.dtype, device=places.device)
    hold("N36", torch.equal(places.sort().values, whole), f"places {places.tolist()} are no permutation")


def _clipped_swiglu(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, dim = call["x"], call.get("dim", -1)
    fits = x.shape[dim] % 2 == 0 and x.is_contiguous()
    hold("N37", fits, f"x {_shape(x)} is not contiguous with an even axis {dim}")
    hold("N37", call.get("interleaved", True) is False, "interleaved was left True")


def _dynamic_quant(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, given = call["input"], sorted(set(call) - {"input"})
    fits = x.dim() == 2 and x.dtype == torch.bfloat16 and x.numel() > 0
    hold("N40", fits and not given, f"input {_kind(x)} with {given}, not some rows of bfloat16 alone")


def _norm_quant(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, others = call["x1"], sorted(set(call) - {"x1", "x2", "gamma", "epsilon", "output_mask"})
    fits = x.dim() == 2 and x.dtype == torch.bfloat16 and x.numel() > 0
    hold("N43", fits and not others, f"x1 {_kind(x)} with {others}, not some rows of bfloat16 alone")
    hold("N43", list(call.get("output_mask") or ()) == [True, False], f"output_mask is {call.get('output_mask')}")
    _rms_norm(hold, call)


def _format_cast(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, given = call["input"], (call.get("acl_format"), call.get("customize_dtype"), call.get("input_dtype"))
    fits = x.dtype == torch.int8 and x.dim() in (2, 3) and x.is_contiguous() and given == (NZ, None, None)
    hold("N44", fits, f"{_kind(x)} to {given}, not contiguous int8 to {NZ}")
    hold("N44", not any(size % NZ_TILE for size in x.shape[-2:]), f"{_shape(x)} is not whole tiles of {NZ_TILE}")


def _in_nz(x: Tensor) -> bool:
    return x.device.type == "npu" and int(torch.ops.npu.get_npu_format(x)) == NZ


def _quant_matmul(hold: _Holder, call: Mapping[str, Any]) -> None:
    x, weight = call["x1"], call["x2"]
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[0] and x.numel() > 0 and x.is_contiguous()
    hold("N41", fits, f"x1 {_shape(x)} with x2 {_shape(weight)}, not contiguous [T, in] with [in, out]")
    if _in_nz(weight):
        hold("N44", weight.is_contiguous(), f"x2 {_shape(weight)} in NZ is not contiguous [in, out]")
    else:
        hold("N41", weight.t().is_contiguous(), f"x2 {_shape(weight)} is not a contiguous [out, in], transposed")
    hold("N41", {x.dtype, weight.dtype} == {torch.int8}, f"x1 is {x.dtype}, x2 {weight.dtype}")
    hold("N41", max(weight.shape) <= MAX_AXIS, f"an axis of {_shape(weight)} is above {MAX_AXIS}")
    wanted = {"scale": (weight.shape[1], torch.float32), "pertoken_scale": (len(x), torch.float32)}
    if call.get("bias") is not None:  # one in int32 would be added before the scales
        wanted["bias"] = (weight.shape[1], torch.bfloat16)
    for name, (size, dtype) in wanted.items():
        it = call.get(name)
        fits = isinstance(it, Tensor) and tuple(it.shape) == (size,) and it.dtype == dtype and it.is_contiguous()
        hold("N41", fits, f"{name} is {_kind(it)}, not contiguous {dtype} [{size}]")
    hold("N41", call.get("output_dtype") == BFLOAT16, f"output_dtype is {call.get('output_dtype')}, not bfloat16")
    others = sorted(set(call) - {"x1", "x2", "scale", "pertoken_scale", "bias", "output_dtype"})
    hold("N41", not others, f"{others} are given")


def _delta_rule(hold: _Holder, call: Mapping[str, Any]) -> None:
    state, (rows, heads, v_dim), (_, k_heads, k_dim) = call["state"], call["value"].shape, call["key"].shape
    hold("N46", tuple(state.shape[1:]) == (heads, v_dim, k_dim), f"state {_shape(state)} is not [.., Nv, Dv, Dk]")
    fits = heads % k_heads == 0 and max(heads, k_dim, v_dim) <= MAX_DELTA_SIZE
    hold("N46", fits, f"{k_heads} heads of {k_dim} for {heads} of {v_dim}")
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "query": ((rows, k_heads, k_dim), torch.bfloat16),
        "key": ((rows, k_heads, k_dim), torch.bfloat16),
        "value": ((rows, heads, v_dim), torch.bfloat16),
        "state": (tuple(state.shape), torch.bfloat16),
        "beta": ((rows, heads), torch.bfloat16),
        "g": ((rows, heads), torch.float32),
        "ssm_state_indices": ((rows,), torch.int32),
        "actual_seq_lengths": ((len(call["actual_seq_lengths"]),), torch.int32),
    }
    for name, (shape, dtype) in wanted.items():
        it = call.get(name)
        fits = isinstance(it, Tensor) and tuple(it.shape) == shape and it.dtype == dtype and it.is_contiguous()
        hold("N46", fits, f"{name} is {_kind(it)}, not contiguous {dtype} {list(shape)}")
    others = sorted(set(call) - set(wanted) - {"scale"})
    hold("N46", call.get("scale") is not None and not others, f"scale {call.get('scale')}, and {others} are given")


def _delta_rule_values(hold: _Holder, call: Mapping[str, Any]) -> None:
    lengths, indices = call["actual_seq_lengths"], call["ssm_state_indices"]
    fits = int(lengths.sum()) == len(indices) and int(lengths.min()) > 0 and int(lengths.max()) <= MAX_DELTA_ROWS
    hold("N46", fits, f"lengths {lengths.tolist()} of {len(indices)} rows, at most {MAX_DELTA_ROWS} each")
    hold("N46", int(indices.min()) >= 0 and int(indices.max()) < len(call["state"]), "a state does not exist")
    owners = torch.repeat_interleave(lengths.long())
    pairs = torch.stack((indices.long(), owners)).unique(dim=1)
    hold("N46", len(pairs[0].unique()) == pairs.shape[1], "two sequences have one state")


def _index(hold: _Holder, call: Mapping[str, Any]) -> None:
    given = [axis for axis, index in enumerate(call["indices"]) if index is not None]
    hold("N47", given == list(range(given[0], given[-1] + 1)), f"indices of axes {given}, with another between")


def _write_by_index(hold: _Holder, call: Mapping[str, Any]) -> None:
    hold("N47", call["self"].is_contiguous(), f"a strided view {_shape(call['self'])}, which is copied whole, twice")
    if "indices" in call:
        _index(hold, call)


_ATTENTION = ("npu_fused_infer_attention_score", "_npu_fused_infer_attention_score_get_max_workspace")
_ATTENTION_V2 = ("npu_fused_infer_attention_score_v2", "_npu_fused_infer_attention_score_v2_get_max_workspace")
_CALL_RULES: dict[str, Callable[[_Holder, Mapping[str, Any]], None]] = {
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(_ATTENTION_V2, _attention_v2),
    "npu_scatter_pa_kv_cache": _write_kv,
    "npu_scatter_nd_update_": _scatter,
    "npu_rms_norm": _rms_norm,
    "npu_add_rms_norm": _rms_norm,
    "npu_swiglu": _swiglu,
    "npu_rotary_mul": _rotary,
    "npu_apply_rotary_pos_emb": _rotary,
    "npu_moe_gating_top_k_softmax_v2": _gating,
    "npu_moe_init_routing_v2": _init_routing,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_grouped_matmul_swiglu_quant_v2": _grouped_swiglu,
    "npu_moe_token_unpermute": _unpermute,
    "npu_clipped_swiglu": _clipped_swiglu,
    "npu_dynamic_quant": _dynamic_quant,
    "npu_add_rms_norm_dynamic_quant": _norm_quant,
    "npu_format_cast": _format_cast,
    "npu_quant_matmul": _quant_matmul,
    "npu_recurrent_gated_delta_rule": _delta_rule,
    "aten::index": _index,
    "aten::index_put_": _write_by_index,
    "aten::index_copy_": _write_by_index,
}
_VALUE_RULES: dict[str, Callable[[_Holder, Mapping[str, Any]], None]] = {
    "npu_fused_infer_attention_score": _attention_values,
    "npu_fused_infer_attention_score_v2": _attention_v2_values,
    "npu_scatter_pa_kv_cache": _write_kv_values,
    "npu_scatter_nd_update_": _scatter_values,
    "npu_moe_init_routing_v2": _init_routing_values,
    "npu_grouped_matmul": _grouped_matmul_values,
    "npu_grouped_matmul_swiglu_quant_v2": _grouped_swiglu_values,
    "npu_moe_token_unpermute": _unpermute_values,
    "npu_recurrent_gated_delta_rule": _delta_rule_values,
}


def _is_int_list(lengths: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(lengths, list | tuple) and all(type(length) is int for length in lengths)


def _kind(it: Any) -> str:
    return f"{it.dtype} {_shape(it)}" if isinstance(it, Tensor) else type(it).__name__


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
