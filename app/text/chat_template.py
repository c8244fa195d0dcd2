"""Chat templates: Jinja in the sandbox, with the same globals and filters as Transformers gives them."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The template cannot be used, or it cannot render these messages; then the message is for the client."""


class ChatTemplate:
    """A compiled template, or none: then `render` refuses. `special` are the special tokens a template may name."""

    def __init__(self, source: str | None, special: dict[str, str]) -> None:
        self.source = source
        self._special = special
        self._template = _environment().from_string(source) if source is not None else None

    @classmethod
    def load(cls, folder: Path, settings: dict[str, Any], special: dict[str, str]) -> "ChatTemplate":
        """From chat_template.jinja, else chat_template.json, else `chat_template` in tokenizer_config.json.

        Raises ChatTemplateError, naming the file, if it cannot be read or the template is not Jinja.
        """
        try:
            if (path := folder / "chat_template.jinja").is_file():
                source: Any = path.read_text(encoding="utf-8")
            elif (path := folder / "chat_template.json").is_file():
                source = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
            else:
                path = folder / "tokenizer_config.json"
                source = settings.get("chat_template")
            if isinstance(source, list):
                source = {item["name"]: item["template"] for item in source}.get("default")
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the chat template in {path} cannot be read: {reason}") from None
        if source is not None and not isinstance(source, str):
            kind = type(source).__name__
            raise ChatTemplateError(f"the chat template in {path} must be a string of Jinja, not {kind}")
        try:
            return cls(source, special)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template in {path} cannot be compiled: {error}") from None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for `messages` up to where the assistant speaks. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("This model has no chat template. Use /v1/completions, or add chat_template.jinja.")
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatTemplateError(f"The model's chat template fails on these messages: {error}") from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; a server renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
