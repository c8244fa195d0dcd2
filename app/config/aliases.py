"""Flags of vLLM, vllm-ascend and SGLang that mean something here, as data, and what their values mean."""

import re
from typing import Any, Literal, NamedTuple

from app.config.error import ConfigError
from app.config.settings import flag_name, no_flag_name


class PeerFlag(NamedTuple):
    """A flag of another project. `field` is the setting it sets here, or None if there is nothing to set.

    `value` says how to read the value: "same" as the setting's own; "block" is a DFlash block, with one draft fewer;
    "on" and "off" take no value; "ignored" takes none and sets nothing; "only" takes only the value `allowed` and sets
    nothing; "refused" stops the start. `note` says why.
    """

    flag: str
    field: str | None
    peers: str
    note: str = ""
    value: Literal["same", "block", "on", "off", "ignored", "only", "refused"] = "same"
    allowed: str = ""

    @property
    def ours(self) -> str | None:
        """Our flag with the same meaning, if there is one."""
        name = no_flag_name if self.value == "off" else flag_name
        return name(self.field) if self.field else None

    @property
    def nargs(self) -> int | str | None:
        """Number of values, in argparse's terms."""
        if self.value == "refused":
            return "?"
        return 0 if self.value in ("on", "off", "ignored") else None

    def read(self, value: Any) -> Any:
        """Return the value for `field`. Raises ConfigError if this server cannot do what is asked."""
        if self.value == "refused":
            raise ConfigError(f"{self.flag} is refused: {self.note}")
        if self.value == "only" and value.upper() != self.allowed:
            raise ConfigError(f"{self.flag} {value} is refused: {self.note}")
        if self.value == "block":
            if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 2:
                raise ConfigError(f"{self.flag} {value}: a block is a number of rows, an anchor and at least one draft")
            return int(value) - 1
        return {"on": True, "off": False}.get(self.value, value)


BLOCK_NOTE = "the block with its anchor row: 16 here is --num-speculative-tokens 15"
REPLICAS_NOTE = "only 1, because a model is on one host; run replicas behind a router"

PEER_FLAGS = (
    PeerFlag("--model", "model", "vLLM"),
    PeerFlag("--model-path", "model", "SGLang"),
    PeerFlag("--speculative-draft-model-path", "draft_model", "SGLang"),
    PeerFlag("--speculative-algorithm", None, "SGLang", "this server decodes with DFLASH only", "only", "DFLASH"),
    PeerFlag("--speculative-dflash-block-size", "num_speculative_tokens", "SGLang", BLOCK_NOTE, "block"),
    PeerFlag("--speculative-num-draft-tokens", "num_speculative_tokens", "SGLang", BLOCK_NOTE, "block"),
    PeerFlag("-sc", "speculative_config", "vLLM"),
    PeerFlag("--gpu-memory-utilization", "memory_utilization", "vLLM"),
    PeerFlag("--mem-fraction-static", "memory_utilization", "SGLang", "there it leaves activations out"),
    PeerFlag("--kv-cache-memory-bytes", "kv_cache_memory", "vLLM"),
    PeerFlag("--block-size", "page_size", "vLLM", "tokens of a KV page, not the DFlash block"),
    PeerFlag("--context-length", "max_model_len", "SGLang"),
    PeerFlag("--max-running-requests", "max_num_seqs", "SGLang"),
    PeerFlag("--max-queued-requests", "max_queue", "SGLang"),
    PeerFlag("--disable-cuda-graph", "enforce_eager", "SGLang", value="on"),
    PeerFlag("--watchdog-timeout", "step_timeout", "SGLang", "there the server ends; here its engine is started again"),
    PeerFlag("--tp", "tensor_parallel_size", "SGLang"),
    PeerFlag("--tp-size", "tensor_parallel_size", "SGLang"),
    PeerFlag("-tp", "tensor_parallel_size", "vLLM"),
    PeerFlag("--pipeline-parallel-size", None, "vLLM, SGLang", REPLICAS_NOTE, "only", "1"),
    PeerFlag("--pp-size", None, "SGLang", REPLICAS_NOTE, "only", "1"),
    PeerFlag("-pp", None, "vLLM", REPLICAS_NOTE, "only", "1"),
    PeerFlag("--data-parallel-size", None, "vLLM, SGLang", REPLICAS_NOTE, "only", "1"),
    PeerFlag("--dp-size", None, "SGLang", REPLICAS_NOTE, "only", "1"),
    PeerFlag("-dp", None, "vLLM", REPLICAS_NOTE, "only", "1"),
    PeerFlag("--nnodes", None, "vLLM, SGLang", REPLICAS_NOTE, "only", "1"),
    PeerFlag("--enable-expert-parallel", None, "vLLM", "each expert is split among the ranks; leave it out", "refused"),
    PeerFlag("--distributed-executor-backend", None, "vLLM", "the engine starts its own ranks, like mp", "only", "MP"),
    PeerFlag("--disable-custom-all-reduce", None, "vLLM, SGLang", "there is none to disable", "ignored"),
    PeerFlag("--enable-prefix-caching", "prefix_caching", "vLLM", "the default", "on"),
    PeerFlag("--no-enable-prefix-caching", "prefix_caching", "vLLM", value="off"),
    PeerFlag("--disable-radix-cache", "prefix_caching", "SGLang", value="off"),
    PeerFlag("--trust-remote-code", None, "vLLM, SGLang", "no code of a checkpoint is ever run", "ignored"),
    PeerFlag("--enable-auto-tool-choice", None, "vLLM", "`tool_choice` of a request decides", "ignored"),
    PeerFlag("--enable-reasoning", None, "vLLM", "see --reasoning-parser", "ignored"),
    PeerFlag("--disable-log-requests", None, "vLLM", "prompts are not logged unless --log-prompts", "ignored"),
    PeerFlag("--collect-detailed-traces", None, "vLLM", "spans are of requests; see step_seconds", "refused"),
    PeerFlag("--attention-backend", None, "vLLM, SGLang", "the device decides it; leave it out", "refused"),
)


SPECULATIVE_CONFIG = {
    "method": None,
    "model": "draft_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "enforce_eager": "draft_enforce_eager",
    "draft_tensor_parallel_size": "draft_tensor_parallel_size",
}
"""Key of vLLM's `--speculative-config` -> our setting. The method must be dflash."""
