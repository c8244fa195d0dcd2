"""CANN's and torch_npu's errors in plain words, with what to do. Imports no torch.

Names of codes are from `rt_error_codes.h` and `NPUErrorCodes.h` in torch_npu's wheel, and from CANN's table of aclnn
return codes. 1xxxxx is the calling program, 2xxxxx resources, 5xxxxx the inside of CANN, the driver or the device.
Causes are from docs/npu-contract.md and from reports about other servers.
"""

import re

_OURS = "report it with the log; --enforce-eager runs without graphs"
_MEMORY = (
    "the device's memory is used up: lower --memory-utilization, --kv-cache-memory, --max-num-seqs or "
    "--max-num-batched-tokens; `npu-smi info` shows who else holds memory"
)
_STREAMS = (
    "no stream, queue or event is left for another graph: lower --max-graphs or give --enforce-eager; a driver older "
    "than HDK 25.5.1 must be updated; of several ranks, HCCL_OP_EXPANSION_MODE=AIV takes the fewest"
)
_RANKS = (
    "a rank did not come to a collective that another waits for: the first error of any rank, above in the log, says "
    "why; the engine process is restarted"
)
_MODE = (
    "collectives beside attention in one graph may be refused in one mode of HCCL: give another "
    "HCCL_OP_EXPANSION_MODE (HOST, AI_CPU; AIV is this server's), or --enforce-eager"
)
_FAULT = (
    "usually a page id, slot or length outside the KV memory; `python -m tools.npu_contract` finds the call. The "
    "engine process is restarted"
)
_DEVICE = "`npu-smi info` and the host's log (dmesg) tell more; the engine process is restarted"

SIGNATURES = {
    r"Alloc sq cq fail": _STREAMS,
    r"EL0009": _STREAMS,
    r"EI0002": _RANKS,
    r"ra init failed": "HCCL cannot start, as where this user has no entry in passwd (its error 19): in a container "
    "run as the image's user, or mount /etc/passwd; `dflash-server check --tensor-parallel-size 2` looks for it",
    r"EI0006": "the devices of two ranks cannot reach each other: see `hccn_tool` and HCCL_IF_IP, and that no other "
    "server uses HCCL's ports (HCCL_IF_BASE_PORT)",
    r"libascend_hal\.so": "the driver's libraries are not found: in a container mount /usr/local/Ascend/driver/lib64; "
    "else put its folders on LD_LIBRARY_PATH",
    r"lib(?:hccl|ascendcl|acl_op_compiler|ge_runner|graph|acl_tdt_channel|opapi|nnopbase)\.so": "CANN's libraries are "
    "not found: install CANN and source its set_env.sh in the shell that starts the server",
    r"undefined symbol": "torch_npu was built for another torch or another CANN than those installed: install a set "
    "that is documented, such as torch 2.10.0, torch_npu 2.10.0.post4 and CANN 9.1.0",
    r"NPU out of memory": _MEMORY,
    r"EL0004": _MEMORY,
}
"""Pattern of an error's text -> meaning, because an error may have no code or a misleading one. The first counts."""

TILING = 561002
MEANINGS = {
    107001: "there is no device of this number: compare --device with ASCEND_RT_VISIBLE_DEVICES",
    107002: f"a thread uses the device without having set it, which is a bug of this server: {_OURS}",
    107003: f"a stream was used with another device's context, which is a bug of this server: {_OURS}",
    107030: f"a graph capture met what it may not hold (a wait, a copy of pageable memory, a size that depends on "
    f"values), which is a bug of this server: {_OURS}",
    107041: "a graph capture met a copy that waits for the device, such as one of pageable memory, which is a bug of "
    f"this server: {_OURS}",
    161001: f"an operator got no tensor where it needs one, which is a bug of this server: {_OURS}",
    161002: f"an operator refused a dtype or shape: {_OURS}",
    207000: "CANN, driver and firmware do not match, or this chip cannot do it: install versions that belong together",
    207001: _MEMORY,
    207004: "the device cannot be used: see `npu-smi info`, and `dflash-server check --device npu`",
    207005: _STREAMS,
    207006: "this user may not use the device: see `dflash-server check --device npu`",
    207007: _STREAMS,
    207008: _STREAMS,
    207018: _MEMORY,
    361001: f"an operator's call of CANN's runtime failed, often for memory: {_MEMORY}",
    507009: f"the device does not support a kind of task: {_MODE}",
    507010: f"the device's task scheduler stopped answering: {_DEVICE}",
    507011: f"a graph, or a task in it, failed on the device: {_FAULT}",
    507014: f"an AI core did not finish in time: {_DEVICE}",
    507015: f"an AI core stopped with an exception: {_FAULT}",
    507034: f"a vector core did not finish in time: {_DEVICE}",
    507035: f"a vector core stopped with an exception: {_FAULT}",
    507048: _RANKS,
    507046: "the device did not finish a stream's work in time, as when a graph waits for an update that never came; "
    "the engine process is restarted; --enforce-eager runs without graphs",
    507047: f"the device did not reach an event in time: {_DEVICE}",
    507053: f"the device's memory failed: {_DEVICE}",
    507054: f"the device's HBM has an error that ECC cannot mend: {_DEVICE}",
    507899: f"the driver failed: {_DEVICE}",
    507901: f"host and device lost their connection: {_DEVICE}",
    507903: f"a graph capture was broken off by an earlier error, which is further up in the log: {_STREAMS}",
    TILING: "an operator's tiling on the host refused shapes, lengths or parameters; `python -m tools.npu_contract` "
    "names the rule of docs/npu-contract.md that was broken; a model whose attention with sinks is refused in a graph "
    "runs without graphs",
    561003: "CANN has no kernel for this operator here: install the ops package of this chip, of the toolkit's version",
    561103: f"CANN met a null pointer while it prepared an operator: {_OURS}",
    561107: "ASCEND_OPP_PATH is not set: source CANN's set_env.sh in the shell that starts the server",
}

FAMILIES = {
    507: "the device or its memory failed; the engine process is restarted",
    561: "CANN could not prepare an operator; its own message is in the log",
}
"""First three digits of a code that MEANINGS lacks -> meaning."""

_CODE = re.compile(r"(?:code|result)\s*(?:is|[=:])?\s*(\d{6})(?!\d)", re.IGNORECASE)


def codes_in(message: str) -> list[int]:
    """Return the codes of CANN's errors in `message`."""
    return [int(digits) for digits in _CODE.findall(message)]


def explain(message: str) -> str | None:
    """Return the meaning of the error in `message`, after its code: "507015: an AI core ...".

    None if the message names no known code or library of CANN.
    """
    for pattern, meaning in SIGNATURES.items():
        if match := re.search(pattern, message, re.IGNORECASE):
            return f"{match.group()}: {meaning}"
    codes = codes_in(message)
    for code in codes:
        if code in MEANINGS:
            return f"{code}: {MEANINGS[code]}"
    for code in codes:
        if code // 1000 in FAMILIES:
            return f"{code}: {FAMILIES[code // 1000]}"
    return None
