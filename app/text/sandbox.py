"""Jinja's sandbox with bounds on time and memory, of each operation too.

A thread cannot be stopped, and a call in C does not look at the time. So no operation of a template may take long or
make much: operands, arguments and results have a weight, which bounds what a call in C does with them. What Python does
in between checks the time.
"""

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_SECONDS = 5.0
MAX_CHARACTERS = 2**25
"""Weight of a value, and length of a rendering: about what 32 Mi characters weigh."""
MAX_MADE = 16 * MAX_CHARACTERS
"""Of all values that one rendering makes."""
MAX_ITEMS = 2**20
MAX_BITS = 2**15
MAX_WIDTH = 10_000
MAX_SOURCE = 2**20
_MAX_SEPARATOR = 16
_ITEM_WEIGHT = 32
"""Weight of an item in a list or a dict, besides its own."""

_GLOBALS = {"lipsum", "cycler", "joiner"}
_FILTERS = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
_METHODS = {"encode", "expandtabs", "maketrans", "striptags", "to_bytes", "translate", "unescape"}
"""What no chat template needs, and what could not be bounded in a line."""
_OVER_ITEMS = set("batch groupby list map max min reject rejectattr select selectattr slice sort sum unique".split())
_WITH_WIDTH = {"batch", "center", "indent", "ljust", "rjust", "round", "slice", "tojson", "zfill"}
_BY_WORD = {"title", "urlencode", "wordcount"}
_CHECK, _MADE, _JOIN = "check time", "made value", "join texts"
"""Names of filters that no template can write."""
_WIDTH_BY_ARGUMENT = re.compile(r"%(?:\([^()]*\))?[-+ #0\d.]*\*|\{[^{}]*\{")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment whose templates are compiled with `compile_bounded`, and rendered within `limits`."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._thread = threading.local()
        for name in _GLOBALS:
            del self.globals[name]
        self.globals["namespace"] = _Namespace
        for name in _FILTERS:
            del self.filters[name]
        self.filters["tojson"] = self._to_json
        for name, function in self.filters.items():
            self.filters[name] = self._bounded(name, function)
        for name, function in list[tuple[str, Any]](self.tests.items()):
            self.tests[name] = self._bounded("", function)
        self.filters[_CHECK] = jinja2.pass_context(lambda *_: self.check())  # with the context nothing is folded
        self.filters[_MADE] = self.made
        self.filters[_JOIN] = self._join
        self.concat = self._concat  # type: ignore[method-assign]

    def parse_bounded(self, source: str) -> jinja2.nodes.Template:
        """Return the syntax tree of a template. Raises TemplateError."""
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateError(f"it has more than {MAX_SOURCE:,} characters")
        return self.parse(source)

    def compile_bounded(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """Return a template that checks its time and what it makes. Changes the tree."""
        _Bounds().visit(tree)
        tree.set_environment(self)
        code = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Bound what this thread compiles and renders within."""
        self._thread.end = time.monotonic() + MAX_SECONDS
        self._thread.made = 0
        self._thread.weights = {}
        try:
            yield
        finally:
            self._thread.weights = {}

    def check(self) -> None:
        if time.monotonic() > self._thread.end:
            raise jinja2.TemplateError(f"it takes longer than {MAX_SECONDS:g} s")

    def made(self, value: Any) -> Any:
        """Return a value that the template has made. Raises TemplateError if it is too large, or all of them are."""
        if isinstance(value, str):
            weight = size = len(value)
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise jinja2.TemplateError(f"it makes a number of more than {MAX_BITS:,} bits")
            return value
        elif isinstance(value, list | tuple | dict):
            weight, size = self._weight(value), _ITEM_WEIGHT * len(value)
        else:
            return value
        self._thread.made += size
        if self._thread.made > MAX_MADE:
            raise jinja2.TemplateError(f"its values have more than {MAX_MADE:,} characters together")
        self._refuse_above(weight)
        return value

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * right)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length() - 1)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            self._refuse_above(self._weight(value) * count)
        result = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(result, list | tuple):  # not counted anew when a loop collects a list
            self._thread.weights[id(result)] = result, self._weight(left) + self._weight(right)
        return self.made(result)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # str.format is wrapped
        if isinstance(owner, str):
            args = __self._bounded_arguments(__obj.__name__, owner, args, kwargs)
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _METHODS and super().is_safe_attribute(obj, attr, value)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or a test with bounds on its arguments and its result."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.check()
            before, value, rest = args[:first], args[first], args[first + 1 :]
            if name in _OVER_ITEMS and value:  # `map` and others take None for no items
                value = self._items(value)
            elif name == "join":
                value = list(self._items(value))
                separator = str(rest[0] if rest else kwargs.get("d", ""))
                self._refuse_above(self._weight(value) + len(value) * len(separator))
            elif isinstance(value, str):
                rest = self._bounded_arguments(name, value, rest, kwargs)
            if name in _WITH_WIDTH:
                self._check_widths(rest, kwargs)
            if name == "sum" and not isinstance(rest[1] if rest[1:] else kwargs.get("start", 0), int | float):
                raise jinja2.TemplateError("it sums what is no number")
            return self.made(function(*before, value, *rest, **kwargs))

        return bounded

    def _bounded_arguments(
        self, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the arguments for a method of a string, or for a filter. Raises TemplateError for a large result."""
        if name == "join" and args:
            args = (list(self._items(args[0])), *args[1:])
            self._refuse_above(self._weight(args[0]) + len(args[0]) * len(text))
        elif name == "replace":
            old, new = (*map(str, args), *(str(kwargs[key]) for key in ("old", "new") if key in kwargs))[:2]
            self._refuse_above(len(text) + text.count(old) * len(new))
        elif name in ("format", "format_map"):
            self._check_format(text, (args, kwargs))
        elif name == "indent":
            width = args[0] if args else kwargs.get("width", 4)
            self._refuse_above(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
        elif name in _BY_WORD and len(text) > MAX_ITEMS:
            raise jinja2.TemplateError(f"`{name}` gets more than {MAX_ITEMS:,} characters")
        if name in _WITH_WIDTH:
            self._check_widths(args, kwargs)
        return args

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON without the HTML escapes of Jinja's filter, by the arguments of Transformers."""
        if any(len(separator) > _MAX_SEPARATOR for separator in separators or ()):
            raise jinja2.TemplateError(f"it separates JSON by more than {_MAX_SEPARATOR} characters")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self._weight(value)
        return encoder.encode(value) if indent is None else self._concat(encoder.iterencode(value))

    def _check_format(self, text: str, values: Any) -> None:
        if _WIDTH_BY_ARGUMENT.search(text):
            raise jinja2.TemplateError("it formats with a width that is an argument")
        widths = sum(int(digits[:10]) for digits in re.findall(r"\d+", text))
        self._refuse_above(len(text) + widths + (text.count("%") + text.count("{")) * self._weight(values))

    def _check_widths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for width in (*args, *kwargs.values()):
            if (isinstance(width, int) and abs(width) > MAX_WIDTH) or (
                isinstance(width, str) and len(width) > MAX_WIDTH
            ):
                raise jinja2.TemplateError(f"it gives a width or a count of more than {MAX_WIDTH:,}")

    def _check_bits(self, bits: int) -> None:
        if bits > MAX_BITS:
            raise jinja2.TemplateError(f"it makes a number of more than {MAX_BITS:,} bits")

    def _refuse_above(self, weight: int) -> None:
        if weight > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"it makes more than {MAX_CHARACTERS:,} characters of them")

    def _items(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and check time and number meanwhile."""
        for count, item in enumerate(items):
            self.check()
            if count == MAX_ITEMS:
                raise jinja2.TemplateError(f"it makes a list of more than {MAX_ITEMS:,} items")
            yield item

    def _weight(self, value: Any) -> int:
        """Return what bounds the work of any operation on a value, which counts each time it is held in another.

        Templates cannot change lists and dicts, so their weights are remembered.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        known = self._thread.weights.get(id(value))
        if known is not None:
            return known[1]
        weight = 0
        for item in chain(value, value.values()) if isinstance(value, dict) else value:
            weight += _ITEM_WEIGHT + self._weight(item)
            self._refuse_above(weight)
        self._thread.weights[id(value)] = value, weight
        return weight

    def _join(self, *values: Any) -> str:
        """Return the values of `~` as one text."""
        return self._concat(map(str, values))

    def _concat(self, parts: Iterable[str]) -> str:
        """Return the parts of a rendering, a macro or a block as one text."""
        texts: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            self._refuse_above(length)
            texts.append(part)
        return self.made("".join(texts))


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose text is not that of its values, because these have no bound together."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Bounds(jinja2.visitor.NodeTransformer):
    """Adds a check of the time to every loop and macro, and one of the size to all that no call or operator makes."""

    def _visit_block(self, node: Any) -> Any:
        check = jinja2.nodes.Filter(jinja2.nodes.Const(None), _CHECK, [], [], None, None, lineno=node.lineno)
        node = self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(check, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _visit_block

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return jinja2.nodes.Filter(first, _JOIN, rest, [], None, None, lineno=node.lineno)

    def _visit_literal(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(
            isinstance(inner, jinja2.nodes.Const) for inner in node.iter_child_nodes()
        ):
            return node
        return jinja2.nodes.Filter(node, _MADE, [], [], None, None, lineno=node.lineno)

    visit_List = visit_Tuple = visit_Dict = _visit_literal

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        return self._visit_literal(node) if isinstance(node.arg, jinja2.nodes.Slice) else self.generic_visit(node)
