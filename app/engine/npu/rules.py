"""Limits of an NPU's operators and graphs. docs/npu-contract.md has the sources."""

MAX_BLOCK_ROWS = 16
MASK_SIZE = 2048
EVERY_TOKEN = 2**31 - 1
PAGE_SIZE = 128
MIN_EXPERTS = 2
MAX_TOP_K = 1024
MAX_AXIS = 65535
"""Length of an axis of a weight in a grouped or quantised product."""
MAX_GATED_AXIS = 10240
"""Length of gate and up together in the product of experts that is fused with their SwiGLU."""
NZ = 29
"""Number of CANN's format FRACTAL_NZ, in tiles of 16 x 32 numbers of int8."""
NZ_TILE = 32
MAX_DELTA_ROWS = 8
"""Rows of a sequence in a call of the recurrent operator."""
MAX_DELTA_SIZE = 256
"""Its heads, and their sizes."""
HEAD_DIMS = (64, 128, 256)
ROTARY_PAIR_DIMS = (64, 128)
"""Head sizes whose q and k one call rotates."""
EXPANSION_MODE = "HCCL_OP_EXPANSION_MODE"
"""Variable that says who unrolls a collective's tasks. CANN's default is the host on A2 and AI_CPU on A3 (CANN 8.5,
envref_07_0096)."""
AIV = "AIV"
"""The device's vector cores, which all recipes of vllm-ascend give."""
GRAPH_STREAMS = 1800
"""Streams for graphs. A device has 2048, and vllm-ascend keeps 248 of them for the rest (its issue 9564)."""
OTHER_GRAPH_BYTES = 1 << 27
"""Kept for graphs in addition to attention's workspace: a guess, which the log of a start shows right or wrong."""
NO_GRAPHS = {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "1"}
"""Variables with a value that forbids captures: torch_npu's capture_begin refuses the first, and a wait after every
operator is refused in a capture (107030)."""
DRAW_GRAPHS = 6
"""Graphs of draws that follow one of the target on a single NPU."""
MAX_UNROLLED = 16
"""Ranks up to which each one more takes a stream of a graph where AI_CPU unrolls (vllm-ascend's issue 9596)."""
