"""Types of the settings' values: how text is read, what is refused, and other projects' spellings."""

import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    WrapValidator,
)

STORED = ("fp8", "compressed-tensors", "ascend", "modelslim", "w8a8_int8", "w8a8_fp8", "mxfp4")
"""Names of quantisations in vLLM and SGLang whose files are read as they are stored."""
DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
PARSERS = dict.fromkeys(
    ("hermes", "qwen", "qwen25", "qwen2_5", "deepseek_r1", "deepseek-r1", "qwen3-thinking"), "qwen3"
) | dict.fromkeys(("openai_gptoss", "openai", "gpt-oss"), "harmony")
TOOL_PARSERS = PARSERS | dict.fromkeys(("llama3", "llama4_json"), "llama3_json") | {"qwen3_xml": "qwen3_coder"}
UNREADABLE = (ValueError, LookupError, AttributeError, RecursionError)
"""All errors of JSON and YAML readers, with those for numbers of 5,000 digits, endless brackets and odd tags."""


def parse_bytes(text: str) -> int:
    """Return the bytes of "4GiB", "2G" (both binary), "2GB" (decimal) or "1048576". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?\s*", text.upper())
    if match is None:
        raise ValueError("a size is a number of bytes, or a number with a unit: 512MiB, 4GiB, 2G, 2GB")
    number, unit, suffix = match.groups()
    base = 1000 if suffix == "B" else 1024
    return int(Decimal(number) * base ** " KMGT".index(unit or " "))


def parse_tokens(text: str) -> str | int:
    """Return the tokens of "32k" (32,000) or "32K" (32,768), like vLLM. Other text is unchanged."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM])", text, re.ASCII)
    if match is None:
        return text
    return int(Decimal(match[1]) * {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}[match[2]])


def parse_length(value: Any) -> Any:
    """Return None, the default, for vLLM's "auto" and -1, and llama-server's 0. Text is read by `parse_tokens`."""
    value = parse_tokens(value) if isinstance(value, str) else value
    return None if str(value) in ("auto", "-1", "0") else value


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for any error of the parser."""
    try:
        return json.loads(text)
    except UNREADABLE as error:
        raise ValueError(f"not JSON: {error}") from None


def require(holds: Callable[[Any], object], message: str) -> AfterValidator:
    """Return a validator that refuses a value with `message` unless it holds."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(message)
        return value

    return AfterValidator(check)


def _if_text(read: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that reads text, and passes on the other values of a YAML file."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _spelt(names: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that ignores case and takes other projects' names."""
    return _if_text(lambda text: names.get(text.lower(), text.lower()))


def _is_json_list(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.lstrip().startswith("[")


def _split_words(value: object) -> object:
    """Return a list of words. Text is split at blanks, and a JSON list is its words, like in vLLM."""
    if isinstance(value, str):
        value = [value] if _is_json_list(value) else value.split()
    if not isinstance(value, list):
        return value
    return [word for part in value for word in (parse_json(part) if _is_json_list(part) else [part])]


def _refuse_empty_keys(value: object, settle: Callable[[object], list[str]]) -> list[str]:
    """Refuse a key that an unset variable has left empty, because it would open the server."""
    keys = settle(value)
    if any(not key.strip() for key in keys) or (not keys and value != []):
        raise ValueError("a key may not be empty")
    return keys


class KvEventsConfig(BaseModel):
    """vLLM's options of KV events. `hwm` bounds the messages that wait for a slow subscriber; 0 means no bound."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: PositiveInt = 10_000
    hwm: NonNegativeInt = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def _read_kv_events(value: object) -> object:
    """Return the options of an object, or of its JSON. A ValueError names the key at fault."""
    try:
        return KvEventsConfig.model_validate(parse_json(value) if isinstance(value, str) else value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the value'}: {first['msg'].lower()}") from None


Words = Annotated[list[str], BeforeValidator(_split_words)]
Keys = Annotated[Words, WrapValidator(_refuse_empty_keys)]
KvEvents = Annotated[KvEventsConfig, BeforeValidator(_read_kv_events)]
JsonObject = Annotated[dict[str, Any], _if_text(parse_json)]
Bytes = Annotated[PositiveInt, _if_text(parse_bytes)]
BytesOrNone = Annotated[NonNegativeInt, _if_text(parse_bytes)]
Tokens = Annotated[int, _if_text(parse_tokens)]
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], _spelt(DTYPES)]
StateDtype = Annotated[Literal["float32", "bfloat16"], _spelt(DTYPES | {"auto": "float32"})]
_READ = (
    "auto reads FP8, W8A8, int8 and GGUF as stored, and int8 rounds other weights; AWQ, GPTQ and others are not read"
)
Quantization = Annotated[
    str, _spelt({"none": "auto", "gguf": "auto"}), require({"auto", "int8", *STORED}.__contains__, _READ)
]
DraftQuantization = Annotated[Literal["auto", "none", "int8", "fp8"], _spelt({"unquant": "none"})]
_DEVICE = re.compile(r"auto|cpu|(cuda|npu)(:\d+)?")
Device = Annotated[str, require(_DEVICE.fullmatch, "a device is auto, cpu, cuda, cuda:N, npu or npu:N")]
NumDrafts = Annotated[
    int, require(lambda count: count >= 1, "a block needs at least 1 draft token; --no-speculation decodes plainly")
]
YesOrChosen = Annotated[bool | None, AfterValidator(lambda yes: yes or None)]
"""True, or the engine chooses."""
BlockRows = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^(auto|full|[1-9]\d*)$"),
    AfterValidator(lambda rows: int(rows) if rows.isdecimal() else rows),
]
Length = Annotated[int | None, BeforeValidator(parse_length)]
Seed = Annotated[int | None, BeforeValidator(lambda value: None if value in (-1, "-1") else value)]
"""A seed, or -1 for none, like llama-server's."""
GenerationConfig = Annotated[Literal["auto", "vllm"], _spelt({"model": "auto", "openai": "vllm"})]
"""The defaults of sampling, by vLLM's names or SGLang's."""
_URL = re.compile(r"(https?|grpc)://[^/\s]+\S*")
Url = Annotated[str, require(_URL.fullmatch, "an address begins with http://, https:// or grpc://")]
RootPath = Annotated[str, Field(pattern=r"^(/[^/\s]+)*$")]
MetricsPrefix = Annotated[str, Field(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], _spelt({})]
ParserName = Annotated[Literal["auto", "none", "qwen3", "harmony"], _spelt(PARSERS)]
ToolParserName = Annotated[
    Literal["auto", "none", "qwen3", "qwen3_coder", "llama3_json", "harmony"], _spelt(TOOL_PARSERS)
]
