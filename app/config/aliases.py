"""Flags of vLLM, vllm-ascend, SGLang and llama-server that mean something here, as data, and what their values mean."""

import json
import re
from typing import Any, Literal, NamedTuple

from app.config.settings import flag_name, no_flag_name


class PeerFlag(NamedTuple):
    """Flags of other projects that have one meaning.

    By `kind` the value is passed to a setting ("same"), is a DFlash block, which has one draft fewer ("block"), is a
    default of sampling ("sampling"), or is absent ("on", "off"). An "only" flag takes some values, which set nothing. A
    "taken" one changes no text, and the log says so. A "refused" one stops the start.
    """

    flags: str  # of a "taken" flag that has a value, the name ends with `=`, and with several values with `=+`
    kind: Literal["same", "block", "sampling", "on", "off", "only", "taken", "refused"]
    means: str = ""  # the setting, the parameter of sampling, or the values of an "only" flag
    note: str = ""  # why

    @property
    def names(self) -> list[str]:
        return re.sub(r"=\+?", "", self.flags).split()

    @property
    def field(self) -> str:
        """The setting that is set, or ""."""
        if self.kind == "sampling":
            return "override_generation_config"
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
        if f"{name}=+" in self.flags.split():
            return "+"
        return None if self.kind in ("same", "block", "sampling", "only") or f"{name}=" in self.flags.split() else 0

    def fault(self, name: str, value: Any) -> str:
        """Return why a value given by one of the names is refused, or ""."""
        if self.kind == "refused":
            return f"{name} is refused: {self.note}"
        if self.kind == "only" and value.lower() not in self.means.split():
            return f"{name} {value} is refused: {self.note}"
        if self.kind == "block" and not re.fullmatch(r"[2-9]|[1-9][0-9]{1,8}", value):
            return f"{name} {value}: a block is a number of rows, an anchor and at least one draft"
        if self.kind == "sampling" and not re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", value):
            return f"{name} {value}: a number is wanted"
        return ""

    def read(self, value: Any) -> Any:
        """Return the value for `field`, or what the log says."""
        known = {"on": True, "off": False, "taken": f"nothing to set, {self.note}"}
        if self.kind == "sampling":
            return {self.means: json.loads(value)}
        return int(value) - 1 if self.kind == "block" else known.get(self.kind, value)


METHODS = "dflash dflash2 dspark"
_SPEC_TYPES = "draft-dflash draft-dspark"

_PARALLEL = (
    "--pipeline-parallel-size --pp --pp-size -pp --data-parallel-size --dp --dp-size -dp --data-parallel-size-local "
    "-dpl --nnodes --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp "
    "--attention-context-parallel-size --attn-cp-size --moe-data-parallel-size --moe-dp-size"
)
_HOSTS = (
    "--headless --grpc-mode --data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb "
    "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-hybrid-lb --data-parallel-external-lb "
    "--enable-dp-attention --enable-dp-lm-head --rpc"
)
_ONE_HOST = "--dist-init-addr= --nccl-init-addr= --master-addr= --master-port= --nccl-port= --load-balance-method="
_PEER_TO_PEER = (
    "--disable-custom-all-reduce --enable-p2p-check --enable-mscclpp --enable-nccl-nvls --enable-symm-mem "
    "--enable-torch-symm-mem --enable-flashinfer-allreduce-fusion --numa-node=+ --ray-workers-use-nsight"
)
_EXPERTS = "--enable-expert-parallel --enable-eplb --eplb-config --moe-a2a-backend --all2all-backend"
_ATTENTION = (
    "--attention-backend= --prefill-attention-backend= --decode-attention-backend= --flash-attn= -fa= "
    "--attention-config= --kernel-config= --disable-cascade-attn --no-disable-cascade-attn --linear-attn-backend= "
    "--gdn-prefill-backend="
)
_DRAFT = (
    "--speculative-config.attention-backend= --speculative-config.moe-backend= --speculative-draft-attention-backend= "
    "--speculative-attention-mode= --speculative-moe-runner-backend= --speculative-moe-a2a-backend="
)
_PRODUCTS = (
    "--moe-backend= --moe-runner-backend= --fp8-gemm-backend= --fp4-gemm-backend= --mamba-backend= "
    "--disable-flashinfer-autotune --enable-flashinfer-autotune --disable-shared-experts-fusion"
)
_DEVICE = f"{_ATTENTION} {_DRAFT} {_PRODUCTS} --sampling-backend= --mamba-scheduler-strategy="
_VERIFY = (
    "--speculative-config.draft-sample-method= --speculative-config.rejection-sample-method= --spec-draft-sampling="
)
_HOW_MANY = (
    "--speculative-config.enable-adaptive-verification= --speculative-config.disable-by-batch-size= "
    "--spec-draft-n-min= --draft-min= --draft-n-min= --spec-draft-p-min= --draft-p-min= --spec-draft-p-split= "
    "--draft-p-split="
)
_DRAFTER = (
    "--speculative-config.parallel-drafting= --speculative-config.disable-padded-drafter-batch= "
    "--speculative-config.disable-logprobs= --speculative-config.max-model-len="
)
_CHUNKED = "--enable-chunked-prefill --no-enable-chunked-prefill --enable-mixed-chunk --max-prefill-tokens="
_ALWAYS = (
    "--async-scheduling --no-async-scheduling --disable-overlap-schedule --schedule-policy= --stream-interval= "
    "--api-server-count= -asc= -cb --cont-batching --disable-frontend-multiprocessing --tokenizer-worker-num= "
    "--renderer-num-workers= --num-scheduler-steps= --num-continuous-decode-steps= --num-lookahead-slots= "
    "--scheduler-delay-factor= --schedule-conservativeness= --prefill-max-requests= --enable-two-batch-overlap "
    "--enable-single-batch-overlap --enable-dbo --enable-tokenizer-batch-encode --incremental-streaming-output "
    "--stream-output --sleep-on-idle --performance-mode= --threads-http= --slot-prompt-similarity= -sps="
)
_NEVER = (
    "--swap-space= --max-seq-len-to-capture= --additional-config= --mlock --no-mmap --mmap --use-v2-block-manager "
    "--preemption-mode= --max-parallel-loading-workers= --defrag-thold= -dt= --swa-full --no-context-shift --keep= "
    "--fit= -fit= --repack --no-repack -nr --check-tensors --no-perf --perf --escape --no-escape -e --kv-unified -kvu "
    "--no-kv-unified --cache-idle-slots --no-cache-idle-slots --kv-offload -kvo --spm-infill "
    "--fail-on-environ-validation --soft-watchdog-timeout= --sse-ping-interval= --tags= --weight-version="
)
_PREFILL_QUEUE = "--max-num-partial-prefills= --max-long-partial-prefills= --long-prefill-token-threshold="
_CACHE = "--prefix-caching-hash-algo= --cache-reuse= --disable-chunked-prefix-cache --kv-sharing-fast-prefill"
_WARM = "--skip-server-warmup --warmups= --warmup --no-warmup"
_STATES = "--mamba-block-size= --mamba-cache-mode= --mamba-track-interval= --mamba-full-memory-ratio="
_CHECKPOINTS = "--ctx-checkpoints= -ctxcp= --swa-checkpoints= --checkpoint-min-step= -cms= --cache-ram= -cram="
_WINDOWS = "--swa-full-tokens-ratio= --disable-hybrid-swa-memory --disable-hybrid-kv-cache-manager"
_FILES = (
    "--safetensors-load-strategy= --model-loader-extra-config= --use-tqdm-on-load --no-use-tqdm-on-load "
    "--ignore-patterns= --load-mode= -lm= --direct-io -dio"
)
_REQUESTS = (
    "--disable-log-requests --no-enable-log-requests --no-disable-log-requests --enable-log-requests --log-requests "
    "--log-requests-level= --log-requests-format= --log-requests-target=+ --max-log-len= --log-level-http= "
    "--disable-uvicorn-access-log --uvicorn-access-log-exclude-prefixes=+ --disable-access-log-for-endpoints= "
    "--log-error-stack --aggregate-engine-logging --log-disable --verbose -v --log-verbose --verbosity= -lv= "
    "--log-verbosity= --log-colors= --log-prefix --log-timestamps --decode-log-interval= --show-time-cost "
    "--enable-request-time-stats-logging"
)
_METRICS = (
    "--disable-log-stats --enable-metrics --metrics --enable-cache-report --enable-prompt-tokens-details "
    "--enable-server-load-tracking --enable-metrics-for-all-schedulers --enable-mfu-metrics --kv-cache-metrics "
    "--cudagraph-metrics --show-hidden-metrics-for-version= --collect-tokens-histogram "
    "--bucket-time-to-first-token=+ --bucket-inter-token-latency=+ --bucket-e2e-request-latency=+ --slots --no-slots "
    "--props --enable-trace"
)
_HEADERS = "--enable-request-id-headers --allowed-methods= --allowed-headers= --cors-methods= --cors-headers="
_PAGES = "--ui --no-ui --webui --no-webui --disable-fastapi-docs --enable-offline-docs"
_LEVELS = (
    "--compilation-config= -cc= --compilation-config.level= --compilation-config.mode= "
    "--compilation-config.cudagraph-mode= -O= -O0 -O1 -O2 -O3 --optimization-level= --torch-compile-max-bs="
)
_COMPILE = f"{_LEVELS} --enable-torch-compile"
_GRAPHS = (
    "--cuda-graph-max-bs= --cuda-graph-bs=+ --cudagraph-capture-sizes=+ --max-cudagraph-capture-size= "
    "--disable-cuda-graph-padding --disable-piecewise-cuda-graph --piecewise-cuda-graph-max-tokens= "
    "--piecewise-cuda-graph-tokens=+"
)
_GRAMMAR = (
    "--structured-outputs-config= --structured-outputs-config.backend= --grammar-backend= --guided-decoding-backend= "
    "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace "
    "--guided-decoding-disable-additional-properties --constrained-json-whitespace-pattern= "
    "--constrained-json-disable-any-whitespace"
)
_LOGPROBS = "--max-logprobs= --logprobs-mode= --return-tokens-as-token-ids"
_IMAGES = (
    "--limit-mm-per-prompt= --language-model-only --media-io-kwargs= --mm-processor-kwargs= --mm-processor-cache-gb= "
    "--mm-processor-cache-type= --mm-encoder-tp-mode= --mm-encoder-attn-backend= --mm-attention-backend= "
    "--skip-mm-profiling --interleave-mm-strings --disable-mm-preprocessor-cache --disable-chunked-mm-input "
    "--enable-multimodal --keep-mm-feature-on-device --disable-fast-image-processor --allowed-local-media-path= "
    "--allowed-media-domains= --mmproj= -mm= --mmproj-url= -mmu= --no-mmproj --no-mmproj-offload "
    "--image-min-tokens= --image-max-tokens= --media-path="
)
_CODE = "--trust-remote-code --no-trust-remote-code --code-revision="
_CHAT = (
    "--enable-auto-tool-choice --enable-reasoning --jinja --chat-template-content-format= "
    "--exclude-tools-when-tool-choice-none --trust-request-chat-template"
)
_LAYERS = (
    "--n-gpu-layers= --gpu-layers= -ngl= --gpu-layers-draft= --n-gpu-layers-draft= -ngld= --spec-draft-ngl= "
    "--spec-draft-device= --device-draft= -devd= --op-offload --no-op-offload"
)
_THREADS = (
    "--threads -t --threads-batch -tb --threads-draft -td --threads-batch-draft -tbd --spec-draft-threads "
    "--spec-draft-threads-batch"
)
_AFFINITY = (
    "--cpu-mask -C --cpu-range -Cr --cpu-strict --cpu-mask-batch -Cb --cpu-range-batch -Crb --cpu-strict-batch --numa "
    "--prio --prio-batch --poll --poll-batch"
)
_OFFLOAD = (
    "--no-kv-offload -nkvo --override-tensor -ot --cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn "
    "--enable-hierarchical-cache --hicache-ratio --hicache-size --kv-offloading-size --kv-offloading-backend "
    "--enable-memory-saver --enable-weights-cpu-backup"
)
_ELSEWHERE = "--model-url -mu --docker-repo -dr --models-dir --models-preset --models-max"
_CONFIG = (
    "--hf-overrides --json-model-override-args --rope-scaling --rope-theta --hf-config-path --rope-scale "
    "--rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow "
    "--yarn-beta-fast"
)
_SAMPLERS = (
    "--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical "
    "--typical-p --repeat-last-n --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n "
    "--dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent"
)
_PER_REQUEST = (
    "--presence-penalty --frequency-penalty --ignore-eos --logit-bias -l --reverse-prompt --special -sp "
    "--enable-force-include-usage --prefill-assistant --no-prefill-assistant"
)
_GRAMMARS = "--grammar --grammar-file --json-schema -j --json-schema-file -jf"
_LORA = (
    "--enable-lora --lora --lora-paths --lora-modules --lora-scaled --max-loras --max-lora-rank --max-cpu-loras "
    "--lora-target-modules --max-loras-per-batch --lora-backend --enable-prompt-adapter --prompt-adapters"
)
_TLS = (
    "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --enable-ssl-refresh --ssl-key-file --ssl-cert-file "
    "--ssl-keyfile-password"
)
_TRANSFER = (
    "--kv-transfer-config --ec-transfer-config --disaggregation-mode --disaggregation-transfer-backend "
    "--disaggregation-bootstrap-port --disaggregation-ib-device --slot-save-path --lookup-cache-static -lcs "
    "--lookup-cache-dynamic -lcd"
)
_OTHER_TASKS = (
    "--embedding --embeddings --rerank --reranking --pooling --is-embedding --pooler-config --override-pooler-config "
    "--skip-tokenizer-init --enable-prompt-embeds"
)
_PLUGINS = (
    "--middleware --tool-parser-plugin --reasoning-parser-plugin --logits-processors --logits-processor-pattern "
    "--worker-cls --worker-extension-cls --scheduler-cls --io-processor-plugin --enable-custom-logit-processor"
)
_TOOLS = "--tool-server --tools --agent --mcp-servers-config --mcp-servers-json"
_ENDPOINTS = "--enable-sleep-mode --sleep-idle-seconds --profiler-config --enable-tokenizer-info-endpoint --uds"
_SECRET_LOGS = (
    "--enable-log-outputs --enable-log-deltas --log-prompts-dir --crash-dump-folder --log-file --log-config-file"
)
_SPLIT = "--split-mode -sm --tensor-split -ts"
_N_GRAMS = (
    "--spec-default --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --speculative-token-map"
)
_QUANTISED = "--torchao-config --modelopt-quant --quantization-param-path"

PEER_FLAGS = (
    PeerFlag("--model --model-path -m", "same", "model"),
    PeerFlag("--hf-repo -hf -hfr", "same", "model", "of several files one is chosen by REPO:QUANT, and none by itself"),
    PeerFlag("-hff", "same", "hf_file"),
    PeerFlag(
        "--speculative-draft-model-path --speculative-draft-model --model-draft -md --spec-draft-model "
        "--speculative-config.model",
        "same",
        "draft_model",
    ),
    PeerFlag("--speculative-draft-model-revision --speculative-config.revision", "same", "draft_revision"),
    PeerFlag("--tokenizer-path", "same", "tokenizer"),
    PeerFlag("--speculative-draft-window-size --speculative-dflash-draft-window-size", "same", "draft_window"),
    PeerFlag("--alias -a", "same", "served_model_name"),
    PeerFlag("--chat-template-file", "same", "chat_template"),
    PeerFlag("--speculative-algorithm --speculative-config.method", "only", METHODS, f"give one of {METHODS}"),
    PeerFlag("--spec-type", "only", f"{_SPEC_TYPES} {METHODS}", f"give one of {_SPEC_TYPES}"),
    PeerFlag("--speculative-config.num-speculative-tokens", "same", "num_speculative_tokens"),
    PeerFlag("--spec-draft-n-max --draft-max --draft --draft-n", "same", "num_speculative_tokens"),
    PeerFlag("--speculative-config.enforce-eager", "same", "draft_enforce_eager"),
    PeerFlag("--speculative-draft-model-quantization --speculative-config.quantization", "same", "draft_quantization"),
    PeerFlag("--speculative-config.draft-tensor-parallel-size", "same", "draft_tensor_parallel_size"),
    PeerFlag(
        "--speculative-num-draft-tokens --speculative-dflash-block-size",
        "block",
        "num_speculative_tokens",
        "the block with its anchor row: 16 here is --num-speculative-tokens 15",
    ),
    PeerFlag("--speculative-num-steps --speculative-eagle-topk", "only", "1", "a block is drafted in one pass"),
    PeerFlag(
        "--speculative-accept-threshold-single --speculative-accept-threshold-acc",
        "only",
        "1 1.0",
        "a draft stays only where it is the target's own choice; give 1",
    ),
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
    PeerFlag("--dist-timeout", "same", "distributed_timeout_seconds"),
    PeerFlag("--tp --tp-size -tp", "same", "tensor_parallel_size"),
    PeerFlag("--enable-prefix-caching --cache-prompt", "on", "prefix_caching", "the default"),
    PeerFlag("--no-enable-prefix-caching --disable-radix-cache --no-cache-prompt", "off", "prefix_caching"),
    PeerFlag("--enable-deterministic-inference", "on", "batch_invariant"),
    PeerFlag("--random-seed -s", "same", "seed"),
    PeerFlag("--sampling-defaults", "same", "generation_config", "model is auto here, and openai is vllm"),
    PeerFlag("--preferred-sampling-params", "same", "override_generation_config"),
    PeerFlag("--temp --temperature", "sampling", "temperature", "the key temperature, and so on below"),
    PeerFlag("--top-k", "sampling", "top_k"),
    PeerFlag("--top-p", "sampling", "top_p"),
    PeerFlag("--min-p", "sampling", "min_p"),
    PeerFlag("--repeat-penalty", "sampling", "repetition_penalty", "of all tokens before, not of the last 64"),
    PeerFlag("--predict --n-predict", "sampling", "max_new_tokens"),
    PeerFlag("--chat-template-kwargs", "same", "default_chat_template_kwargs"),
    PeerFlag("--fastapi-root-path --api-prefix", "same", "root_path"),
    PeerFlag("--admin-api-key", "same", "admin_key"),
    PeerFlag("-dev", "same", "device"),
    PeerFlag("-q", "same", "quantization"),
    PeerFlag(_PARALLEL, "only", "1", "only 1, because a model is on one host; run replicas behind a router"),
    PeerFlag("--node-rank", "only", "0", "only 0, because a model is on one host; run replicas behind a router"),
    PeerFlag("--expert-parallel-size --ep-size --ep", "only", "1", "each expert is split among the ranks; give 1"),
    PeerFlag("--base-gpu-id", "only", "0", "ranks have the devices from 0, and --device cuda:N is another one; give 0"),
    PeerFlag("--gpu-id-step", "only", "1", "ranks have neighbouring devices; CUDA_VISIBLE_DEVICES chooses; give 1"),
    PeerFlag("--distributed-executor-backend", "only", "mp", "the engine starts its own ranks, like mp"),
    PeerFlag(
        "--kv-cache-dtype -ctk -ctv --cache-type-k --cache-type-v -ctkd -ctvd --cache-type-k-draft "
        "--cache-type-v-draft --spec-draft-type-k --spec-draft-type-v",
        "only",
        "auto",
        "KV pages have the dtype of --dtype; give auto",
    ),
    PeerFlag("--mamba-ssm-dtype", "same", "mamba_ssm_cache_dtype"),
    PeerFlag(
        "--mamba-cache-dtype", "only", "auto float32", "rows keep the dtype of --dtype, and states float32; give auto"
    ),
    PeerFlag(
        "--load-format", "only", "auto safetensors fastsafetensors gguf", "safetensors or GGUF are loaded; give auto"
    ),
    PeerFlag("--tokenizer-mode", "only", "auto", "tokenizer.json is read; give auto"),
    PeerFlag("--config-format", "only", "auto hf", "config.json is read; give auto"),
    PeerFlag("--model-impl", "only", "auto vllm sglang", "models are this server's own; give auto"),
    PeerFlag("--task --runner", "only", "auto generate", "this server generates text; give generate"),
    PeerFlag("--convert", "only", "auto none", "this server generates text; give none"),
    PeerFlag("--response-role", "only", "assistant", "answers are the assistant's; give assistant"),
    PeerFlag("--scheduling-policy", "only", "fcfs", "requests are served in the order of their arrival; give fcfs"),
    PeerFlag("--radix-eviction-policy", "only", "lru", "pages used least recently are evicted; give lru"),
    PeerFlag("--cpu-offload-gb", "only", "0 0.0", "weights are in the memory of one device; give 0"),
    PeerFlag(
        "--reasoning-format",
        "only",
        "auto deepseek",
        "reasoning is in reasoning_content; for none give --reasoning-parser none",
    ),
    PeerFlag(
        "--reasoning -rea",
        "only",
        "auto on",
        """to turn it off give --default-chat-template-kwargs '{"enable_thinking": false}'""",
    ),
    PeerFlag(
        "--reasoning-budget",
        "only",
        "-1",
        """for 0 give --default-chat-template-kwargs '{"enable_thinking": false}'; other budgets are not kept""",
    ),
    PeerFlag(
        "--reasoning-effort",
        "only",
        "default",
        """give --default-chat-template-kwargs '{"reasoning_effort": "low"}'""",
    ),
    PeerFlag(_DEVICE, "taken", note="the device decides"),
    PeerFlag(_VERIFY, "taken", note="a draft stays where it is the target's own choice"),
    PeerFlag(_HOW_MANY, "taken", note="--verify auto, the default, chooses how many drafts count"),
    PeerFlag(_DRAFTER, "taken", note="a draft has the target's context, and drafts in one pass"),
    PeerFlag(_LAYERS, "taken", note="every layer is on --device"),
    PeerFlag(_COMPILE, "taken", note="nothing is compiled by PyTorch; see --enforce-eager"),
    PeerFlag(_GRAPHS, "taken", note="see --max-graphs"),
    PeerFlag(_CHUNKED, "taken", note="steps have --max-num-batched-tokens"),
    PeerFlag(_PREFILL_QUEUE, "taken", note="prompts share the steps in the order of their arrival"),
    PeerFlag(f"{_ALWAYS} {_NEVER}", "taken", note="there is no such choice here"),
    PeerFlag(f"{_ONE_HOST} {_PEER_TO_PEER}", "taken", note="ranks are on one host and find one another"),
    PeerFlag(_CACHE, "taken", note="whole pages are found by SHA-256; see --prefix-caching"),
    PeerFlag(f"{_STATES} {_CHECKPOINTS}", "taken", note="see --state-cache-memory and --kv-cache-memory"),
    PeerFlag(_WINDOWS, "taken", note="windows are the checkpoint's"),
    PeerFlag("--calculate-kv-scales", "taken", note="KV pages have the dtype of --dtype"),
    PeerFlag(_WARM, "taken", note="a start always runs a request and times steps"),
    PeerFlag(_FILES, "taken", note="safetensors are mapped into memory"),
    PeerFlag(_CODE, "taken", note="no code of a checkpoint is ever run"),
    PeerFlag(_CHAT, "taken", note="the chat template decides"),
    PeerFlag(_IMAGES, "taken", note="images are never read"),
    PeerFlag(_GRAMMAR, "taken", note="output is not held to grammars"),
    PeerFlag(_LOGPROBS, "taken", note="log probabilities are refused per request"),
    PeerFlag(f"{_REQUESTS} --uvicorn-log-level=", "taken", note="see --log-level and --log-prompts"),
    PeerFlag(_METRICS, "taken", note="see GET /metrics"),
    PeerFlag(_HEADERS, "taken", note="X-Request-Id is always returned; see --allowed-origins"),
    PeerFlag(_PAGES, "taken", note="the pages / and /docs stay; a proxy can close them"),
    PeerFlag("--timeout= -to=", "taken", note="see --request-timeout"),
    PeerFlag(_THREADS, "refused", note="set OMP_NUM_THREADS in the environment"),
    PeerFlag(_AFFINITY, "refused", note="start the server with taskset or numactl"),
    PeerFlag("--max-total-tokens --num-gpu-blocks-override", "refused", note="give KV memory as --kv-cache-memory"),
    PeerFlag("--max-mamba-cache-size", "refused", note="give the memory of states as --state-cache-memory"),
    PeerFlag(_OFFLOAD, "refused", note="weights and KV pages stay in the memory of one device"),
    PeerFlag(_SPLIT, "refused", note="give --tensor-parallel-size N, which splits each layer equally"),
    PeerFlag("--main-gpu -mg", "refused", note="give --device cuda:N"),
    PeerFlag("--list-devices", "refused", note="`dflash-server check` tries a device"),
    PeerFlag(_EXPERTS, "refused", note="each expert is split among the ranks; leave it out"),
    PeerFlag(_HOSTS, "refused", note="a model is on one host; run replicas behind a router"),
    PeerFlag("--collect-detailed-traces", "refused", note="spans are of requests; see step_seconds"),
    PeerFlag("--export-metrics-to-file", "refused", note="GET /metrics and the access log have them"),
    PeerFlag(_SAMPLERS, "refused", note="this sampler is not here; leave it out"),
    PeerFlag(_PER_REQUEST, "refused", note="send it with each request"),
    PeerFlag(_GRAMMARS, "refused", note="output is not held to grammars; docs/structured-output.md has another way"),
    PeerFlag("--no-jinja --skip-chat-parsing", "refused", note="give --reasoning-parser none --tool-call-parser none"),
    PeerFlag("--context-shift", "refused", note="a context is never shifted; the answer ends at --max-model-len"),
    PeerFlag("--allow-auto-truncate", "refused", note="no prompt is cut; clients send shorter ones"),
    PeerFlag("--enable-priority-scheduling", "refused", note="requests are served in the order of their arrival"),
    PeerFlag("--cors-origins", "refused", note="give --allowed-origins ORIGIN ..., with blanks and not commas"),
    PeerFlag("--allow-credentials --cors-credentials", "refused", note="keys come in a header, which needs no cookies"),
    PeerFlag("-n", "refused", note="write --predict for llama-server's, or --nnodes for vLLM's"),
    PeerFlag(_ELSEWHERE, "refused", note="give a GGUF file, its folder, or its repository as MODEL"),
    PeerFlag("--hf-repo-draft -hfd -hfrd --spec-draft-hf", "refused", note="drafts are safetensors; see --draft-model"),
    PeerFlag("--override-kv", "refused", note="a GGUF file is read as it is; convert the model again"),
    PeerFlag("--tokenizer-revision", "refused", note="give a folder of that revision as --tokenizer"),
    PeerFlag("--download-dir", "refused", note="set HF_HUB_CACHE in the environment"),
    PeerFlag("--hf-token -hft", "refused", note="set HF_TOKEN in the environment"),
    PeerFlag("--offline", "refused", note="set HF_HUB_OFFLINE=1 in the environment"),
    PeerFlag(
        "--hf-chat-template-name --completion-template",
        "refused",
        note="the template called default is used; leave it out",
    ),
    PeerFlag(_CONFIG, "refused", note="write it to config.json in MODEL; RoPE may be linear, yarn or llama3"),
    PeerFlag(_QUANTISED, "refused", note="give --quantization int8, or a MODEL that is quantised"),
    PeerFlag(f"{_LORA} --control-vector", "refused", note="merge the adapter into the weights"),
    PeerFlag(_TLS, "refused", note="a proxy in front of the server ends TLS"),
    PeerFlag(_TRANSFER, "refused", note="KV pages stay in their server; leave it out"),
    PeerFlag(_OTHER_TASKS, "refused", note="this server takes text and generates text"),
    PeerFlag(_PLUGINS, "refused", note="no code is loaded into the server"),
    PeerFlag(_TOOLS, "refused", note="tools are called by the client"),
    PeerFlag(_ENDPOINTS, "refused", note="there is no such endpoint here; leave it out"),
    PeerFlag(_SECRET_LOGS, "refused", note="lines go to stderr, and answers are never logged; see --log-format"),
    PeerFlag(_N_GRAMS, "refused", note="drafts are the DFlash draft's; leave it out"),
)
