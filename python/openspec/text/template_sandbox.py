"""The sandbox that chat templates run in: jinja2's own, with transformers' conveniences."""

from __future__ import annotations

import json
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(source: str, now: datetime) -> jinja2.Template:
    """A template whose code reaches neither Python's internals nor files, at a time that stands.

    Raises:
        jinja2.TemplateError: not a template.
    """
    environment = ImmutableSandboxedEnvironment(
        # Both keep what a template makes of constants from being made as it is compiled.
        optimized=False,
        finalize=_unchanged,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment.from_string(source)


@jinja2.pass_context
def _unchanged(_: Context, value: object) -> object:
    return value


class _GenerationTag(Extension):
    """`{% generation %}`, with which training marks what the model writes; here just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """A scope of its own, as transformers'."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
