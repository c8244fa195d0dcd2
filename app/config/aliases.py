"""Flags of vLLM, vllm-ascend, SGLang and llama-server that mean something here, as data, and what their values mean."""

import re
from typing import Any, Literal, NamedTuple

from app.config.settings import flag_name, no_flag_name


class PeerFlag(NamedTuple):
    """Flags of other projects that have one meaning.

    By `kind` the value is passed to a setting ("same"), is a DFlash block, which has one draft fewer ("block"), or is
    absent ("on", "off"). An "only" flag takes some values, which set nothing. A "taken" one changes no text, and the
    log says so. A "refused" one stops the start.
    """

    flags: str  # of a "taken" flag that has a value, the name ends with `=`
    kind: Literal["same", "block", "on", "off", "only", "taken", "refused"]
    means: str = ""  # the setting, or the values of an "only" flag
    note: str = ""  # why

    @property
    def names(self) -> list[str]:
        return self.flags.replace("=", "").split()

    @property
    def field(self) -> str:
        """The setting that is set, or ""."""
        return self.means if self.kind in ("same", "block", "on", "off") else ""

    @property
    def ours(self) -> str:
        """What it is here, in the words of `--help` and docs/migrating.md."""
        if self.field:
            return (no_flag_name if self.kind == "off" else flag_name)(self.field)
        return "refused" if self.kind == "refused" else "nothing to set"

    def nargs(self, name: str) -> int | str | None:
        """Return the number of values of one of the flags, in argparse's terms."""
        if self.kind == "refused":
            return "?"
        return None if self.kind in ("same", "block", "only") or f"{name}=" in self.flags.split() else 0

    def fault(self, name: str, value: Any) -> str:
        """Return why a value given by one of the names is refused, or ""."""
        if self.kind == "refused":
            return f"{name} is refused: {self.note}"
        if self.kind == "only" and value.lower() not in self.means.split():
            return f"{name} {value} is refused: {self.note}"
        if self.kind == "block" and not re.fullmatch(r"[2-9]|[1-9][0-9]{1,8}", value):
            return f"{name} {value}: a block is a number of rows, an anchor and at least one draft"
        return ""

    def read(self, value: Any) -> Any:
        """Return the value for `field`, or what the log says."""
        known = {"on": True, "off": False, "taken": f"nothing to set, {self.note}"}
        return int(value) - 1 if self.kind == "block" else known.get(self.kind, value)


METHODS = "dflash dflash2 dspark"

_PARALLEL = "--pipeline-parallel-size --pp --pp-size -pp --data-parallel-size --dp --dp-size -dp --nnodes"
_ATTENTION = "--attention-backend= --prefill-attention-backend= --decode-attention-backend= --flash-attn= -fa="
_DRAFT = "--speculative-config.attention-backend= --speculative-draft-attention-backend="
_DEVICE = f"{_ATTENTION} {_DRAFT} --sampling-backend= --mamba-scheduler-strategy="
_VERIFY = "--speculative-config.draft-sample-method= --speculative-config.rejection-sample-method="
_CHUNKED = "--enable-chunked-prefill --no-enable-chunked-prefill --enable-mixed-chunk --max-prefill-tokens="
_ALWAYS = "--async-scheduling --disable-overlap-schedule --schedule-policy= --stream-interval= --api-server-count= -cb"
_NEVER = "--disable-custom-all-reduce --swap-space= --max-seq-len-to-capture= --additional-config= --mlock --no-mmap"
_REQUESTS = "--disable-log-requests --no-enable-log-requests --enable-log-requests --log-requests"
_LEVELS = "--compilation-config= --compilation-config.level= --compilation-config.mode= -O= -O0 -O1 -O2 -O3"
_COMPILE = f"{_LEVELS} --enable-torch-compile"
_GRAMMAR = "--structured-outputs-config= --structured-outputs-config.backend= --grammar-backend="
_CONFIG = "--hf-overrides --json-model-override-args --rope-scaling --rope-theta"

PEER_FLAGS = (
    PeerFlag("--model --model-path -m", "same", "model"),
    PeerFlag("--speculative-draft-model-path --model-draft -md --speculative-config.model", "same", "draft_model"),
    PeerFlag("--speculative-draft-window-size --speculative-dflash-draft-window-size", "same", "draft_window"),
    PeerFlag("--alias -a", "same", "served_model_name"),
    PeerFlag("--speculative-algorithm --speculative-config.method", "only", METHODS, f"give one of {METHODS}"),
    PeerFlag("--speculative-config.num-speculative-tokens", "same", "num_speculative_tokens"),
    PeerFlag("--speculative-config.enforce-eager", "same", "draft_enforce_eager"),
    PeerFlag("--speculative-config.draft-tensor-parallel-size", "same", "draft_tensor_parallel_size"),
    PeerFlag(
        "--speculative-num-draft-tokens --speculative-dflash-block-size",
        "block",
        "num_speculative_tokens",
        "the block with its anchor row: 16 here is --num-speculative-tokens 15",
    ),
    PeerFlag("--speculative-num-steps --speculative-eagle-topk", "only", "1", "a block is drafted in one pass"),
    PeerFlag("-sc", "same", "speculative_config"),
    PeerFlag("--gpu-memory-utilization", "same", "memory_utilization"),
    PeerFlag("--mem-fraction-static", "same", "memory_utilization", "SGLang leaves activations out"),
    PeerFlag("--kv-cache-memory-bytes", "same", "kv_cache_memory"),
    PeerFlag("--block-size", "same", "page_size", "tokens of a KV page, not the DFlash block"),
    PeerFlag("--context-length --ctx-size -c", "same", "max_model_len"),
    PeerFlag("--max-running-requests --parallel -np", "same", "max_num_seqs"),
    PeerFlag(
        "--batch-size -b --ubatch-size -ub --chunked-prefill-size",
        "same",
        "max_num_batched_tokens",
        "the smallest if several are given",
    ),
    PeerFlag("--max-queued-requests", "same", "max_queue"),
    PeerFlag("--disable-cuda-graph", "on", "enforce_eager"),
    PeerFlag("--watchdog-timeout", "same", "step_timeout", "SGLang ends; here the engine is started again"),
    PeerFlag("--tp --tp-size -tp", "same", "tensor_parallel_size"),
    PeerFlag("--enable-prefix-caching", "on", "prefix_caching", "the default"),
    PeerFlag("--no-enable-prefix-caching --disable-radix-cache", "off", "prefix_caching"),
    PeerFlag(_PARALLEL, "only", "1", "only 1, because a model is on one host; run replicas behind a router"),
    PeerFlag("--distributed-executor-backend", "only", "mp", "the engine starts its own ranks, like mp"),
    PeerFlag("--kv-cache-dtype -ctk -ctv", "only", "auto", "KV pages have the dtype of --dtype"),
    PeerFlag("--generation-config --load-format --tokenizer-mode", "only", "auto", "the checkpoint decides; give auto"),
    PeerFlag("--sampling-defaults", "only", "model", "defaults are the checkpoint's; give model"),
    PeerFlag("--task --runner", "only", "auto generate", "this server generates text; give generate"),
    PeerFlag(_DEVICE, "taken", note="the device decides"),
    PeerFlag(_VERIFY, "taken", note="a draft stays where it is the target's own choice"),
    PeerFlag("--n-gpu-layers= --gpu-layers= -ngl=", "taken", note="every layer is on --device"),
    PeerFlag(_COMPILE, "taken", note="nothing is compiled by PyTorch; see --enforce-eager"),
    PeerFlag("--cuda-graph-max-bs=", "taken", note="see --max-graphs"),
    PeerFlag(_CHUNKED, "taken", note="steps have --max-num-batched-tokens"),
    PeerFlag(f"{_ALWAYS} {_NEVER}", "taken", note="there is no such choice here"),
    PeerFlag("--trust-remote-code", "taken", note="no code of a checkpoint is ever run"),
    PeerFlag("--enable-auto-tool-choice --enable-reasoning --jinja", "taken", note="the chat template decides"),
    PeerFlag("--limit-mm-per-prompt= --language-model-only", "taken", note="images are never read"),
    PeerFlag(_GRAMMAR, "taken", note="output is not held to grammars"),
    PeerFlag(f"{_REQUESTS} --uvicorn-log-level=", "taken", note="see --log-level and --log-prompts"),
    PeerFlag("--disable-log-stats --enable-metrics --metrics --enable-cache-report", "taken", note="see GET /metrics"),
    PeerFlag("--timeout= -to=", "taken", note="see --request-timeout"),
    PeerFlag("--threads -t --threads-batch -tb", "refused", note="set OMP_NUM_THREADS in the environment"),
    PeerFlag("--max-total-tokens", "refused", note="give the memory of all KV pages as --kv-cache-memory"),
    PeerFlag("--enable-expert-parallel", "refused", note="each expert is split among the ranks; leave it out"),
    PeerFlag("--collect-detailed-traces", "refused", note="spans are of requests; see step_seconds"),
    PeerFlag("--seed --random-seed -s --override-generation-config", "refused", note="send it with each request"),
    PeerFlag("-q", "same", "quantization"),
    PeerFlag("--hf-repo -hf -hfr", "refused", note="GGUF is not read; give the safetensors' repository as MODEL"),
    PeerFlag("--revision", "refused", note="`hf download --revision` fetches it; give that folder as MODEL"),
    PeerFlag("--tokenizer --tokenizer-path", "refused", note="give a MODEL folder that has this tokenizer"),
    PeerFlag("--chat-template --chat-template-file", "refused", note="put it into MODEL as chat_template.jinja"),
    PeerFlag(_CONFIG, "refused", note="write it to config.json in MODEL; RoPE may be scaled by yarn or llama3"),
    PeerFlag("--enable-lora --lora --lora-paths --lora-modules", "refused", note="merge the adapter into the weights"),
    PeerFlag("--ssl-keyfile --ssl-certfile --ssl-ca-certs", "refused", note="a proxy in front of the server ends TLS"),
    PeerFlag("--kv-transfer-config", "refused", note="KV pages stay in their server; leave it out"),
)
