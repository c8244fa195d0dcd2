"""The requests that are understood, in OpenAI's shapes; answers.py has what comes back.

Only fields that are honoured appear here. What else a client sends ends up in `model_extra`, where refusals.py finds
what must be refused. Values are strict: "5" is not a number. Every list has a greatest length and fails at its first
wrong item (`fail_fast`), so that no body makes the server busy with complaints.
"""

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_MESSAGES = 4096
MOST_PARTS = 1024
MOST_PROMPTS = 4096
MOST_PROMPT_IDS = 2**20
MOST_TOOLS = 256
MOST_CALLS = 256
MOST_STOPS = 64
MOST_STOP_IDS = 1024
LONGEST_STOP = 1024
MOST_CHOICES = 16
MOST_BIASES = 1024
LONGEST_SALT = 256

LARGEST = 2**31 - 1
MOST_NESTED = 64

TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
PromptIds = Annotated[list[TokenId], Field(max_length=MOST_PROMPT_IDS, fail_fast=True)]
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Body(BaseModel):
    """Strict about what it knows. What it does not know is kept in `model_extra`, for refusals.py to judge."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """`continuous_usage_stats` puts the usage so far on every chunk. `include_speculation` adds to chunks and to the
    last usage how many drafts every step verified and accepted."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_speculation: bool | None = None


class AskedOfModel(Body):
    """A request that names a model. None means that a field was absent or null."""

    model: str | None = None


class GenerationRequest(AskedOfModel):
    """What both generating endpoints take. The sampling fields are vLLM's, by name, range and meaning; only
    `repetition_penalty` has bounds of our own, which keep logits finite."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    best_of: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    speculate: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_SALT)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: object) -> object:
        """Before each of them is looked at: a dict knows no `fail_fast`."""
        if isinstance(value, dict) and len(value) > MOST_BIASES:
            raise ValueError(f"must have at most {MOST_BIASES} entries, not {len(value)}")
        return value

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def num_choices(self) -> int:
        """Number of answers for each prompt."""
        return self.n or 1

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_choices

    @property
    def streaming(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


class TextPart(Body):
    """One part of a message."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _text_only(cls, value: object) -> object:
        if isinstance(value, str) and value != "text":
            raise ValueError('must be "text": this model reads no images, sounds or files')
        return value


Content = str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]


class CalledFunction(Body):
    """`arguments` is JSON text of an object, as the model once wrote it; chat templates get the object."""

    name: str
    arguments: str | None = None

    @field_validator("arguments")
    @classmethod
    def _object_in_json(cls, value: str | None) -> str | None:
        try:
            parsed = json.loads(value or "{}")
            json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # A lone surrogate is no text.
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError("must be the JSON text of an object")
        if _nested(parsed) > MOST_NESTED:
            raise ValueError(f"must not be nested more than {MOST_NESTED} deep")
        return value


def _nested(value: Any) -> int:
    """How many objects and lists lie in each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


class CalledTool(Body):
    """A call that the assistant made in an earlier turn; `index` is a left-over of streaming."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Body):
    """One message. Unknown fields pass only while they say nothing (null or empty), as SDKs send them back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it; "developer" is OpenAI's newer word for "system"."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        for field in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


class Function(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call. `strict` may not be true: no grammar holds the model to the schema."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_unset=True, exclude_none=True)
        function.pop("strict", None)
        return {"type": self.type, "function": function}


class TemplatedRequest(AskedOfModel):
    """A conversation, and how its prompt is made of it."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def switches(self, known: Collection[str]) -> dict[str, Any]:
        """The variables of the chat template's own that are set; null says nothing."""
        return {k: v for k, v in (self.chat_template_kwargs or {}).items() if v is not None and k in known}

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model gets to see."""
        if self.tool_choice == "none":
            return []
        return [tool.for_template() for tool in self.tools or []]


class ChatCompletionRequest(TemplatedRequest, GenerationRequest):
    """`max_tokens` is the older name of `max_completion_tokens`, which wins where both are given, as at OpenAI."""

    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None


class CompletionRequest(GenerationRequest):
    """`prompt` is a text, token ids, or a list of either."""

    prompt: (
        str
        | PromptIds
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    )
    add_special_tokens: bool | None = None
    echo: bool | None = None

    @property
    def prompt_is_one(self) -> bool:
        return isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Whatever form it came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt_is_one:
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if isinstance(item, str)] or [
            item for item in self.prompt if isinstance(item, list)
        ]


class TokenizeRequest(AskedOfModel):
    """A bare text, tokenised as /v1/completions would."""

    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(TemplatedRequest):
    """A conversation, tokenised as /v1/chat/completions would."""

    return_token_strs: bool | None = None


class DetokenizeRequest(AskedOfModel):
    tokens: PromptIds
