"""Jinja as chat templates use it, in a sandbox with bounds: a template comes with a model, from anywhere."""

from __future__ import annotations

import json
import time
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sglite.errors import InvalidRequestError

MAX_SOURCE = 512 * 1024
MAX_OUTPUT = 64 * 1024 * 1024
MAX_SECONDS = 5.0
MAX_RANGE = 10_000
MAX_REPEAT = 1_000_000


class CompiledTemplate:
    """``render`` raises InvalidRequestError for what the template refuses and for one that exceeds the bounds."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise InvalidRequestError(f"the chat template is longer than {MAX_SOURCE} characters", param="template")
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise InvalidRequestError(f"the chat template is not valid Jinja: {error}", param="template") from error

    def render(self, **variables: Any) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**variables):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT or time.monotonic() > deadline:
                    raise InvalidRequestError("the chat template makes too much text", param="messages")
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as e:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {e}", param="messages") from e
        return "".join(parts)


@lru_cache(64)
def compile_template(source: str) -> CompiledTemplate:
    """Raises InvalidRequestError (``param="template"``) where ``source`` is not Jinja."""
    return CompiledTemplate(source)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _size(left) * _size(right) > MAX_REPEAT:
            raise TemplateError(f"the operator {operator} is limited to {MAX_REPEAT} items")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    """How much a factor can blow the other up."""
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


class _Generation(Extension):
    """``{% generation %}``: marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way to declare it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(1)
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now, range=_range)
    return environment


def _range(*bounds: int) -> range:
    span = range(*bounds)
    if len(span) > MAX_RANGE:
        raise TemplateError(f"range is limited to {MAX_RANGE} items")
    return span


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as models saw it in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
