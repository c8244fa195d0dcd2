"""The schemas of the operators that a backend uses, as read from torch_npu 2.13.0, and how to read a wheel's own.

A wheel is read as a file, without loading it: the registration strings of libtorch_npu.so.
"""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

_LENGTHS = "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None"
_ATTENTION = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    + _LENGTHS
    + ", Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, "
    "Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? block_table=None, "
    "Tensor? query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., "
    "int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', int num_key_value_heads=0, "
    "int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False"
)
_SINKS = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, "
    "Tensor? block_table=None, Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, "
    "Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, "
    "Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, "
    "Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, "
    "float softmax_scale=1., int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, "
    "int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, "
    "int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, "
    "int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, "
    "int? dequant_scale_key_rope_dtype=None, int? out_dtype=None"
)
_PAGED_WRITE = "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "

EXPECTED = [
    f"npu_fused_infer_attention_score({_ATTENTION}) -> (Tensor, Tensor)",
    f"_npu_fused_infer_attention_score_get_max_workspace({_ATTENTION}) -> Tensor",
    "_npu_fused_infer_attention_score_infer_output(Tensor query, Tensor value, *, str input_layout='BSH', "
    "Tensor? quant_scale2=None, Tensor? block_table=None, int num_heads=1, int num_key_value_heads=0, "
    "bool softmax_lse_flag=False, Tensor? query_rope=None) -> (Tensor, Tensor)",
    f"npu_fused_infer_attention_score_v2({_SINKS}) -> (Tensor, Tensor)",
    f"npu_scatter_pa_kv_cache({_PAGED_WRITE}Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
    "Tensor? seq_lens=None, str? cache_mode='PA_NZ') -> ()",
    "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    "npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, str layout='BSND', "
    "str rotary_mode='half') -> (Tensor, Tensor)",
    "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
    "int[]? mrope_section=None, str? rotary_mode='half', str? cache_mode='default') -> (Tensor, Tensor)",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0, "
    "float bias=1.0, bool interleaved=True) -> Tensor",
    "npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
    "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)",
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
    "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
    "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, "
    "Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
    "int? dequant_mode=0, int? dequant_dtype=6, int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0, "
    "int[]? tuning_config=None, int? x_dtype=None, int? weight_dtype=None, int? weight_scale_dtype=None, "
    "int? x_scale_dtype=None) -> (Tensor, Tensor)",
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
    "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None, "
    "str quant_mode='pertoken', float dst_type_max=0.0) -> (Tensor, Tensor)",
    "npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, "
    "Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-06, bool[2]? output_mask=None, "
    "int? y_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) -> Tensor",
    "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
    "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
    "int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
    "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    "npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor",
]
"""One line an operator; the `.out` of attention takes OUT_EXTRAS more."""

IN_THE_IMAGE = {
    "npu_add_rms_norm_dynamic_quant": {
        "bool[2]? output_mask=None": "bool[2] output_mask=[]",
        "int? y_dtype": "ScalarType? y_dtype",
    },
    "npu_grouped_matmul_swiglu_quant_v2": {"int? dequant_dtype=6": "int? dequant_dtype=0"},
}
"""Operator -> how 2.10.0.post4 writes arguments that 2.13.0 writes otherwise. The calls fit both."""

ATTENTION_OUT = "npu_fused_infer_attention_score.out"
OUT_EXTRAS = ("workspace", "out")
"""Further arguments of `.out`."""


def name_of(schema: str) -> str:
    return schema.partition("(")[0]


def registered(operator: Any) -> torch._C.FunctionSchema:
    """The dispatcher's schema of an operator's overload."""
    return operator._schema


def parsed(schema: str) -> torch._C.FunctionSchema:
    """A schema as torch compares it. The dispatcher's own carries `npu::`."""
    return torch._C.parse_schema(schema if schema.startswith("npu::") else f"npu::{schema}")


def registered_in(wheel: Path) -> dict[str, str]:
    """Operator (with its overload) -> schema, of an unpacked torch_npu package or a .whl file."""
    if wheel.suffix == ".whl":
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read("torch_npu/lib/libtorch_npu.so")
    else:
        data = (wheel / "lib" / "libtorch_npu.so").read_bytes()
    texts = (text.decode("latin1") for text in re.findall(rb"\0(_?npu_[\w.]+\([^\0\n]*\) -> [^\0\n]*)(?=\0)", data))
    # Beside the dispatcher's schemas lie the signatures of Python's argument parser; those write SymIntArrayRef.
    return {name_of(text): text for text in texts if "ArrayRef" not in text}
