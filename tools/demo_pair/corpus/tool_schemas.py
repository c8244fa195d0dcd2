"""The JSON of tools, as agent frameworks and people write it: the same schema in different orders and with extras."""

from random import Random
from typing import Any

from tools.demo_pair.corpus.tool_kinds import Parameter, Tool

STYLES = ("plain", "shuffled", "openai", "agents", "pydantic", "langchain", "instructor", "vercel")
_DRAFT = "http://json-schema.org/draft-07/schema#"


def schema(rng: Random, tool: Tool, style: str) -> dict[str, Any]:
    """Return one entry of a request's `tools`."""
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if not tool.description and (style not in ("agents", "instructor") or rng.random() < 0.5):
        del function["description"]
    properties = {p.name: _property(rng, tool, p, style) for p in tool.parameters}
    required = {"required": [p.name for p in tool.parameters]}
    title = tool.name.title().replace("_", "")
    match style:
        case "plain" | "shuffled":
            parameters = {"type": "object", "properties": properties, **required}
        case "openai":
            parameters = {"type": "object", "properties": properties, **required, "additionalProperties": False}
        case "agents":
            parameters = {"properties": properties, **required, "title": f"{tool.name}_args", "type": "object"}
            parameters["additionalProperties"] = False
        case "pydantic":
            parameters = {"additionalProperties": False, "properties": properties, **required, "type": "object"}
        case "langchain":
            parameters = {"properties": properties, **required, "type": "object"}
        case "instructor":
            parameters = {"properties": properties, "required": required["required"], "title": title, "type": "object"}
        case _:
            parameters = {"$schema": _DRAFT, "type": "object", "properties": properties, **required}
            parameters["additionalProperties"] = False
    function["parameters"] = parameters
    if style == "agents" or (style in ("openai", "pydantic") and rng.random() < 0.5):
        function["strict"] = True
    if style == "shuffled":
        function["parameters"] = _shuffled(rng, parameters)
        function = _shuffled(rng, function)
    return {"type": "function", "function": function}


def _shuffled(rng: Random, entries: dict[str, Any]) -> dict[str, Any]:
    return dict(rng.sample(list(entries.items()), len(entries)))


def _property(rng: Random, tool: Tool, parameter: Parameter, style: str) -> dict[str, Any]:
    kind = "string" if parameter.is_string else rng.choice(("integer", "integer", "number"))
    told = {"description": parameter.description} if tool.describes_parameters else {}
    match style:
        case "agents" | "instructor":
            return {**told, "title": parameter.name.title(), "type": kind}
        case "pydantic":
            return {**told, "type": kind}
        case _:
            return {"type": kind, **told}
