"""What parts of a report are expected to find. NONE OF IT WAS MEASURED WITH THIS SERVER. Imports no torch.

Figures of an NPU are of other servers' reports, which are named, or of a model of a step of Qwen3-8B in bfloat16 on one
910B3, good to 20 %: 1.3 TB/s are read, 160 TFLOP/s multiplied, and a task takes 3 us beside. Those of a GPU are of a
model of an H200, from bytes, launches and rows; of products, a script measured kernels like these on one.
"""

MODEL = "by the model of a step"

EXPECTED = {
    "open_points": {
        "combination": "torch 2.10.0, torch_npu 2.10.0.post4, CANN 9.1.0, a driver from 25.5.1 on",
        "head size 256": "right, from CANN 9.0 on",
        "partly filled pages": "right",
        "more than 16 rows": "right: CANN's source limits another kernel",
        "a chunk in a graph": "right: no length enters the workspace in CANN's source",
        "sinks in a graph": "right, or 561002 by a tiling of 2026: targets with sinks then run without graphs",
        "recurrent states in bfloat16": "right, and less than composition: 28 launches for 43",
        "replays in a row": "right",
        "updates of a graph": "184 us each by torch_npu's own pass (vllm-ascend's issue 13058, 910B3), ours fewer",
        "captures": "all",
    },
    "engine": {
        "plain against the CPU": "the texts but for near ties",
        "eager against the CPU": "the texts but for near ties, the acceptance length within 5 %",
        "graphs against the CPU": "the texts but for near ties, the acceptance length within 5 %",
        "plain against eager": "the texts but for near ties",
        "graphs against eager": "the same texts",
    },
    "pair": {
        "eager": "the texts of plain decoding but for near ties; on GSM8K an acceptance length of 5.5 or more, with "
        "Qwen3-8B and blocks of 16 rows",
        "graphs": "the texts of eager code but for near ties; no 507046",
    },
    "server": {
        "plain": f"74 tok/s at 1 and 770 at 16, {MODEL}",
        "dflash": f"at 16 above 1,348 (vllm-ascend's pull request 8516; 1,554 in 11895), and 1,850 {MODEL}, all with "
        "5.25 tokens accepted a step and answers of 1,500 tokens",
    },
    "costs": {
        "strided norms": "0 us, or two hidden copies",
        "gap between tasks": f"3 us, {MODEL}",
        "tasks of a layer": f"0.6 ms for 16 sequences of 9 rows, {MODEL}, and less where weights stay in a cache",
        "W8A8 products in NZ": "10 to 20 % below ND, a guess; vllm-ascend keeps int8 weights so",
        "W8A8 experts": "fewer us fused; by the operator's first version vllm-ascend's pull request 2275 served "
        "Qwen3-235B-A22B 7 to 27 % faster",
        "window": "below 0.01",
        "prediction": f"1,850 tok/s {MODEL}; vllm-ascend published 1,249 (PIECEWISE) and 1,348 (FULL_DECODE_ONLY)",
    },
    "roofline": {
        "copy": f"1,300 GB/s of reading alone, {MODEL}",
        "matmul": f"160 TFLOP/s at best, {MODEL}",
    },
    "collectives": {
        "2 ranks": "the bits of a row do not depend on the other rows",
        "2 ranks, attention in the graph": "taken; vllm-ascend's issue 13688 met 507009 on an A3 with CANN 9.0.0",
    },
}
"""Section -> part -> expectation on an NPU."""

_STEADY = "tok/s at the mean length"
FIGURES: dict[str, dict[str, float]] = {
    "qwen3.8-27b-fp8, prompts": {"512 tokens, ms": 45, "8192 tokens, ms": 650},
    "qwen3.8-27b-fp8, plain at 1": {_STEADY: 110},
    "qwen3.8-27b-fp8, full blocks at 1": {_STEADY: 461},
    "qwen3.8-27b-fp8, full blocks at 8": {_STEADY: 3190},
    "qwen3.8-27b-fp8, full blocks at 32": {_STEADY: 5620},
    "qwen3-8b, plain at 1": {_STEADY: 214},
    "qwen3-8b, plain at 32": {_STEADY: 5315},
    "qwen3-8b, full blocks at 1": {_STEADY: 1094},
    "qwen3-8b-fp8, full blocks at 1": {_STEADY: 1445},
    "qwen3-8b-fp8, full blocks at 8": {_STEADY: 10180},
    "qwen3-30b-a3b-fp8, plain at 1": {_STEADY: 337},
    "qwen3-30b-a3b-fp8, full blocks at 1": {_STEADY: 715},
    "gpt-oss-20b, plain at 1": {_STEADY: 453},
    "gpt-oss-20b, full blocks at 1": {_STEADY: 753},
    "products of qwen3-8b in e4m3": {
        f"ratio at {rows}": ratio
        for rows, ratio in {1: 1.72, 16: 1.67, 32: 1.57, 64: 1.76, 128: 1.37, 256: 1.16, 512: 1.19}.items()
    },
    "products of qwen3.8-27b in e4m3": {
        f"ratio at {rows}": ratio
        for rows, ratio in {1: 1.81, 16: 1.80, 32: 1.57, 64: 1.92, 128: 1.27, 256: 1.02, 512: 0.99}.items()
    },
}
"""Part -> figure -> value on a GPU. A ratio is the time of a layer's products in 16 bits over e4m3's, by rows. Above 64
rows K was not split."""
