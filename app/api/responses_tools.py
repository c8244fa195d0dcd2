"""Tools of /v1/responses as functions of chat. Those of a namespace get names that no other function has."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from app.api.errors import bad_request, clip
from app.api.responses_schemas import FunctionTool, NamespaceTool, Tool
from app.api.schemas import OtherTool

MAX_JOINED_LENGTH = 64  # of a namespace and a function, as OpenAI has it for all names
_OF_CHAT = {"name", "description", "parameters", "strict"}


class FlatTool(NamedTuple):
    """A tool that is no namespace. `path` is its place in the request, and `group` its namespace."""

    path: str
    tool: FunctionTool | OtherTool
    group: NamespaceTool | None = None

    @property
    def name(self) -> str | None:
        """The name that the model reads and writes, None for a tool that is left out."""
        if isinstance(self.tool, OtherTool):
            return None
        return joined_name(self.group.name if self.group else None, self.tool.name)

    def for_chat(self) -> dict[str, Any]:
        """Return the tool as one of /v1/chat/completions."""
        fields = {name: value for name, value in self.tool if name in _OF_CHAT & self.tool.model_fields_set}
        if isinstance(self.tool, OtherTool):
            return {"type": self.tool.type}
        if self.group and self.group.description and self.tool is _first_function(self.group):
            about = f"{self.group.name}: {self.group.description}"
            fields["description"] = f"{about}\n\n{self.tool.description}" if self.tool.description else about
        return {"type": "function", "function": fields | {"name": self.name}}


def flatten(tools: Iterable[Tool]) -> Iterator[FlatTool]:
    """Yield the tools, and in the place of a namespace its own."""
    for index, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            yield from (FlatTool(f"tools.{index}.tools.{i}", inner, tool) for i, inner in enumerate(tool.tools))
        else:
            yield FlatTool(f"tools.{index}", tool)


def check_names(tools: Sequence[FlatTool]) -> None:
    """Raise ApiError for a function of a namespace whose joined name is too long or another's."""
    counts = Counter(tool.name for tool in tools)
    for tool in tools:
        if tool.group is None or tool.name is None:
            continue
        param, offered = f"{tool.path}.name", f"is offered as `{clip(tool.name)}`"
        if len(tool.name) > MAX_JOINED_LENGTH:
            raise bad_request(
                f"`{param}` {offered}, which has {len(tool.name)} characters; {MAX_JOINED_LENGTH} are allowed. Shorten "
                "it, or the name of its namespace.",
                param,
            )
        if counts[tool.name] > 1:
            raise bad_request(f"`{param}` {offered}, and so is another tool. Rename one of them.", param)


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


def _first_function(group: NamespaceTool) -> FunctionTool | None:
    """Return the function whose description also tells what the namespace is for. The prompt has no other place."""
    return next((tool for tool in group.tools if isinstance(tool, FunctionTool)), None)
