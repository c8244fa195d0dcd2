"""Requests in the shape of OpenAI's Responses API.

Lists and strings have the bounds of schemas.py. refusals.py has the fields that are refused.
"""

from base64 import b64decode, b64encode
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from app.api.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MEDIA,
    Body,
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    Count,
    FunctionName,
    MediaPart,
    OtherTool,
    RefusalPart,
    SamplingRequest,
    at_most,
    known_type,
    type_of,
)

_SEAL = "text:"
_TEXTS = ("input_text", "output_text")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")

MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]


class InputPart(Body):
    """A text of a message, or of a function's output. `annotations` change no text."""

    type: Annotated[
        Literal["input_text", "output_text"],
        known_type(
            *_TEXTS,
            why='must be "input_text", "output_text" or "refusal": this model reads no images, sounds or files',
        ),
    ]
    text: str
    annotations: Any = None


def _kind_of_part(value: Any) -> str:
    return "RefusalPart" if type_of(value) == "refusal" else "InputPart"


Part = Annotated[
    Annotated[InputPart, Tag("InputPart")] | Annotated[RefusalPart, Tag("RefusalPart")], Discriminator(_kind_of_part)
]
InputText = str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputItem(Body):
    """An item of the conversation, which an `item_reference` finds by its `id`. The `status` means nothing here."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(InputItem):
    """A message. `phase` is a label of OpenAI's models and means nothing here."""

    type: Annotated[
        Literal["message"] | None,
        known_type(*_ITEMS, why=f"must be {', '.join(_ITEMS)}: there are no built-in tools"),
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputText
    phase: str | None = None


class FunctionCallItem(CalledFunction, InputItem):
    """A call that the assistant made in an earlier turn, of a function in the `namespace`, if there is one."""

    type: Literal["function_call"]
    call_id: str
    namespace: str | None = None


def _kind_of_result(value: Any) -> str:
    kind = type_of(value)
    return "MediaPart" if isinstance(kind, str) and kind in MEDIA else "InputPart"


ResultPart = Annotated[
    Annotated[InputPart, Tag("InputPart")] | Annotated[MediaPart, Tag("MediaPart")], Discriminator(_kind_of_result)
]


class FunctionCallOutput(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[ResultPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningPart(Body):
    """A part of reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Reasoning = Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(InputItem):
    """Reasoning of an earlier turn. The `summary` counts only where the whole `content` is absent, and
    `encrypted_content`, which is this server's `sealed` text, where both are."""

    type: Literal["reasoning"]
    summary: Reasoning | None = None
    content: Reasoning | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning, "" if there is none or another server encrypted it."""
        return "\n".join(part.text for part in self.content or self.summary or []) or _opened(self.encrypted_content)


def sealed(text: str) -> str:
    """Return a reasoning as `encrypted_content`, which nothing encrypts: its item has the text beside it."""
    return _SEAL + b64encode(text.encode()).decode()


def _opened(sealed: str | None) -> str:
    """Return the text that was sealed, or "" for another server's."""
    if not sealed or not sealed.startswith(_SEAL):
        return ""
    try:
        return b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return ""


class ItemReference(Body):
    """An item of an earlier response, or of its input, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind_of_item(value: Any) -> str:
    """Return the kind of an item, which is a message if no other is named, and a reference if it is an id alone."""
    kind = type_of(value)
    if isinstance(value, dict) and kind is None and "id" in value and "role" not in value:
        return "item_reference"
    return kind if kind in _ITEMS else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]
ITEMS = TypeAdapter(list[Item])


class FunctionTool(Body):
    """A function that the model may call. Unlike chat's, it has no nested `function`.

    `defer_loading` lets a server search for it first. Here it is offered at once.
    """

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None


def _kind_of_tool(value: Any) -> str:
    """Return the name of the class that reads a tool. One without a type is refused as a function."""
    kind = type_of(value)
    if kind == "namespace":
        return "NamespaceTool"
    return "OtherTool" if isinstance(kind, str) and kind != "function" else "FunctionTool"


def _kind_of_inner_tool(value: Any) -> str:
    """Return the name of the class that reads a tool of a namespace, which has no namespaces inside."""
    return _kind_of_tool(value).replace("NamespaceTool", "OtherTool")


_Function = Annotated[FunctionTool, Tag("FunctionTool")]
_Other = Annotated[OtherTool, Tag("OtherTool")]
InnerTool = Annotated[_Function | _Other, Discriminator(_kind_of_inner_tool)]


class NamespaceTool(Body):
    """Tools that belong together, like those of an MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[InnerTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


Tool = Annotated[
    _Function | _Other | Annotated[NamespaceTool, Tag("NamespaceTool")],
    Discriminator(_kind_of_tool),
]


class ChosenFunction(Body):
    """The function that the model must call, of the `namespace`, if there is one."""

    type: Literal["function"]
    name: FunctionName
    namespace: str | None = None


class ReasoningOptions(Body):
    """Options of reasoning. It comes whole, whatever the `summary`."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Body):
    """Format of the answer."""

    type: Literal["text"] = "text"


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    """Options of a stream. There is none to choose."""


class ResponsesRequest(SamplingRequest):
    """A conversation to answer. `max_output_tokens` counts reasoning too."""

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Count | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataText] | None, at_most(MAX_METADATA)] = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None


class ConversationRequest(ChatCompletionRequest):
    """A request as a conversation of chat. It may have a message more, because of `instructions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES + 1, fail_fast=True)]
