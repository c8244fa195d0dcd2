"""Wishes for an engine, and facts about a loaded one. The standard library alone, like `app.messages`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

BEING_COMPILED = "by operators, and being compiled"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded engine, for the start-up table, /v1/models, /server_info and the checks before admission.

    Without a draft model `draft` is None, `block_size` is 1, and `taps` and `draft_config` are empty. `draft_config` is
    what was read from the draft's config.json, for people.
    A hybrid target has `state_bytes` of recurrent state beside the KV, and `state_cache_bytes` for
    `num_state_checkpoints` of its prefix cache.
    `tensor_parallel_size` processes share each layer. `tuned` are the ways of launches that were timed.
    `forwards` run "by operators", are BEING_COMPILED, or are "compiled".
    """

    target: str
    draft: str | None
    device: str
    dtype: str
    block_size: int
    taps: list[int]
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    draft_config: dict[str, str] = field(default_factory=dict)
    state_bytes: int = 0
    state_cache_bytes: int = 0
    num_state_checkpoints: int = 0
    tensor_parallel_size: int = 1
    tuned: dict[str, str] = field(default_factory=dict)
    forwards: str = "by operators"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the user. The engine chooses those that are None. Folders hold config.json and safetensors.

    Memory is in bytes. `device` is "auto", "cpu", "cuda[:N]" or "npu[:N]"; `dtype` is "auto", "float32", "float16" or
    "bfloat16". `enforce_eager` False captures graphs even on a device that does not profit from them.
    `prefix_caching` shares KV pages of equal prefixes, and `state_cache_memory` is for a hybrid target's states behind
    them. `npu_check` holds every operator call on an NPU to docs/npu-contract.md. `compile` turns a CPU's forwards into
    C++ before the first step, and "auto" while it serves, unless they are kept. `verify` is how many rows of a block
    the target verifies, the anchor included: "full" is all, "auto" as many as pay, 1 the anchor alone.
    With `cache_events` steps tell how the prefix cache changes.
    `tune` "off" launches a GPU's operators, and a CPU's products, by default, without timing other ways.
    With `batch_invariant` no bit of a row depends on the batch, so texts are equal in 16 bits too.
    `tensor_parallel_size` processes share each layer of the target, and of the draft, unless
    `draft_tensor_parallel_size` is 1. While they load, one waits for another `distributed_timeout_seconds` at most.
    """

    target: Path
    draft: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    kv_cache_memory: int | None = None
    state_cache_memory: int | None = None
    memory_utilization: float = 0.9
    enforce_eager: bool | None = None
    draft_enforce_eager: bool = False
    max_graphs: int = 48
    prefix_caching: bool = True
    cache_events: bool = False
    npu_check: bool = False
    compile: bool | Literal["auto"] = False
    verify: str | int = "full"
    tune: Literal["auto", "off"] = "auto"
    batch_invariant: bool = False
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int | None = None
    distributed_timeout_seconds: int = 600
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
