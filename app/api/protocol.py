"""The requests that are understood, and the answers, in OpenAI's shapes.

Only fields that are honoured appear here. What else a client sends ends up in `model_extra`, where validation.py finds
what must be refused. Values are strict: "5" is not a number. Every list has a greatest length and fails at its first
wrong item (`fail_fast`), so that no body makes the server busy with complaints.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.types import FinishReason

MOST_MESSAGES = 4096
MOST_PARTS = 1024
MOST_PROMPTS = 4096
MOST_PROMPT_IDS = 2**20
MOST_STOPS = 64
MOST_STOP_IDS = 1024
LONGEST_STOP = 1024

TokenId = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
PromptIds = Annotated[list[TokenId], Field(max_length=MOST_PROMPT_IDS, fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints take. None means that the field was absent or null."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    speculate: bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(BaseModel):
    """One part of a message; unknown fields are as in ChatMessage."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Unknown fields pass only while they say nothing (null or empty), as SDKs send them back."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it; "developer" is OpenAI's newer word for "system"."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return message if self.name is None else message | {"name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """`max_tokens` is the older name of `max_completion_tokens`, which wins where both are given, as at OpenAI."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionRequest(GenerationRequest):
    """`prompt` becomes a list of texts or of lists of token ids, whatever form it came in."""

    prompt: (
        Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[PromptIds], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    )

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return [value]
        return value

    @field_validator("prompt")
    @classmethod
    def _some_prompt(cls, value: list[str] | list[list[int]]) -> list[str] | list[list[int]]:
        if not value:
            raise ValueError("must not be an empty list")
        return value


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached` of the prompt were found in the prefix cache."""

    prompt: int
    completion: int
    cached: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ChatAnswers:
    """Shapes the answers to one chat request. `include_usage` makes every chunk say `"usage": null`."""

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "chat.completion", "created": int(time.time()), "model": model}
        self._chunk_head = self._head | {"object": "chat.completion.chunk"}
        self._tail = {"usage": None} if include_usage else {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What is sent before an answer's first text."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._chunk(index, {"content": text}, None)

    def closing(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._chunk(index, {}, reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._chunk_head | {"choices": [], "usage": usage.body()}

    def whole(self, answers: Sequence[tuple[str, FinishReason]], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(answers)
        ]
        return self._head | {"choices": choices, "usage": usage.body()}

    def _chunk(self, index: int, delta: dict[str, str], reason: FinishReason | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk_head | {"choices": [choice]} | self._tail


class CompletionAnswers:
    """Shapes the answers to one completions request, as ChatAnswers does for chat."""

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._tail = {"usage": None} if include_usage else {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return self._head | {"choices": [self._choice(index, text, None)]} | self._tail

    def closing(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._head | {"choices": [self._choice(index, "", reason)]} | self._tail

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self._head | {"choices": [], "usage": usage.body()}

    def whole(self, answers: Sequence[tuple[str, FinishReason]], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(index, text, reason) for index, (text, reason) in enumerate(answers)]
        return self._head | {"choices": choices, "usage": usage.body()}

    def _choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


Answers = ChatAnswers | CompletionAnswers
