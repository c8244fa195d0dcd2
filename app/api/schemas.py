"""Requests in OpenAI's shapes.

Only fields that are honoured appear here, and notes of clients that change no text. Other fields are kept in
`model_extra`: refusals.py refuses some, and validation.py warns of the others.
Values are strict, so that "5" is not a number. Every list has a maximum length and fails at its first wrong item
(`fail_fast`), because a large body of errors would keep the server busy.
"""

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, ValidationInfo

from app.api.errors import AnswerWarning
from app.api.json_values import TooManyValues, ValueCount, loads

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 4096
MAX_PROMPT_IDS = 2**20
MAX_TOOLS = 256
MAX_CALLS = 256
MAX_STOPS = 64
MAX_STOP_IDS = 1024
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 16
MAX_BIASES = 1024
MAX_SALT_LENGTH = 256
MAX_NAME_LENGTH = 256  # of a function: OpenAI has 64, and gateways of MCP make longer ones

MAX_INT = 2**31 - 1
MAX_NESTING = 64
CUT = "arguments"
"""Name under which a template gets arguments that were cut."""

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
PromptIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


TEXT_ONLY = 'must be "text", "refusal" or "thinking": this model reads no images, sounds or files'


class Body(BaseModel):
    """A JSON object with strict fields. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def known_type(*known: str, why: str) -> BeforeValidator:
    """Return a check of a `type`, which fails with `why` for a string that is not `known`."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in known:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def at_most(count: int) -> BeforeValidator:
    """Return a check of an object's number of entries before any of them is read, because a dict has no `fail_fast`."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"must have at most {count} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(Body):
    """Options of a stream. `continuous_usage_stats` puts the usage so far on every chunk, unless usage is not wanted.

    `include_speculation` adds what every step verified, accepted and took to the chunks, and sums to the last usage.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_speculation: bool | None = None


class ModelRequest(Body):
    """A request that may name a model. A field is None if it was absent or null."""

    model: str | None = None
    _warnings: list[AnswerWarning] = PrivateAttr(default_factory=list)

    @property
    def warnings(self) -> list[AnswerWarning]:
        """What the answer says about fields of the body. `parse` of body.py fills it."""
        return self._warnings


class SamplingRequest(ModelRequest):
    """Fields of all generating endpoints. Names, ranges and meanings of the sampling fields are vLLM's.

    Only the bounds of `repetition_penalty` are this server's, and keep logits finite. `clamp` of validation.py bounds
    `logit_bias` and `temperature`.
    """

    stream: bool | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenKey, float] | None, Field(max_length=MAX_BIASES), at_most(MAX_BIASES)] = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    speculate: bool | Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None

    @property
    def num_choices(self) -> int:
        """Number of answers for each prompt."""
        return 1


class GenerationRequest(SamplingRequest):
    """Fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Count | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the new tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def streaming(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


class TextPart(Body):
    """A part of a message's text, also by its names in /v1/responses. `annotations` and `cache_control` mean nothing
    here."""

    cache_control: dict[str, Any] | None = None
    annotations: Any = None
    type: Annotated[
        Literal["text", "input_text", "output_text"], known_type("text", "input_text", "output_text", why=TEXT_ONLY)
    ]
    text: str


class RefusalPart(Body):
    """A refusal of an earlier turn, which is text like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(Body):
    """Reasoning of an earlier turn in Anthropic's form. Its `signature` means nothing here."""

    cache_control: dict[str, Any] | None = None
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


MEDIA = {
    **dict.fromkeys(("image_url", "image", "input_image"), "an image"),
    **dict.fromkeys(("input_audio", "audio_url"), "a sound"),
    "video_url": "a video",
    **dict.fromkeys(("file", "input_file"), "a file"),
}
"""Types of parts that are no text, in chat and in /v1/responses, and what they have."""


class MediaPart(Body):
    """A part that only the result of a tool may have, because tools return what no user has asked for.

    The model reads in its place that it was there.
    """

    model_config = ConfigDict(extra="ignore")  # The data may have megabytes, and nothing reads them.

    type: Annotated[str, known_type(*MEDIA, why=TEXT_ONLY)]

    @property
    def text(self) -> str:
        return f"({MEDIA[self.type]}, which this model cannot see)"


def type_of(value: Any) -> Any:
    """Return the `type` of a part, an item or a tool, which may be JSON or a model."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _kind_of_part(value: Any) -> str:
    """Return the name of the class that reads a part. Any other kind is refused by the type of a text."""
    kind = type_of(value)
    if isinstance(kind, str) and kind in MEDIA:
        return "MediaPart"
    return {"thinking": "ThinkingPart", "refusal": "RefusalPart"}.get(str(kind), "TextPart")


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[RefusalPart, Tag("RefusalPart")]
    | Annotated[ThinkingPart, Tag("ThinkingPart")]
    | Annotated[MediaPart, Tag("MediaPart")],
    Discriminator(_kind_of_part),
]
Content = str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


def _parsed_arguments(value: Any, info: ValidationInfo) -> Any:
    """Return the object of a JSON text. `info.context` counts the values of all such texts in a body."""
    parsed = value
    if isinstance(value, str):
        try:
            (info.context or ValueCount()).add(value.encode())
            parsed = loads(value or "{}")
        except TooManyValues as error:
            raise ValueError(f"has, with the calls before it, {error}: the most that are read") from None
        except (ValueError, RecursionError):
            parsed = {CUT: value} if _is_cut(value) else None
        if not isinstance(parsed, dict):
            raise ValueError("must be the JSON text of an object")
    if _depth(parsed) > MAX_NESTING:
        raise ValueError(f"must not be nested more than {MAX_NESTING} deep")
    return parsed


def _is_cut(text: str) -> bool:
    """Return whether a text is the beginning of a JSON object's, as a limit of tokens leaves it."""
    try:
        loads(text)
    except json.JSONDecodeError as error:
        return text.startswith("{") and (error.pos == len(text) or error.msg.startswith("Unterminated"))
    except (ValueError, RecursionError):
        pass
    return False


class CalledFunction(Body):
    """A called function. `arguments` is the JSON text of an object, or the object, which chat templates get. Of a text
    that was cut they get the text, as CUT."""

    name: str
    arguments: Annotated[
        dict[str, Any] | None, BeforeValidator(_parsed_arguments, json_schema_input_type=str | dict[str, Any] | None)
    ] = None

    @property
    def is_cut(self) -> bool:
        """True if a template gets the text of the arguments, because it was cut."""
        given = self.arguments or {}
        text = given.get(CUT)
        return len(given) == 1 and isinstance(text, str) and _is_cut(text)


def _depth(value: Any) -> int:
    """Return how deep objects and lists are nested."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


class CalledTool(Body):
    """A call that the assistant made in an earlier turn. `index` comes from streamed chunks and means nothing here."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments or {}}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(Body):
    """A message. `reasoning` is vLLM's newer name of `reasoning_content`. The last four fields are notes of clients and
    gateways, and change no text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    id: str | None = None
    annotations: Any = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The text of the content, and the `refusal` that OpenAI's answers have in place of one."""
        parts = [self.content] if isinstance(self.content, str) else self.content or []
        said = "\n".join(
            part if isinstance(part, str) else part.text for part in parts if not isinstance(part, ThinkingPart)
        )
        return "\n".join(filter(None, (said, self.refusal)))

    @property
    def thinking(self) -> str:
        """The text of the parts that are reasoning."""
        parts = self.content if isinstance(self.content, list) else ()
        return "\n".join(part.thinking for part in parts if isinstance(part, ThinkingPart))

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it. "developer" is OpenAI's newer word for "system"."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        for field in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        if reasoning := self.reasoning_content or self.reasoning or self.thinking:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class Function(Body):
    """Description of a function, which the prompt shows without `strict` and `cache_control`."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Tool(Body):
    """A function that the model may call. `strict` is a wish, because nothing holds the model to a schema."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        shown = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": self.type, "function": {name: value for name, value in shown.items() if value is not None}}


class OtherTool(Body):
    """A tool that is no function, which is left out with a warning.

    That is a custom tool too: it may have a grammar, and nothing here holds the model to one.
    """

    model_config = ConfigDict(extra="ignore")

    type: str


def _kind_of_tool(value: Any) -> str:
    """Return the name of the class that reads a tool. One without a type is refused as a function."""
    kind = type_of(value)
    return "OtherTool" if isinstance(kind, str) and kind != "function" else "Tool"


AnyTool = Annotated[Annotated[Tool, Tag("Tool")] | Annotated[OtherTool, Tag("OtherTool")], Discriminator(_kind_of_tool)]


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TemplatedRequest(ModelRequest):
    """A conversation, and the options of its prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    def switches(self, known: Collection[str]) -> dict[str, Any]:
        """Return the variables of the chat template (`known`) that the request sets. A null counts as unset."""
        wishes = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            wishes["enable_thinking"] = self.reasoning_effort != "none"
            if wishes["enable_thinking"]:
                wishes["reasoning_effort"] = self.reasoning_effort
        elif self.enable_thinking is not None:
            wishes["enable_thinking"] = self.enable_thinking
        return {k: v for k, v in wishes.items() if v is not None and k in known}

    @property
    def forces_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    @property
    def forced_function(self) -> str | None:
        """The function that must be called, None if it may be any."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def functions(self) -> list[Tool]:
        """The tools that can be offered."""
        return [tool for tool in self.tools or [] if isinstance(tool, Tool)]

    @property
    def offers_tools(self) -> bool:
        return bool(self.functions) and self.tool_choice != "none"

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the prompt shows to the model."""
        return [tool.for_template() for tool in self.functions] if self.offers_tools else []


class ChatCompletionRequest(TemplatedRequest, GenerationRequest):
    """A conversation to answer. `max_completion_tokens` wins over `max_tokens`, which is its older name.

    With `include_reasoning` false the answer has no reasoning, although the model may write some.
    """

    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        newer = self.max_completion_tokens
        return ("max_tokens", self.max_tokens) if newer is None else ("max_completion_tokens", newer)


class CompletionRequest(GenerationRequest):
    """Prompts to continue. `prompt` is a text, token ids, or a list of either."""

    prompt: (
        str
        | PromptIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    add_special_tokens: bool | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """The prompts, by the names of their fields in errors."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return {"prompt": cast("str | list[int]", self.prompt)}
        return {f"prompt.{i}": cast("str | list[int]", prompt) for i, prompt in enumerate(self.prompt)}


class TokenizeRequest(ModelRequest):
    """A bare text, which is tokenised like a prompt of /v1/completions."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplatedRequest):
    """A conversation, which is tokenised like one of /v1/chat/completions."""

    return_token_strs: bool | None = None


class DetokenizeRequest(ModelRequest):
    """Token ids of a text."""

    tokens: PromptIds
