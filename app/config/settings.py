"""Every setting of the server, in one place.

`Config` holds settled values and nothing else: `Config(...)` and `Config.model_validate_json(...)` read neither the
environment nor a file, so what one process sends is what the other gets. `Config.load` is the way in for people:
flags > DFLASH_* environment > YAML file (`--config FILE`) > defaults.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.config.error import ConfigError

ENV_PREFIX = "DFLASH_"
DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
PARSERS = dict.fromkeys(
    ("hermes", "qwen", "qwen25", "qwen2_5", "deepseek_r1", "deepseek-r1", "qwen3-thinking"), "qwen3"
)
BINARY_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
DECIMAL_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Config(BaseSettings):
    """The settled settings. Sizes are counts of tokens or sequences unless a unit is named."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,
        protected_namespaces=(),
    )

    model: str = Field(
        "demo", min_length=1, description="target: a folder, a Hugging Face id, or `demo`, the pair that is shipped"
    )
    draft_model: str | None = Field(
        None, description="DFlash draft: a folder or a Hugging Face id; `demo` brings its own"
    )
    served_model_name: list[str] = Field(
        default_factory=list, description="names that requests may use; the first one is answered with (default: MODEL)"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="auto | bfloat16 | float16 | float32; auto is the device's own, float32 on a CPU"
    )
    device: str = Field("auto", description="auto | cpu | cuda | cuda:N | npu | npu:N")

    speculation: bool = Field(True, description="decode with the draft; --no-speculation decodes plainly")
    num_speculative_tokens: int | None = Field(
        None, description="draft tokens of a block, which has one row more, the anchor (default: the checkpoint's)"
    )
    verify: str = Field(
        "auto",
        pattern=r"^(auto|full|[1-9]\d*)$",
        description="auto | full | N: rows of a block that are drafted and verified, with its anchor; "
        "auto is what pays by measure",
    )
    draft_enforce_eager: bool = Field(False, description="run the draft without graphs")

    max_model_len: int | None = Field(None, gt=0, description="longest prompt and answer together, in tokens")
    max_num_seqs: int | None = Field(None, gt=0, description="most sequences in one step")
    max_num_batched_tokens: int | None = Field(None, gt=0, description="most target rows in one step")
    page_size: int | None = Field(
        None, gt=0, le=1024, description="tokens of a KV page (default: 128 on NPU, 16 elsewhere)"
    )
    kv_cache_memory: int | None = Field(
        None, gt=0, description="memory of all KV pages: bytes, or 4GiB, 512MiB, 2G (binary), 2GB (decimal)"
    )
    memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="share of the device's memory to use, where --kv-cache-memory is not given",
    )
    prefix_caching: bool = Field(True, description="reuse the KV pages of prompts that begin alike")
    enforce_eager: bool = Field(False, description="run without graphs")
    compile: bool = Field(
        False, description="on a CPU: have g++ compile the forwards, a minute at the first start, kept for the next"
    )
    max_graphs: int = Field(
        48, gt=0, description="most graphs to capture; a step that fits none exactly is padded to the next larger"
    )
    npu_check: bool = Field(
        False, description="hold every operator call on an NPU to docs/npu-contract.md, eagerly and slowly"
    )
    tensor_parallel_size: int = Field(1, description="only 1 for now")

    default_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description='JSON for requests that send no chat_template_kwargs: {"enable_thinking": false}',
    )
    reasoning_parser: Literal["auto", "none", "qwen3"] = Field(
        "auto", description="auto | none | qwen3: <think> to reasoning_content; auto looks into the chat template"
    )
    tool_call_parser: Literal["auto", "none", "qwen3"] = Field(
        "auto", description="auto | none | qwen3: <tool_call> to tool_calls; auto looks into the chat template"
    )

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    shutdown_timeout: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM"
    )
    step_timeout: float = Field(
        120.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds without a step result after which an engine with work is killed and started again",
    )

    max_queue: int | None = Field(
        None,
        ge=0,
        description="most requests that wait beside the running ones; more get 429 (default: 4 x max_num_seqs)",
    )
    max_concurrency_per_key: int | None = Field(
        None,
        gt=0,
        description="most requests in flight of one API key, or of one client address without keys; more get 429",
    )
    request_timeout: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds after which a request ends with 504; 0 is never; X-Request-Timeout may shorten it",
    )

    root_path: str = Field(
        "", pattern=r"^(/[^/\s]+)*$", description="path that a proxy puts before this server's own: /llm"
    )
    api_key: list[str] = Field(
        default_factory=list, repr=False, description="keys, one of which every request must bear (default: none)"
    )
    api_key_file: Path | None = Field(None, description="file with one key a line")
    admin_key: list[str] = Field(
        default_factory=list,
        repr=False,
        description="keys, one of which flushing the prefix cache needs (default: an API key does, if there are any)",
    )
    allowed_origins: list[str] = Field(
        default_factory=list, description="origins whose pages may call this server (CORS); * for all"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug | info | warning | error"
    )
    log_format: Literal["text", "json"] = Field("text", description="text | json, one object a line")
    log_prompts: bool = Field(False, description="let prompts into the log")
    metrics_prefix: str = Field(
        "dflash:",
        pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$",
        description="prefix of metric names; `vllm:` for existing dashboards",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed. `_Layers` adds the environment and the YAML file."""
        return (init_settings,)

    @classmethod
    def load(cls, flags: Iterable["Said"] = ()) -> "Config":
        """Settle flags, environment and YAML file. Raises ConfigError naming the flag, variable or key at fault."""
        given = _settle(flags)
        try:
            layers = _Layers(**_values(given))
        except ValidationError as error:
            raise _explain(error, given) from None
        config = cls(**{name: getattr(layers, name) for name in cls.model_fields})
        _check_sendable(config, given)
        return config

    @field_validator("served_model_name", "api_key", "admin_key", "allowed_origins", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        """Words, or a JSON list as vLLM has it; flags bring their words apart."""
        if isinstance(value, str):
            value = [value] if _is_json_list(value) else value.split()
        if not isinstance(value, list):
            return value
        return [item for part in value for item in (_read_list(part) if _is_json_list(part) else [part])]

    @field_validator("api_key", "admin_key", mode="wrap")
    @classmethod
    def _real_keys(cls, value: object, settle: Callable[[object], list[str]]) -> list[str]:
        """A key that an unset variable has left empty must not open the server."""
        keys = settle(value)
        if any(not key.strip() for key in keys) or (not keys and value != []):
            raise ValueError("a key may not be empty")
        return keys

    @field_validator("default_chat_template_kwargs", mode="before")
    @classmethod
    def _read_json(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except _UNREADABLE as error:
                raise ValueError(f"not JSON: {error}") from None
        return value

    @field_validator("reasoning_parser", "tool_call_parser", mode="before")
    @classmethod
    def _peers_parser(cls, value: object) -> object:
        return PARSERS.get(value.lower(), value.lower()) if isinstance(value, str) else value

    def api_keys(self) -> list[str]:
        """All keys, those in the file included. Raises ConfigError if the file cannot be read or has none."""
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

    @field_validator("dtype", mode="before")
    @classmethod
    def _spell_out_dtype(cls, value: object) -> object:
        return DTYPES.get(value.lower(), value.lower()) if isinstance(value, str) else value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|(cuda|npu)(:\d+)?", value):
            raise ValueError("a device is auto, cpu, cuda, cuda:N, npu or npu:N")
        return value

    @field_validator("num_speculative_tokens")
    @classmethod
    def _at_least_one_draft(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("a block needs at least 1 draft token; --no-speculation decodes plainly")
        return value

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def _count_bytes(cls, value: object) -> object:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("tensor_parallel_size")
    @classmethod
    def _one_device(cls, value: int) -> int:
        if value != 1:
            raise ValueError("tensor parallelism is not supported yet; run one replica per device")
        return value


class SpeculativeConfig(BaseModel):
    """vLLM's `--speculative-config`. It is spread over Config's own fields and not kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    method: str = "dflash"
    model: str | None = None
    num_speculative_tokens: int | None = None
    enforce_eager: bool | None = None
    draft_tensor_parallel_size: int = 1

    @field_validator("method")
    @classmethod
    def _dflash_only(cls, value: str) -> str:
        if value.lower() != "dflash":
            raise ValueError('this server decodes with method "dflash" only')
        return value

    @field_validator("draft_tensor_parallel_size")
    @classmethod
    def _one_device(cls, value: int) -> int:
        if value != 1:
            raise ValueError("tensor parallelism is not supported yet; run one replica per device")
        return value

    def spread(self) -> dict[str, Any]:
        """Field of Config -> value, for what was said. In vLLM `enforce_eager` here is the draft's alone."""
        values = {
            "draft_model": self.model,
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_enforce_eager": self.enforce_eager,
        }
        return {name: value for name, value in values.items() if value is not None}


class Said(NamedTuple):
    """One thing that somebody said: as it was spelt, the field it is about, and the value."""

    spelling: str
    field: str
    value: Any


class PeerFlag(NamedTuple):
    """A flag that vLLM, vllm-ascend or SGLang users bring; `field` is what it sets here, if anything.

    `value` says what follows the flag: "same" is our value, "block" a block size (so one more than
    `num_speculative_tokens`), "algorithm" must be DFLASH, "none" nothing (and `field`, if any, becomes true), "off"
    nothing either (and `field` becomes false), and a "refused" flag stops the start with its note.
    """

    flag: str
    field: str | None
    peers: str
    note: str = ""
    value: Literal["same", "block", "algorithm", "none", "off", "refused"] = "same"

    @property
    def ours(self) -> str | None:
        """The flag that says the same here, if there is one."""
        if self.field is None:
            return None
        return no_flag_name(self.field) if self.value == "off" else flag_name(self.field)


BLOCK_NOTE = "the block with its anchor row: 16 here is --num-speculative-tokens 15"

PEER_FLAGS = (
    PeerFlag("--model", "model", "vLLM"),
    PeerFlag("--model-path", "model", "SGLang"),
    PeerFlag("--speculative-draft-model-path", "draft_model", "SGLang"),
    PeerFlag("--speculative-algorithm", None, "SGLang", "DFLASH and no other", "algorithm"),
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
    PeerFlag("--disable-cuda-graph", "enforce_eager", "SGLang", value="none"),
    PeerFlag("--watchdog-timeout", "step_timeout", "SGLang", "there the server ends; here its engine is started again"),
    PeerFlag("--tp", "tensor_parallel_size", "SGLang"),
    PeerFlag("--tp-size", "tensor_parallel_size", "SGLang"),
    PeerFlag("-tp", "tensor_parallel_size", "vLLM"),
    PeerFlag("--enable-prefix-caching", "prefix_caching", "vLLM", "the default", "none"),
    PeerFlag("--no-enable-prefix-caching", "prefix_caching", "vLLM", value="off"),
    PeerFlag("--disable-radix-cache", "prefix_caching", "SGLang", value="off"),
    PeerFlag("--trust-remote-code", None, "vLLM, SGLang", "no code of a checkpoint is ever run", "none"),
    PeerFlag("--enable-auto-tool-choice", None, "vLLM", "tools are always the model's own choice", "none"),
    PeerFlag("--enable-reasoning", None, "vLLM", "see --reasoning-parser", "none"),
    PeerFlag("--disable-log-requests", None, "vLLM", "prompts are not logged unless --log-prompts", "none"),
    PeerFlag("--attention-backend", None, "vLLM, SGLang", "the device decides it; leave it out", "refused"),
)

_UNREADABLE = (ValueError, LookupError, AttributeError, RecursionError)
"""What readers of JSON and YAML raise besides their own errors: at thousands of digits, endless brackets, odd tags."""

GROUPS = {
    "model": ("model", "draft_model", "served_model_name", "dtype", "device", "config"),
    "speculative decoding": (
        "speculation",
        "num_speculative_tokens",
        "verify",
        "speculative_config",
        "draft_enforce_eager",
    ),
    "engine and memory": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "page_size",
        "kv_cache_memory",
        "memory_utilization",
        "prefix_caching",
        "enforce_eager",
        "compile",
        "max_graphs",
        "npu_check",
        "tensor_parallel_size",
    ),
    "chat": ("default_chat_template_kwargs", "reasoning_parser", "tool_call_parser"),
    "server": (
        "host",
        "port",
        "root_path",
        "api_key",
        "api_key_file",
        "admin_key",
        "allowed_origins",
        "max_queue",
        "max_concurrency_per_key",
        "request_timeout",
        "shutdown_timeout",
        "step_timeout",
    ),
    "logs and metrics": ("log_level", "log_format", "log_prompts", "metrics_prefix"),
}


def flag_table() -> list[tuple[str, str, str, str]]:
    """Rows (their flag, ours, whose it is, note) for the README."""
    return [(peer.flag, peer.ours or "-", peer.peers, peer.note) for peer in PEER_FLAGS]


def flag_name(field: str) -> str:
    """The flag of a field: `page_size` -> `--page-size`."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


def no_flag_name(field: str) -> str:
    """The flag that turns a field off: `prefix_caching` -> `--no-prefix-caching`."""
    return "--no-" + flag_name(field).removeprefix("--")


def env_name(field: str) -> str:
    """The environment variable of a field: `page_size` -> `DFLASH_PAGE_SIZE`."""
    return ENV_PREFIX + field.upper()


def setting_fields() -> dict[str, Any]:
    """Every name that flags, environment and YAML know -> its pydantic FieldInfo."""
    return dict(_Layers.model_fields)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint with the known name nearest to `name`, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {found[0]}?" if found else ""


def _is_json_list(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.lstrip().startswith("[")


def _read_list(text: str) -> list[object]:
    try:
        return list(json.loads(text))
    except _UNREADABLE as error:
        raise ValueError(f"not JSON: {error}") from None


def _check_sendable(config: Config, given: dict[str, Said]) -> None:
    """The engine gets its settings as JSON: raises ConfigError, naming it, for one that cannot be said so."""
    for name in Config.model_fields:
        try:
            config.model_dump_json(include={name})
        except (UnicodeError, ValueError) as error:
            spelling = given[name].spelling if name in given else name
            raise ConfigError(f"{spelling}: {' '.join(str(error).split())}") from None


def parse_bytes(text: str) -> int:
    """Bytes of "4GiB", "2G" (both binary), "2GB" (decimal) or "1048576". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?\s*", text.upper())
    if match is None:
        raise ValueError("a size is a number of bytes, or a number with a unit: 512MiB, 4GiB, 2G, 2GB")
    number, unit, suffix = match.groups()
    units = DECIMAL_UNITS if unit and suffix == "B" else BINARY_UNITS
    return int(Decimal(number) * units[unit])


class _Layers(Config):
    """Config as people say it: with what only serves to say other things, and with all sources."""

    config: Path | None = Field(None, description="YAML file with the same names: `max_num_seqs: 8`")
    speculative_config: str | None = Field(
        None, description='as vLLM has it, in JSON: {"method": "dflash", "model": PATH, "num_speculative_tokens": N}'
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls), _YamlFile(settings_cls, {})


class _Environment(EnvSettingsSource):
    """The DFLASH_* variables. A variable that is no setting is an error."""

    def __call__(self) -> dict[str, Any]:
        foreign = _kubernetes_variables()
        known = {env_name(field) for field in _Layers.model_fields}
        for name in sorted(os.environ):
            if name.startswith(ENV_PREFIX) and name not in known and name not in foreign:
                raise _unknown("environment variable", name, known, name.removeprefix(ENV_PREFIX).lower(), env_name)
        values = super().__call__()
        said = [Said(env_name(f), f, v) for f, v in values.items() if env_name(f) not in foreign]
        return _beneath(self.current_state, _settle(said))


class _YamlFile(InitSettingsSource):
    """The file that `--config` or DFLASH_CONFIG names. Its keys are the fields; `-` may stand for `_`."""

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        known = [field for field in _Layers.model_fields if field != "config"]
        said = []
        for key, value in _read_yaml(Path(path)).items():
            field = str(key).replace("-", "_")
            if field not in known:
                raise _unknown("key", f"{key} in {path}", known, field, str)
            if value is not None:
                said.append(Said(f"{field} in {path}", field, value))
        return _beneath(self.current_state, _settle(said))


def _read_yaml(path: Path) -> dict[Any, Any]:
    import yaml  # only a start with a file pays for it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except (yaml.YAMLError, *_UNREADABLE) as error:  # its constructors raise what they like
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--config {path}: a mapping of names to values is wanted, not a {type(content).__name__}")
    return content or {}


def _settle(layer: Iterable[Said]) -> dict[str, Said]:
    """One layer (flags, environment or file) as field -> Said. Raises ConfigError where it contradicts itself."""
    settled: dict[str, Said] = {}
    for said in _spread(layer):
        before = settled.get(said.field)
        if before is not None and isinstance(before.value, list) and isinstance(said.value, list):
            settled[said.field] = said._replace(value=before.value + said.value)
        elif before is not None and before.spelling != said.spelling and str(before.value) != str(said.value):
            raise ConfigError(
                f"{before.spelling} and {said.spelling} contradict each other: {before.value} and {said.value}",
                "give one of them",
            )
        else:
            settled[said.field] = said
    if {"kv_cache_memory", "memory_utilization"} <= settled.keys():
        rivals = (settled["kv_cache_memory"].spelling, settled["memory_utilization"].spelling)
        raise ConfigError(f"{rivals[0]} and {rivals[1]} exclude each other", "give one of them")
    return settled


def _spread(layer: Iterable[Said]) -> Iterable[Said]:
    for said in layer:
        if said.field != "speculative_config":
            yield said
            continue
        for field, value in _speculative_config(said).spread().items():
            yield Said(f"{said.spelling} ({field})", field, value)


def _speculative_config(said: Said) -> SpeculativeConfig:
    example = """for example '{"method": "dflash", "model": "PATH", "num_speculative_tokens": 15}'"""
    value = said.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except _UNREADABLE as error:
            raise ConfigError(f"{said.spelling}: not JSON: {error}", example) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{said.spelling}: an object is wanted, not {value!r}", example)
    known = SpeculativeConfig.model_fields
    for key in value:
        if key not in known:
            hint = nearest(str(key), known) or f"known are {', '.join(known)}"
            raise ConfigError(f"{said.spelling}: unknown key {key!r}", hint)
    try:
        return SpeculativeConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{said.spelling}: {first['loc'][0]} {first['input']!r}: {_message(first)}") from None


def _values(settled: dict[str, Said]) -> dict[str, Any]:
    return {field: said.value for field, said in settled.items()}


def _beneath(above: dict[str, Any], settled: dict[str, Said]) -> dict[str, Any]:
    """A layer's values, without a memory limit where a layer above gives the other kind."""
    values = _values(settled)
    for mine, theirs in (("kv_cache_memory", "memory_utilization"), ("memory_utilization", "kv_cache_memory")):
        if theirs in above:
            values.pop(mine, None)
    return values


def _kubernetes_variables() -> set[str]:
    """The DFLASH_* variables that Kubernetes sets in every pod for a Service whose name begins with `dflash`."""
    services = [n.removesuffix("_SERVICE_HOST") for n in os.environ if re.fullmatch(r"DFLASH.*_SERVICE_HOST", n)]
    return {
        name
        for service in services
        for name, value in os.environ.items()
        if name.startswith((f"{service}_SERVICE_", f"{service}_PORT_"))
        or (name == f"{service}_PORT" and "://" in value)
    }


def _unknown(kind: str, shown: str, known: Iterable[str], field: str, spell: Callable[[str], str]) -> ConfigError:
    """The error for a name that is no setting: our own name if a peer's was used, else the nearest."""
    ours = next((p.field for p in PEER_FLAGS if p.field and p.flag.lstrip("-").replace("-", "_") == field), None)
    hint = f"it is {spell(ours)} here" if ours else nearest(spell(field), known)
    return ConfigError(f"unknown {kind} {shown}", hint or "`dflash-server serve --help` lists them all")


def _explain(error: ValidationError, flags: dict[str, Said]) -> ConfigError:
    first = error.errors()[0]
    field = str(first["loc"][0])
    if field in flags:
        spelling = flags[field].spelling
    elif os.environ.get(env_name(field)):
        spelling = env_name(field)
    else:
        spelling = f"{field} in {flags['config'].value if 'config' in flags else os.environ.get(env_name('config'))}"
    shown = "" if field in ("api_key", "admin_key") else f" {first['input']}"
    return ConfigError(f"{spelling}{shown}: {_message(first)}", "see `dflash-server serve --help`")


def _message(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]
