"""Every setting of the server: name, type, limits, default, and its line in `--help`.

A `Config` holds settled values. The sources that users have (flags, environment, YAML file) are read by
app.config.sources, and the engine process gets `Config.for_engine()`.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt

from app.config.error import ConfigError
from app.config.values import (
    BlockRows,
    Bytes,
    Device,
    Dtype,
    JsonObject,
    Keys,
    KvEvents,
    LogLevel,
    MetricsPrefix,
    NumDrafts,
    OnOffAuto,
    ParserName,
    RootPath,
    ToolParserName,
    Url,
    Words,
)
from app.engine_config import EngineConfig

ENV_PREFIX = "DFLASH_"
MODEL, SPECULATION, ENGINE = "model", "speculative decoding", "engine and memory"
CHAT, SERVER, LOGS = "chat", "server", "logs and metrics"


def setting(group: str, default: Any, help: str, *, metavar: str = "VALUE", **options: Any) -> Any:
    """Return a pydantic field with its group and metavar in `--help`. `options` are those of pydantic's Field."""
    extra: dict[str, Any] = {"group": group, "metavar": metavar}
    return Field(default, description=help, json_schema_extra=extra, **options)


def flag_name(field: str) -> str:
    """Return the flag of a field: `page_size` -> `--page-size`."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


def no_flag_name(field: str) -> str:
    """Return the flag that turns a field off: `prefix_caching` -> `--no-prefix-caching`."""
    return "--no-" + flag_name(field).removeprefix("--")


def env_name(field: str) -> str:
    """Return the environment variable of a field: `page_size` -> `DFLASH_PAGE_SIZE`."""
    return ENV_PREFIX + field.upper()


class Config(BaseModel):
    """Settled settings. Sizes are counts of tokens or sequences unless a unit is named."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = setting(
        MODEL, "demo", "target: a folder, a Hugging Face id, or `demo`, the pair that is shipped", min_length=1
    )
    draft_model: str | None = setting(MODEL, None, "DFlash draft: a folder or a Hugging Face id; `demo` brings its own")
    served_model_name: Words = setting(
        MODEL, [], "names that requests may use; the first one is answered with (default: MODEL)", metavar="NAME"
    )
    dtype: Dtype = setting(
        MODEL,
        "auto",
        "auto | bfloat16 | float16 | float32; auto is the device's own, on a CPU float32, or a checkpoint's bfloat16 "
        "if the processor multiplies it (avx512_bf16)",
    )
    device: Device = setting(MODEL, "auto", "auto | cpu | cuda | cuda:N | npu | npu:N")

    speculation: bool = setting(SPECULATION, True, "decode with the draft; --no-speculation decodes plainly")
    num_speculative_tokens: NumDrafts | None = setting(
        SPECULATION, None, "draft tokens of a block, which has one row more, the anchor (default: the checkpoint's)"
    )
    verify: BlockRows = setting(
        SPECULATION,
        "auto",
        "auto | full | N: rows of a block that are drafted and verified, with its anchor; auto is what pays by measure",
    )
    draft_enforce_eager: bool = setting(SPECULATION, False, "run the draft without graphs")
    draft_tensor_parallel_size: PositiveInt | None = setting(
        SPECULATION, None, "1, or --tensor-parallel-size: processes that share each layer of the draft (default: all)"
    )

    max_model_len: PositiveInt | None = setting(ENGINE, None, "longest prompt and answer together, in tokens")
    max_num_seqs: PositiveInt | None = setting(ENGINE, None, "most sequences in one step")
    max_num_batched_tokens: PositiveInt | None = setting(ENGINE, None, "most target rows in one step")
    page_size: PositiveInt | None = setting(
        ENGINE, None, "tokens of a KV page (default: 128 on NPU, 16 elsewhere)", le=1024
    )
    kv_cache_memory: Bytes | None = setting(
        ENGINE, None, "memory of all KV pages: bytes, or 4GiB, 512MiB, 2G (binary), 2GB (decimal)"
    )
    state_cache_memory: Bytes | None = setting(
        ENGINE,
        None,
        "memory of Qwen3.5's recurrent states in the prefix cache (default: 2 for each of --max-num-seqs)",
    )
    memory_utilization: FiniteFloat = setting(
        ENGINE, 0.9, "share of the device's memory to use, where --kv-cache-memory is not given", gt=0, le=1
    )
    prefix_caching: bool = setting(ENGINE, True, "reuse the KV pages of prompts that begin alike")
    kv_events_config: KvEvents | None = setting(
        ENGINE,
        None,
        'publish how the prefix cache changes, as vLLM: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
        metavar="JSON",
    )
    enforce_eager: bool = setting(ENGINE, False, "run without graphs")
    compile: OnOffAuto = setting(
        ENGINE,
        "auto",
        "on | off | auto: on a CPU have g++ compile the forwards, which is kept: before the first request, never, or "
        "while requests are served",
    )
    max_graphs: PositiveInt = setting(
        ENGINE, 48, "most graphs to capture; a step that fits none exactly is padded to the next larger"
    )
    tune: Literal["auto", "off"] = setting(
        ENGINE,
        "auto",
        "auto | off: time ways to launch kernels at the first start on a GPU, in at most 10 s, and keep them; on a CPU "
        "time products of few rows at each start",
    )
    batch_invariant: bool = setting(
        ENGINE, False, "sum in one order whatever the batch: texts are equal to the last bit in 16 bits too, and slower"
    )
    npu_check: bool = setting(
        ENGINE, False, "hold every operator call on an NPU to docs/npu-contract.md, eagerly and slowly"
    )
    tensor_parallel_size: PositiveInt = setting(
        ENGINE,
        1,
        "processes that share each layer of the model on one host, each on its own device, or all on one CPU",
    )
    distributed_timeout_seconds: PositiveInt = setting(
        ENGINE, 600, "longest time that one of these processes waits for another while they load"
    )

    default_chat_template_kwargs: JsonObject = setting(
        CHAT, {}, 'JSON for requests that send no chat_template_kwargs: {"enable_thinking": false}', metavar="JSON"
    )
    reasoning_parser: ParserName = setting(
        CHAT,
        "auto",
        "auto | none | qwen3 | harmony: thinking to reasoning_content; auto looks into the chat template",
    )
    tool_call_parser: ToolParserName = setting(
        CHAT,
        "auto",
        "auto | none | qwen3 | llama3_json | harmony: calls to tool_calls; auto as above",
    )

    host: str = setting(SERVER, "127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = setting(SERVER, 8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    root_path: RootPath = setting(SERVER, "", "path that a proxy puts before this server's own: /llm")
    api_key: Keys = setting(
        SERVER, [], "keys, one of which every request must bear (default: none)", metavar="KEY", repr=False
    )
    api_key_file: Path | None = setting(SERVER, None, "file with one key a line", metavar="FILE")
    admin_key: Keys = setting(
        SERVER,
        [],
        "keys, one of which flushing the prefix cache needs (default: an API key does, if there are any)",
        metavar="KEY",
        repr=False,
    )
    allowed_origins: Words = setting(
        SERVER, [], "origins whose pages may call this server (CORS); * for all", metavar="ORIGIN"
    )
    max_queue: NonNegativeInt | None = setting(
        SERVER, None, "most requests that wait beside the running ones; more get 429 (default: 4 x max_num_seqs)"
    )
    max_concurrency_per_key: PositiveInt | None = setting(
        SERVER, None, "most requests in flight of one API key, or of one client address without keys; more get 429"
    )
    request_timeout: FiniteFloat = setting(
        SERVER, 0.0, "seconds after which a request ends with 504; 0 is never; X-Request-Timeout may shorten it", ge=0
    )
    shutdown_timeout: FiniteFloat = setting(SERVER, 30.0, "seconds that running requests get after SIGTERM", ge=0)
    drain_delay: FiniteFloat = setting(
        SERVER, 0.0, "seconds after SIGTERM in which /ready says 503 and requests are still taken", ge=0
    )
    step_timeout: FiniteFloat = setting(
        SERVER, 120.0, "seconds without a step result after which an engine with work is killed and started again", gt=0
    )

    log_level: LogLevel = setting(LOGS, "info", "debug | info | warning | error")
    log_format: Literal["text", "json"] = setting(LOGS, "text", "text | json, one object a line")
    log_prompts: bool = setting(LOGS, False, "let prompts into the log")
    metrics_prefix: MetricsPrefix = setting(LOGS, "dflash:", "prefix of metric names; `vllm:` for existing dashboards")
    otlp_traces_endpoint: Url | None = setting(
        LOGS,
        None,
        "send a span of each request to a collector of OpenTelemetry: http://host:4317; needs 'dflash-server[otlp]'",
        metavar="URL",
    )

    def for_engine(self, target: Path, draft: Path | None) -> EngineConfig:
        """Return the engine's part, which has no keys. `target` and `draft` are the checkpoints' folders.

        Raises ConfigError for settings that exclude each other.
        """
        own = EngineConfig.__dataclass_fields__.keys() & type(self).model_fields.keys()
        chosen: dict[str, Any] = {name: getattr(self, name) for name in own}
        drafts = self.num_speculative_tokens
        chosen["block_size"] = None if drafts is None else drafts + 1
        chosen["enforce_eager"] = self.enforce_eager or None
        chosen["compile"] = {"on": True, "off": False}.get(self.compile, self.compile)
        chosen["verify"] = int(self.verify) if self.verify.isdecimal() else self.verify
        chosen["cache_events"] = self.kv_events_config is not None and self.kv_events_config.is_on
        if chosen["cache_events"] and not self.prefix_caching:
            raise ConfigError("--kv-events-config tells how the prefix cache changes, and --no-prefix-caching has none")
        return EngineConfig(target, draft, **chosen)

    @property
    def model_names(self) -> list[str]:
        """Values that `model` of a request may have. Answers bear the first."""
        return self.served_model_name or [self.model]

    def api_keys(self) -> list[str]:
        """Return all keys, those in the file included. Raises ConfigError if the file holds none or is unreadable."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = self.api_key_file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {self.api_key_file}: cannot be read: {error}") from None
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file}: has no key", "put one key on a line")
        return [*self.api_key, *keys]
