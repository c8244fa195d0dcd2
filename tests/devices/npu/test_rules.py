"""Every rule of docs/npu-contract.md catches a wrong call, and right calls pass. One entry a wrong call."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from app.engine.npu import nz
from tests.devices.npu.calls import BLOCK, Sequences, normal
from tests.devices.npu.numerics import Numerics
from tools.npu_contract.check import ContractError

Change = Callable[[dict[str, Any]], object]


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="npu:0")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="npu:0")


def attention() -> dict[str, Any]:
    return Sequences([3, 16], [140, 20]).arguments(causal=True)


def draft_attention() -> dict[str, Any]:
    return Sequences([3, 16], [140, 20]).arguments(causal=False)


def sliding() -> dict[str, Any]:
    return Sequences([3, 16], [140, 20]).arguments(causal=True, window=9)


SECOND_NAMES = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
}


def sinks() -> dict[str, Any]:
    return {SECOND_NAMES.get(name, name): value for name, value in sliding().items()} | {"learnable_sink": new(4)}


def wide_sinks() -> dict[str, Any]:
    wide = Sequences([3], [9], dim=256).arguments(causal=True)
    return {SECOND_NAMES.get(name, name): value for name, value in wide.items()} | {"learnable_sink": new(4)}


def write() -> dict[str, Any]:
    rows, cache = normal(3, 2, 128).to("npu:0"), new(4, BLOCK, 2, 128)
    slot_mapping = ints(130, 5, 383)
    more = {"slot_mapping": slot_mapping, "cache_mode": "Norm"}
    return {"key": rows, "value": rows.clone(), "key_cache": cache, "value_cache": cache.clone(), **more}


def scatter() -> dict[str, Any]:
    return {"input": new(512, 2, 128), "indices": ints(130, 5, 383)[:, None], "updates": new(3, 2, 128)}


def norm() -> dict[str, Any]:
    return {"input": new(3, 64), "gamma": new(64)}


def add_norm() -> dict[str, Any]:
    return {"x1": new(3, 64), "x2": new(3, 64), "gamma": new(64)}


def swiglu() -> dict[str, Any]:
    return {"input": new(3, 64)}


def rotary() -> dict[str, Any]:
    return {"input": new(3, 2, 128), "r1": new(3, 1, 128), "r2": new(3, 1, 128)}


def rotary_both() -> dict[str, Any]:
    tables = {"cos": new(3, 1, 128), "sin": new(3, 1, 128), "layout": "TND"}
    return {"query": new(3, 4, 128), "key": new(3, 2, 128), **tables}


def narrow(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x[..., :32].contiguous() for name, x in call.items() if isinstance(x, Tensor)}


def gating() -> dict[str, Any]:
    return {"x": normal(3, 8, dtype=torch.float32).to("npu:0"), "k": 2, "renorm": 1}


def routing() -> dict[str, Any]:
    counted = {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [0, 8]}
    chosen = ints(0, 7, 2, 0, 3, 7).view(3, 2)
    return {"x": new(3, 64), "expert_idx": chosen, "active_num": 6, "expert_num": 8, **counted}


def grouped() -> dict[str, Any]:
    modes = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    return {"x": [new(6, 64)], "weight": [new(3, 64, 32)], "group_list": ints(1, 0, 5).long(), **modes}


def grouped_swiglu() -> dict[str, Any]:
    numbers = {"x": new(6, 64, dtype=torch.int8), "weight": [nz.in_nz(new(3, 32, 64, dtype=torch.int8)).mT]}
    scales = {"weight_scale": [new(3, 32, dtype=torch.float32)], "x_scale": new(6, dtype=torch.float32)}
    modes = {"group_list_type": 1, "dequant_dtype": torch.float32}
    return {**numbers, **scales, "group_list": ints(1, 0, 5).long(), **modes}


def unpermute() -> dict[str, Any]:
    places = ints(3, 0, 5, 4, 1, 2)
    return {"permuted_tokens": new(6, 64), "sorted_indices": places, "probs": new(3, 2)}


def clipped() -> dict[str, Any]:
    return {"x": new(3, 64), "interleaved": False}


def quantising() -> dict[str, Any]:
    return {"input": new(3, 64)}


def norm_quantising() -> dict[str, Any]:
    return add_norm() | {"output_mask": [True, False]}


def casting() -> dict[str, Any]:
    return {"input": new(64, 96, dtype=torch.int8), "acl_format": 29}


def quantised() -> dict[str, Any]:
    scales = {"scale": new(48, dtype=torch.float32), "pertoken_scale": new(3, dtype=torch.float32)}
    numbers = {"x1": new(3, 64, dtype=torch.int8), "x2": new(48, 64, dtype=torch.int8).t()}
    return {**numbers, **scales, "bias": new(48), "output_dtype": torch.bfloat16}


def quantised_in_nz() -> dict[str, Any]:
    """Return a product by a weight that `NpuBackend.pack_quantised` has turned."""
    scales = {"scale": new(64, dtype=torch.float32), "bias": new(64)}
    return quantised() | scales | {"x2": nz.in_nz(new(64, 64, dtype=torch.int8)).mT}


def wide_gate_up() -> dict[str, Any]:
    weight = nz.in_nz(new(3, 10272, 64, dtype=torch.int8)).mT
    return {"weight": [weight], "weight_scale": [new(3, 10272, dtype=torch.float32)]}


def strided_gate_up() -> dict[str, Any]:
    weight = nz.in_nz(new(3, 64, 64, dtype=torch.int8))
    return {"weight": [weight], "weight_scale": [new(3, 64, dtype=torch.float32)]}


def two_gate_ups() -> dict[str, Any]:
    return {name: 2 * grouped_swiglu()[name] for name in ("weight", "weight_scale")}


def wide_rows() -> dict[str, Any]:
    weight = nz.in_nz(new(3, 32, 65536, dtype=torch.int8)).mT
    return {"x": new(6, 65536, dtype=torch.int8), "weight": [weight]}


def wide_quantised(out: int, columns: int) -> dict[str, Any]:
    numbers = {"x1": new(3, columns, dtype=torch.int8), "x2": new(out, columns, dtype=torch.int8).t()}
    return quantised() | numbers | {"scale": new(out, dtype=torch.float32), "bias": new(out)}


def delta_rule() -> dict[str, Any]:
    """Two sequences of three rows, with two heads of q and k for four of v."""
    rows = {"query": new(6, 2, 32), "key": new(6, 2, 32), "value": new(6, 4, 16), "beta": new(6, 4)}
    states = {"state": new(5, 4, 16, 32), "ssm_state_indices": ints(3, 3, 3, 1, 1, 1), "actual_seq_lengths": ints(3, 3)}
    return rows | states | {"g": new(6, 4, dtype=torch.float32), "scale": 0.1}


def read() -> dict[str, Any]:
    return {"self": new(4, 5, 4), "indices": [ints(1, 2).long()]}


def indexed() -> dict[str, Any]:
    return read() | {"values": new(1)}


def copied() -> dict[str, Any]:
    return {"self": new(4, 5, 4), "dim": 0, "index": ints(1, 2).long(), "source": new(2, 5, 4)}


def three_heads() -> dict[str, Any]:
    gates = {"beta": new(6, 3), "g": new(6, 3, dtype=torch.float32)}
    return {"value": new(6, 3, 16), "state": new(5, 3, 16, 32), **gates}


def long_heads() -> dict[str, Any]:
    return {"query": new(6, 2, 288), "key": new(6, 2, 288), "state": new(5, 4, 16, 288)}


def nine_rows() -> dict[str, Any]:
    rows = ("query", "key", "value", "beta", "g")
    longer = {name: x.repeat(2, *[1] * (x.dim() - 1))[:9] for name, x in delta_rule().items() if name in rows}
    return longer | {"ssm_state_indices": ints(*[3] * 9), "actual_seq_lengths": ints(9)}


OPERATORS: dict[Callable[[], dict[str, Any]], str] = {
    attention: "npu_fused_infer_attention_score",
    draft_attention: "npu_fused_infer_attention_score",
    sinks: "npu_fused_infer_attention_score_v2",
    write: "npu_scatter_pa_kv_cache",
    scatter: "npu_scatter_nd_update_",
    norm: "npu_rms_norm",
    add_norm: "npu_add_rms_norm",
    swiglu: "npu_swiglu",
    rotary: "npu_rotary_mul",
    rotary_both: "npu_apply_rotary_pos_emb",
    gating: "npu_moe_gating_top_k_softmax_v2",
    routing: "npu_moe_init_routing_v2",
    grouped: "npu_grouped_matmul",
    grouped_swiglu: "npu_grouped_matmul_swiglu_quant_v2",
    unpermute: "npu_moe_token_unpermute",
    clipped: "npu_clipped_swiglu",
    quantising: "npu_dynamic_quant",
    norm_quantising: "npu_add_rms_norm_dynamic_quant",
    casting: "npu_format_cast",
    quantised: "npu_quant_matmul",
    quantised_in_nz: "npu_quant_matmul",
    delta_rule: "npu_recurrent_gated_delta_rule",
    read: "index",
    indexed: "index_put_",
    copied: "index_copy_",
}


def with_(**changed: Any) -> Change:
    return lambda call: call.update(changed)


def on(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda call: call.update({name: change(call[name])})


def set_block(block: int) -> Change:
    return lambda call: call["block_table"][0].__setitem__(1, block)


def rows_of_one_request(rows: int) -> Change:
    return lambda call: call.update(
        query=normal(rows, 4, 128).to("npu:0"),
        actual_seq_lengths=[rows],
        actual_seq_lengths_kv=[rows],
        block_table=call["block_table"][:1],
    )


WRONG: list[tuple[str, Callable[[], dict[str, Any]], str, Change]] = [
    ("N1", attention, "lengths as a tensor", on("actual_seq_lengths_kv", lambda it: torch.tensor(it))),
    ("N1", attention, "lengths left out", lambda call: call.pop("actual_seq_lengths")),
    ("N2", attention, "lengths instead of ends", with_(actual_seq_lengths=[3, 16])),
    ("N2", attention, "ends that do not grow", with_(actual_seq_lengths=[19, 19])),
    ("N3", attention, "cumulative KV lengths", with_(actual_seq_lengths_kv=[140, 300])),
    ("N3", draft_attention, "a request without KV", with_(actual_seq_lengths_kv=[140, 0])),
    ("N4", attention, "a padding request in one list only", with_(actual_seq_lengths=[3, 18, 19])),
    ("N4", attention, "block table of int64", on("block_table", Tensor.long)),
    ("N4", attention, "a block row too many", on("block_table", lambda it: torch.cat((it, it[:1])))),
    ("N5", attention, "heads that are not the query's", with_(num_heads=8)),
    ("N5", attention, "a strided query", on("query", lambda it: it.transpose(0, 1).contiguous().transpose(0, 1))),
    ("N5", attention, "heads that do not divide", with_(num_key_value_heads=3)),
    ("N6", attention, "a 4-D cache", on("key", lambda it: it.view(-1, BLOCK, 2, 128))),
    ("N6", attention, "half the width", on("value", lambda it: it[..., :128].contiguous())),
    ("N6", attention, "a strided cache", on("key", lambda it: torch.cat((it, it), -1)[..., :256])),
    ("N7", attention, "float16", lambda call: call.update({n: call[n].half() for n in ("query", "key", "value")})),
    ("N8", lambda: Sequences([3], [9], dim=96).arguments(causal=True), "head size 96", with_()),
    ("N9", attention, "not the cache's block size", with_(block_size=256)),
    ("N9", attention, "no block size", lambda call: call.pop("block_size")),
    ("N10", draft_attention, "a mask in mode 0", with_(atten_mask=new(2048, 2048, dtype=torch.int8))),
    ("N10", attention, "mode 3 without a mask", lambda call: call.pop("atten_mask")),
    ("N10", attention, "a mask of rows by tokens", with_(atten_mask=new(19, 140, dtype=torch.int8))),
    ("N10", attention, "a mask the other way round", on("atten_mask", lambda it: 1 - it)),
    ("N10", attention, "mode 3 with a window", with_(pre_tokens=9)),
    ("N10", sliding, "a window of no token", with_(pre_tokens=-1)),
    ("N10", sliding, "a causal window that looks ahead", with_(next_tokens=1)),
    ("N10", sliding, "mode 4 without tokens", lambda call: call.pop("pre_tokens")),
    ("N11", sliding, "more sliding rows than KV", with_(actual_seq_lengths_kv=[140, 15])),
    ("N11", attention, "more causal rows than KV", with_(actual_seq_lengths_kv=[140, 15])),
    ("N12", draft_attention, "a draft block of 17", rows_of_one_request(17)),
    ("N13", attention, "a block that does not exist", set_block(99)),
    ("N13", attention, "a block below zero", set_block(-1)),
    ("N14", attention, "scale left out", lambda call: call.pop("scale")),
    ("N14", attention, "layout left out", lambda call: call.pop("input_layout")),
    ("N15", write, "cache mode left out", lambda call: call.pop("cache_mode")),
    ("N15", write, "slots of int64", on("slot_mapping", Tensor.long)),
    ("N15", write, "strided rows", on("key", lambda it: torch.cat((it, it), 1)[:, ::2])),
    ("N15", write, "caches as attention sees them", on("key_cache", lambda it: it.view(4, BLOCK, 256))),
    ("N15", write, "rows of another dtype", lambda call: call.update({n: call[n].half() for n in ("key", "value")})),
    ("N16", write, "a slot behind the last block", with_(slot_mapping=ints(1, 2, 4 * BLOCK))),
    ("N16", write, "a slot of -1", with_(slot_mapping=ints(1, 2, -1))),
    ("N16", write, "a slot twice", with_(slot_mapping=ints(1, 2, 1))),
    ("N16", scatter, "a place twice", with_(indices=ints(1, 2, 1)[:, None])),
    ("N17", scatter, "indices of one axis", on("indices", lambda it: it[:, 0])),
    ("N17", scatter, "updates of another shape", on("updates", lambda it: it[:2])),
    ("N18", norm, "gamma of another size", with_(gamma=new(32))),
    ("N18", norm, "gamma of another dtype", on("gamma", Tensor.half)),
    ("N18", add_norm, "a residual in float32", on("x2", Tensor.float)),
    ("N18", add_norm, "gamma in float32 beside a residual", on("gamma", Tensor.float)),
    ("N19", swiglu, "an odd axis", with_(input=new(3, 63))),
    ("N19", swiglu, "a strided input", with_(input=new(64, 3).t())),
    ("N20", rotary, "half a table", on("r1", lambda it: it[..., :64])),
    ("N20", rotary, "a table in float32", on("r1", Tensor.float)),
    ("N20", rotary, "pairs side by side", with_(rotary_mode="interleave")),
    ("N21", rotary_both, "layout left out", lambda call: call.pop("layout")),
    ("N21", rotary_both, "heads of another size", lambda call: call.update(narrow(call))),
    ("N33", gating, "logits in bfloat16", on("x", Tensor.bfloat16)),
    ("N33", gating, "more than there are", with_(k=9)),
    ("N34", routing, "rows by one scale for all", with_(quant_mode=0)),
    ("N34", routing, "rows that are smoothed", with_(quant_mode=1, scale=new(8, 64, dtype=torch.float32))),
    ("N34", routing, "rows in int8 of float32", lambda call: call.update(x=call["x"].float(), quant_mode=1)),
    ("N34", routing, "experts of int64", on("expert_idx", Tensor.long)),
    ("N34", routing, "a row without experts", on("expert_idx", lambda it: it[:2])),
    ("N34", routing, "ends instead of counts", with_(expert_tokens_num_type=0)),
    ("N34", routing, "no counts", lambda call: call.pop("expert_tokens_num_flag")),
    ("N34", routing, "too few active rows", with_(active_num=5)),
    ("N34", routing, "some experts only", with_(active_expert_range=[0, 4])),
    ("N34", routing, "places as the scatter writes them", with_(row_idx_type=1)),
    ("N34", routing, "an expert that does not exist", with_(expert_idx=ints(0, 8, 2, 0, 3, 7).view(3, 2))),
    ("N35", grouped, "a weight as linear takes it", on("weight", lambda it: [it[0].transpose(1, 2).contiguous()])),
    ("N35", grouped, "a strided weight", on("weight", lambda it: [new(3, 32, 64).transpose(1, 2)])),
    ("N35", grouped, "a weight in float32", on("weight", lambda it: [it[0].float()])),
    ("N35", grouped, "counts of int32", on("group_list", Tensor.int)),
    ("N35", grouped, "counts read as ends", with_(group_list_type=0)),
    ("N35", grouped, "counts that leave rows out", with_(group_list=ints(1, 0, 4).long())),
    ("N35", grouped, "one expert", lambda call: call.update(weight=[new(1, 64, 32)], group_list=ints(6).long())),
    ("N35", grouped, "a bias in bfloat16", with_(bias=[new(3, 32)])),
    ("N35", grouped, "a weight that is too wide", with_(weight=[new(3, 64, 65536)])),
    ("N45", grouped_swiglu, "rows in bfloat16", on("x", Tensor.bfloat16)),
    ("N45", grouped_swiglu, "a weight in rows", with_(weight=[new(3, 64, 32, dtype=torch.int8)])),
    ("N45", grouped_swiglu, "a weight as linear takes it", on("weight", lambda it: [it[0].mT])),
    ("N45", grouped_swiglu, "a strided weight", lambda call: call.update(strided_gate_up())),
    ("N45", grouped_swiglu, "two weights", lambda call: call.update(two_gate_ups())),
    ("N45", grouped_swiglu, "strided rows", with_(x=new(64, 6, dtype=torch.int8).t())),
    ("N45", grouped_swiglu, "rows that are too wide", lambda call: call.update(wide_rows())),
    ("N45", grouped_swiglu, "gate and up that are too wide", lambda call: call.update(wide_gate_up())),
    ("N45", grouped_swiglu, "scales in bfloat16", on("weight_scale", lambda it: [it[0].bfloat16()])),
    ("N45", grouped_swiglu, "scales as files have them", on("weight_scale", lambda it: [it[0][..., None]])),
    ("N45", grouped_swiglu, "strided scales", with_(weight_scale=[new(32, 3, dtype=torch.float32).t()])),
    ("N45", grouped_swiglu, "scales of other rows", with_(x_scale=new(5, dtype=torch.float32))),
    ("N45", grouped_swiglu, "counts read as ends", lambda call: call.pop("group_list_type")),
    ("N45", grouped_swiglu, "counts that leave rows out", with_(group_list=ints(1, 0, 4).long())),
    ("N45", grouped_swiglu, "a count below zero", lambda call: call["group_list"].copy_(ints(2, -1, 5))),
    ("N45", grouped_swiglu, "counts of int32", on("group_list", Tensor.int)),
    ("N45", grouped_swiglu, "another dtype in between", with_(dequant_dtype=torch.bfloat16)),
    ("N45", grouped_swiglu, "smoothed rows", with_(smooth_scale=new(3, 16, dtype=torch.float32))),
    ("N36", unpermute, "places of int64", on("sorted_indices", Tensor.long)),
    ("N36", unpermute, "a place twice", with_(sorted_indices=ints(3, 0, 5, 4, 1, 1))),
    ("N36", unpermute, "weights in float32", on("probs", Tensor.float)),
    ("N36", unpermute, "no weights", lambda call: call.pop("probs")),
    ("N37", clipped, "gate and up by turns", lambda call: call.pop("interleaved")),
    ("N37", clipped, "a strided input", with_(x=new(64, 4).t())),
    ("N38", sinks, "no sinks", lambda call: call.pop("learnable_sink")),
    ("N38", sinks, "sinks in float32", on("learnable_sink", Tensor.float)),
    ("N38", sinks, "a sink for each KV head", with_(learnable_sink=new(2))),
    ("N38", wide_sinks, "sinks of heads of 256", with_()),
    ("N40", quantising, "rows in float32", on("input", Tensor.float)),
    ("N40", quantising, "no rows", with_(input=new(0, 64))),
    ("N40", quantising, "rows in four bits", with_(dst_type=torch.quint4x2)),
    ("N40", quantising, "one scale for all rows", with_(quant_mode="pertensor")),
    ("N18", norm_quantising, "a weight in float32", on("gamma", Tensor.float)),
    ("N18", norm_quantising, "a residual of other rows", with_(x2=new(4, 64))),
    ("N43", norm_quantising, "rows in float16", lambda call: call.update(x1=new(3, 64).half())),
    ("N43", norm_quantising, "a smoothed result", with_(smooth_scale1=new(64))),
    ("N43", norm_quantising, "outputs as its default chooses", lambda call: call.pop("output_mask")),
    ("N44", casting, "a weight in bfloat16", on("input", Tensor.bfloat16)),
    ("N44", casting, "a transposed view", on("input", Tensor.t)),
    ("N44", casting, "no whole tiles", with_(input=new(64, 48, dtype=torch.int8))),
    ("N44", casting, "another format", with_(acl_format=2)),
    ("N44", quantised_in_nz, "a weight in NZ as [out, in]", on("x2", Tensor.t)),
    ("N41", quantised, "a weight as linear takes it", on("x2", Tensor.t)),
    ("N41", quantised, "a weight copied in the other order", on("x2", Tensor.contiguous)),
    ("N41", quantised, "rows in bfloat16", on("x1", Tensor.bfloat16)),
    ("N41", quantised, "one column too many", lambda call: call.update(wide_quantised(1, 65536))),
    ("N41", quantised, "one row too many", lambda call: call.update(wide_quantised(65536, 1))),
    ("N41", quantised, "scales as files have them", on("scale", lambda it: it[:, None])),
    ("N41", quantised, "scales in bfloat16", on("scale", Tensor.bfloat16)),
    ("N41", quantised, "one scale for all rows of the weight", on("scale", lambda it: it[:1])),
    ("N41", quantised, "no scales of x", lambda call: call.pop("pertoken_scale")),
    ("N41", quantised, "scales of another x", with_(pertoken_scale=new(4, dtype=torch.float32))),
    ("N41", quantised, "a bias that is scaled too", on("bias", Tensor.int)),
    ("N41", quantised, "an int8 result", lambda call: call.pop("output_dtype")),
    ("N41", quantised, "an offset", with_(offset=new(48, dtype=torch.float32))),
    ("N46", delta_rule, "a state in float32", on("state", Tensor.float)),
    ("N46", delta_rule, "a state as [Dk, Dv]", on("state", lambda it: it.mT.contiguous())),
    ("N46", delta_rule, "a strided state", with_(state=new(5, 4, 32, 16).mT)),
    ("N46", delta_rule, "decays in bfloat16", on("g", Tensor.bfloat16)),
    ("N46", delta_rule, "beta in float32", on("beta", Tensor.float)),
    ("N46", delta_rule, "no decays", lambda call: call.pop("g")),
    ("N46", delta_rule, "no scale", lambda call: call.pop("scale")),
    ("N46", delta_rule, "strided keys", with_(key=new(6, 32, 2).mT)),
    ("N46", delta_rule, "heads that do not divide", lambda call: call.update(three_heads())),
    ("N46", delta_rule, "heads that are too long", lambda call: call.update(long_heads())),
    ("N46", delta_rule, "indices of int64", on("ssm_state_indices", Tensor.long)),
    ("N46", delta_rule, "a state that does not exist", with_(ssm_state_indices=ints(3, 3, 3, 5, 5, 5))),
    ("N46", delta_rule, "a state below zero", with_(ssm_state_indices=ints(3, 3, 3, -1, -1, -1))),
    ("N46", delta_rule, "a state of two sequences", with_(ssm_state_indices=ints(3, 3, 3, 1, 1, 3))),
    ("N46", delta_rule, "lengths that leave rows out", with_(actual_seq_lengths=ints(3, 2))),
    ("N46", delta_rule, "a sequence without rows", with_(actual_seq_lengths=ints(3, 0, 3))),
    ("N46", delta_rule, "a sequence of nine rows", lambda call: call.update(nine_rows())),
    ("N46", delta_rule, "accepted counts", with_(num_accepted_tokens=ints(1, 1))),
    ("N47", indexed, "a view of some columns", on("self", lambda it: it[:, :2])),
    ("N47", indexed, "indices apart", with_(indices=[ints(1, 2).long(), None, ints(0, 1).long()])),
    ("N47", read, "indices apart", with_(indices=[ints(1, 2).long(), None, ints(0, 1).long()])),
    ("N47", copied, "a view of some columns", lambda call: call.update(self=new(4, 9, 4)[:, :5])),
    ("N3", sinks, "more KV than pages", with_(actual_seq_kvlen=[140, 2000])),
    ("N14", sinks, "no scale", lambda call: call.pop("softmax_scale")),
]


def run(make: Callable[[], dict[str, Any]], call: dict[str, Any]) -> None:
    name = (OPERATORS | {wide_sinks: OPERATORS[sinks]}).get(make, "npu_fused_infer_attention_score")
    if name.startswith("npu_"):
        getattr(torch_npu, name)(**call)
    else:
        getattr(torch.ops.aten, name)(*call.values())


@pytest.mark.parametrize(("rule", "make", "what", "spoil"), WRONG, ids=[f"{rule} {what}" for rule, _, what, _ in WRONG])
def test_a_wrong_call_is_caught(numerics, rule, make, what, spoil):
    call = make()
    spoil(call)
    with pytest.raises(ContractError) as caught:
        run(make, call)
    assert caught.value.rule == rule


@pytest.mark.parametrize("make", OPERATORS, ids=lambda make: make.__name__)
def test_a_right_call_passes(numerics: Numerics, make: Callable[[], dict[str, Any]]) -> None:
    run(make, make())


def test_a_prefill_chunk_may_have_more_rows_than_a_block(numerics: Numerics) -> None:
    call = attention()
    rows_of_one_request(17)(call)
    run(attention, call)


def test_a_padding_request_may_have_more_rows_than_a_block(numerics: Numerics) -> None:
    call = draft_attention()
    rows_of_one_request(17)(call)
    call["block_table"].zero_()
    run(draft_attention, call)


def test_a_lifted_rule_is_not_held() -> None:
    with torch.inference_mode(), Numerics(lift=["N7"]):
        Sequences([3], [9], dtype=torch.float32).attend(causal=True)
        with pytest.raises(ContractError, match="N2"):
            Sequences([3], [9], dtype=torch.float32).attend(causal=True, actual_seq_lengths=[2])


def test_every_rule_of_the_contract_has_a_wrong_call() -> None:
    written = re.findall(r"^\| (N\d+) \|.*\| (.+) \|$", Path("docs/npu-contract.md").read_text(), re.MULTILINE)
    assert [rule for rule, _ in written] == [f"N{i + 1}" for i in range(len(written))]
    held = {rule for rule, *_ in WRONG} | {"N22"}
    assert {rule for rule, how in written if how.strip() == "held"} == held
