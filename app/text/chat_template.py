"""Chat templates: Jinja in its sandbox, with the globals and filters of Transformers.

A template comes with a checkpoint, and the lists it loops over come with a request. `app.text.sandbox` bounds both.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from app.config.error import ConfigError
from app.text.parsers import format_for
from app.text.sandbox import BoundedEnvironment


class ChatTemplateError(ConfigError):
    """A template that cannot be used, or that cannot render the messages. Then the text is for the client."""


_STANDARD_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
_MESSAGE_NAME = re.compile(r"""\b(?:message|msg|m)(?:\.name\b|\[['"]name['"]\]|\.get\(['"]name['"])""")
_CUT = "\ue000 the answer goes on here \ue001"
"""End of a final message that is to be continued. The rendered text is cut here."""


class ChatTemplate:
    """A compiled template, or the absence of one, whose `source` is empty and with which `render` raises.

    `special` are the special tokens that a template may name. `variables` are the names that this template reads,
    and `switches` those that `chat_template_kwargs` may set, sorted.
    `call_format` is the form of tool calls that it teaches, which decides how it gets messages and tools.
    """

    def __init__(self, source: str | None, special: dict[str, str]) -> None:
        self.source = text = source or ""
        self._special = special
        self._environment = environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.globals.update(_GLOBALS)
        with environment.limits():
            tree = environment.parse_bounded(text)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            predefined = _set_before_read(tree) | _STANDARD_VARIABLES | special.keys() | _GLOBALS.keys()
            self._template = None if source is None else environment.compile_bounded(tree)
        self.switches = sorted(self.variables - predefined)
        # A template may write the first call of a message and leave others out.
        self.takes_one_call = "message.tool_calls[0]" in text and "in message.tool_calls" not in text
        self.writes_calls = "tool_calls" in text
        self.writes_reasoning = "reasoning_content" in text or ".thinking" in text  # the latter is gpt-oss's name
        self.writes_names = _MESSAGE_NAME.search(text) is not None
        self.call_format = format_for("auto", text)

    @classmethod
    def load(
        cls, folder: Path, settings: dict[str, Any], special: dict[str, str], file: Path | None = None
    ) -> "tuple[ChatTemplate, ChatTemplate]":
        """Load the templates of conversations without and with tools: one, unless another is named `tool_use`.

        They come from a file, else from chat_template.jinja, chat_template.json, or `chat_template` of
        tokenizer_config.json; and `tool_use` from additional_chat_templates, where Transformers now keeps it.
        Raises ChatTemplateError, which names the file, if it cannot be read or the template is not Jinja.
        """
        if file is not None and not file.is_file():
            why = "is no file; give one with a template in Jinja, because names and texts of templates are not taken"
            raise ChatTemplateError(f"--chat-template {file} {why}")
        try:
            if (path := file or folder / "chat_template.jinja").is_file():
                source: Any = path.read_text(encoding="utf-8")
            elif (path := folder / "chat_template.json").is_file():
                source = json.loads(path.read_text(encoding="utf-8"))["chat_template"]
            else:
                path = folder / "tokenizer_config.json"
                source = settings.get("chat_template")
            if isinstance(source, list):
                source = {item["name"]: item["template"] for item in source}
            named = source if isinstance(source, dict) else {"default": source}
            default = path, named.get("default")
            with_tools = path, named.get("tool_use")
            if file is None and (path := folder / "additional_chat_templates" / "tool_use.jinja").is_file():
                with_tools = path, path.read_text(encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ChatTemplateError(f"the chat template in {path} cannot be read: {reason}") from None
        template = cls._compiled(*default, special)
        return template, template if with_tools[1] is None else cls._compiled(*with_tools, special)

    @classmethod
    def _compiled(cls, path: Path, source: Any, special: dict[str, str]) -> "ChatTemplate":
        if source is not None and not isinstance(source, str):
            kind = type(source).__name__
            raise ChatTemplateError(f"the chat template in {path} must be a string of Jinja, not {kind}")
        try:
            return cls(source, special)
        except Exception as error:  # Nesting too deep for Python's compiler is no TemplateError.
            raise ChatTemplateError(f"the chat template in {path} cannot be compiled: {error}") from None

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the prompt of `messages`, as `render_joining` makes it."""
        return self.render_joining(messages, **options)[0]

    def render_joining(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, bool]:
        """Return the prompt of `messages`, and whether their system messages had to be joined for it.

        Where the template refuses several of them, or one that comes late, or leaves one out, it gets them as one, the
        first. Both renderings share the limits of one, and the error is that of the first. Raises ChatTemplateError.

        With `add_generation_prompt` it ends where the assistant speaks. With `continue_final_message` it ends where the
        text of the last message ends. `switches` are variables that only this template knows, like `enable_thinking`.
        """
        system = [message["content"] for message in messages if message["role"] == "system"]
        others = [message for message in messages if message["role"] != "system"]
        text, error = "", None
        with self._environment.limits():
            try:
                text = self._render(messages, **options)
            except ChatTemplateError as refusal:
                error = refusal
            if any(message["role"] == "system" for message in messages[1:]) and (error or not _has_all(text, system)):
                first = {"role": "system", "content": "\n\n".join(filter(None, system))}
                with suppress(ChatTemplateError):
                    joined = self._render([first, *others], **options)
                    if error or _has_all(joined, system):
                        return joined, True
        if error:
            raise error
        return text, False

    def _render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        switches: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise ChatTemplateError("This model has no chat template. Use /v1/completions, or add chat_template.jinja.")
        if continue_final_message:
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + _CUT}]
        variables = dict(switches or {}) | self._special
        try:
            if self.call_format is not None and self.call_format.for_template is not None:
                messages, tools = self.call_format.for_template(messages, tools)
            text = self._template.render(
                variables,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error}") from None
        except Exception as error:  # A template can raise any exception.
            raise ChatTemplateError(f"The model's chat template fails on these messages: {error}") from None
        if not continue_final_message:
            return text
        end = text.rfind(_CUT)
        if end < 0:
            raise ChatTemplateError(
                "The model's chat template leaves the final message out, so it cannot be continued."
            )
        return text[:end]


def _has_all(text: str, parts: list[str]) -> bool:
    """Return whether a text has these parts, one behind the other. Templates may trim them."""
    end = 0
    for part in map(str.strip, parts):
        if (start := text.find(part, end)) < 0:
            return False
        end = start + len(part)
    return True


def _set_before_read(tree: jinja2.nodes.Template) -> set[str]:
    """Return the names that the template sets earlier than it reads them, like the variables of a loop."""
    first: dict[str, str] = {}
    for name in _names(tree):
        first.setdefault(name.name, name.ctx)
    return {name for name, context in first.items() if context != "load"}


def _names(node: jinja2.nodes.Node) -> Iterator[jinja2.nodes.Name]:
    """Yield the names in a node in the order of their use: a target is set after its value was read."""
    if isinstance(node, jinja2.nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    if isinstance(node, jinja2.nodes.Assign):
        children = [*children[1:], children[0]]
    elif isinstance(node, jinja2.nodes.For):
        children = [children[1], children[0], *children[2:]]
    for child in children:
        yield from _names(child)


class _GenerationTag(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks assistant text for training. A server renders its content."""

    tags = {"generation"}  # noqa: RUF012 (the type is jinja2's)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_GLOBALS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": lambda form: datetime.now().strftime(form),
}
