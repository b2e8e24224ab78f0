"""The sandbox that chat templates run in: transformers' conveniences, and limits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from openspec.errors import RequestError

MAX_RENDERED_CHARS = 1 << 24
MAX_RENDER_S = 5.0
PADDING_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"}
)
PADDING_FILTERS = ("center", "format", "indent", "urlize", "wordwrap", "xmlattr")

_deadline: ContextVar[float] = ContextVar("deadline")


def compile_template(source: str) -> jinja2.Template:
    """A template that checks the limits while it renders.

    Raises:
        jinja2.TemplateError: not a template.
    """
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    for name in PADDING_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _new_dict
    environment.globals["namespace"] = _Namespace
    tree = environment.parse(source)
    _LimitChecks().visit(tree)
    tree.set_environment(environment)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Templates rendered within end with RequestError after `seconds`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline() -> None:
    """Ends a rendering that takes too long; called from within templates."""
    if time.monotonic() > _deadline.get(float("inf")):
        raise RequestError("the chat template takes too long", "messages")


def checked_text(text: str) -> str:
    """`text`, unless it is too long; called from within templates."""
    check_size(len(text))
    return text


def check_size(num_chars: int) -> None:
    """Refuses texts longer than a chat can be."""
    if num_chars > MAX_RENDERED_CHARS:
        raise RequestError(f"the chat is longer than {MAX_RENDERED_CHARS} characters", "messages")


class _Namespace(Namespace):
    """Jinja's namespace without underscore names, which lead to Python's internals."""

    def __init__(*args: object, **kwargs: object) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name[:32]!r} is not allowed")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the clock checked at every call and loop, and sizes before they grow."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call(
        __self,
        __context: Context,
        __obj: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Also checks the clock."""
        check_deadline()
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Also refuses the methods that can make a giant text out of a short one."""
        return attr not in PADDING_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Also refuses operations that can make a giant value out of small ones."""
        check_deadline()
        sized = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        if operator == "**" or (operator == "%" and sized):
            raise SecurityError(f"the operator {operator} is not allowed here")
        if operator == "*" and sized:
            check_size(len(sized[0]) * max(v for v in (left, right, 0) if isinstance(v, int)))
        elif operator == "+":
            check_size(sum(len(value) for value in sized))
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}`, with which training marks what the model writes; here just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """A scope of its own, as transformers'."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _LimitChecks(NodeTransformer):
    """Adds to a template's syntax tree what the sandbox has no hook for."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Checks the clock at every turn."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(check_deadline, []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        """Checks the size of what `~` makes."""
        self.generic_visit(node)
        return _call(checked_text, [node])


def _call(function: Callable[..., object], arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(
        nodes.ImportedName(f"{__name__}.{function.__name__}"), arguments, [], None, None
    )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': without HTML escapes."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise jinja2.TemplateError("tojson: indent must be 0 to 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:256])


def _new_dict(*args: object, **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)
