"""Settings of an engine. Only the standard library, because the engine runs without pydantic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MODEL, SPECULATION, ENGINE = "model", "speculative decoding", "engine and memory"
CHAT, SERVER, LOGS = "chat", "server", "logs and metrics"


def _setting(group: str, default: Any, help: str, *, metavar: str = "N", **limits: Any) -> Any:
    """Return a dataclass field with its group, metavar and line of `--help`, in the words of pydantic's Field.

    A `help` that ends with the default in brackets says what None means.
    """
    extra = {"group": group, "metavar": metavar}
    return field(default=default, metadata={"description": help, "json_schema_extra": extra, **limits})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the user for one engine, which chooses those that are None. Memory is in bytes.

    `target` and `draft` are folders of config.json and safetensors. A draft's block has `block_size` rows, the anchor
    and its drafts. With `cache_events` each step reports how the prefix cache changes. `enforce_eager` False captures
    graphs even on a device that does not profit from them.
    """

    target: Path
    draft: Path | None = None
    block_size: int | None = None
    cache_events: bool = False

    dtype: str = _setting(
        MODEL,
        "auto",
        "auto | bfloat16 | float16 | float32; auto on a CPU: float32, or a checkpoint's bfloat16 with AVX2 and g++",
        metavar="DTYPE",
    )
    quantization: str = _setting(
        MODEL,
        "auto",
        "auto | int8: the target's weights as they are, or, but for fused experts, rounded to int8",
        metavar="METHOD",
    )
    device: str = _setting(MODEL, "auto", "auto | cpu | cuda | cuda:N | npu | npu:N", metavar="DEVICE")

    verify: str | int = _setting(
        SPECULATION,
        "auto",
        "auto | full | N: rows of a block to verify, with its anchor; auto measures what pays",
        metavar="ROWS",
    )
    draft_head_from: str | None = _setting(
        SPECULATION,
        None,
        "the original of a target whose weights are rotated (QuaRot), for a draft without a head (default: none)",
        metavar="MODEL",
    )
    draft_quantization: str = _setting(
        SPECULATION,
        "auto",
        "auto | none | int8 | fp8: the draft's weights as they are, or rounded, its head too, which changes no text; "
        "auto: in bfloat16 int8 on a CPU, and fp8 on a GPU from Hopper on",
        metavar="METHOD",
    )
    draft_window: int | None = _setting(
        SPECULATION, None, "most tokens that full layers of the draft see (default: all)", gt=0
    )
    draft_enforce_eager: bool = _setting(SPECULATION, False, "run the draft without graphs")
    draft_tensor_parallel_size: int | None = _setting(
        SPECULATION,
        None,
        "processes that share each layer of the draft: 1, or --tensor-parallel-size (default: the latter)",
        gt=0,
    )

    max_model_len: int | None = _setting(
        ENGINE,
        None,
        "longest prompt and answer together, in tokens (default: auto, the model's, or what fits KV memory)",
        gt=0,
    )
    max_num_seqs: int | None = _setting(
        ENGINE,
        None,
        "most sequences in one step (default: 32 on a CPU, 256 on NPU and GPU, 64 on a GPU with a draft)",
        gt=0,
    )
    max_num_batched_tokens: int | None = _setting(
        ENGINE,
        None,
        "most target rows in one step; a CPU's prompts take fewer, as many as fit 0.5 s beside streams (default: 2048, "
        "or 512 more than the blocks of --max-num-seqs have)",
        gt=0,
    )
    page_size: int | None = _setting(
        ENGINE, None, "tokens of a KV page (default: 128 on NPU, 16 elsewhere)", gt=0, le=1024
    )
    kv_cache_memory: int | None = _setting(
        ENGINE,
        None,
        "memory of all KV pages: bytes, or 4GiB, 512MiB, 2G (binary), 2GB (decimal) (default: on a CPU 4GiB, or half "
        "of free memory if that is less; elsewhere the rest of --memory-utilization)",
        metavar="SIZE",
    )
    state_cache_memory: int | None = _setting(
        ENGINE,
        None,
        "memory of Qwen3.5's recurrent states in the prefix cache (default: 2 states for each of --max-num-seqs, in at "
        "most a quarter of free memory)",
        metavar="SIZE",
    )
    mamba_ssm_cache_dtype: Literal["float32", "bfloat16"] = _setting(
        ENGINE,
        "float32",
        "float32 | bfloat16: Qwen3.5's recurrent states; bfloat16 is for an NPU, whose fused operator verifies "
        "blocks of up to 8 rows",
        metavar="DTYPE",
    )
    memory_utilization: float = _setting(
        ENGINE,
        0.9,
        "share of the device's memory to use without --kv-cache-memory",
        metavar="SHARE",
        gt=0,
        le=1,
        allow_inf_nan=False,
    )
    prefix_caching: bool = _setting(ENGINE, True, "reuse the KV pages of prompts that begin alike")
    enforce_eager: bool | None = _setting(ENGINE, None, "run without graphs (default: where a device has none)")
    max_graphs: int = _setting(
        ENGINE, 48, "most graphs of forwards; a step that fits none exactly is padded to the next larger one", gt=0
    )
    prompts_in_graphs: Literal["auto", "off"] = _setting(
        ENGINE,
        "auto",
        "auto | off: run short prompts from graphs on an NPU, unless a trial at startup says otherwise",
        metavar="WHEN",
    )
    tune: Literal["auto", "off"] = _setting(
        ENGINE, "auto", "auto | off: time products of few rows on a CPU at startup", metavar="WHEN"
    )
    batch_invariant: bool = _setting(
        ENGINE, False, "sum in the same order in every batch: no text depends on the batch, but steps are slower"
    )
    tensor_parallel_size: int = _setting(
        ENGINE, 1, "processes on one host that share each layer, each with its device, or all on one CPU", gt=0
    )
    distributed_timeout_seconds: int = _setting(
        ENGINE,
        600,
        "longest time that one of these processes waits for another while they load",
        metavar="SECONDS",
        gt=0,
    )

    log_level: str = _setting(LOGS, "info", "debug | info | warning | error", metavar="LEVEL")
    log_format: Literal["text", "json"] = _setting(LOGS, "text", "text | json, one object per line", metavar="FORMAT")
