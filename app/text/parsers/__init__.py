"""Parsers of output, a file for each family of models."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """The certain part of one piece of output. The order of content and calls within the piece is not kept."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
