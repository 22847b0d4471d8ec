"""jsonschema's validators, with our formats and patterns, and with a limit on the work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from decimal import Decimal
from functools import cache, cached_property
from typing import Any

import jsonschema
from jsonschema import validators
from jsonschema.exceptions import ValidationError
from jsonschema_specifications import REGISTRY

from sglite.errors import GrammarError
from sglite.runtime.grammar import formats
from sglite.runtime.grammar.ecma import translate
from sglite.runtime.grammar.refs import Dialect, Json, Resources, Scope

MAX_STEPS = 20_000
"""Keywords looked at in one validation: some 100 ms. Schemas exist that take for ever."""

_steps: ContextVar[int] = ContextVar("steps")
Keyword = Callable[[Any, Any, Any, Any], Any]


class Validation:
    """Checks values against a schema, which must not name its dialect itself, or any of its nodes."""

    def __init__(self, schema: Json, dialect: Dialect) -> None:
        self._schema = schema
        self._dialect = dialect

    @cached_property
    def _validator(self) -> Any:
        return _class_for(self._dialect.year)(self._schema, registry=REGISTRY)

    def error(self, value: Json) -> ValidationError | None:
        """The first thing that is wrong with a whole value. Raises GrammarError (limit)."""
        return _first(self._validator, value)

    def error_at(self, node: dict[str, Any], scope: Scope, value: Json) -> ValidationError | None:
        """The first thing that is wrong with ``value`` under a node of the schema."""
        changes: dict[str, Any] = {"schema": node}
        if isinstance(scope, Resources):
            changes["_resolver"] = scope.resolver
        return _first(self._validator.evolve(**changes), value)


def _first(validator: Any, value: Json) -> ValidationError | None:
    token = _steps.set(MAX_STEPS)
    try:
        return next(validator.iter_errors(value), None)
    except RecursionError:
        raise GrammarError("the schema nests too deeply to be checked", kind="limit", param="json_schema") from None
    finally:
        _steps.reset(token)


@cache
def _class_for(year: int) -> Any:
    base = {
        4: jsonschema.Draft4Validator,
        6: jsonschema.Draft6Validator,
        7: jsonschema.Draft7Validator,
        2019: jsonschema.Draft201909Validator,
        2020: jsonschema.Draft202012Validator,
    }[year]
    ours: dict[str, Keyword] = {
        "pattern": _pattern,
        "format": _format,
        "multipleOf": _multiple_of,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    keywords = {**base.VALIDATORS, **ours}
    extend: Any = validators.extend
    return extend(base, {name: _counted(keyword) for name, keyword in keywords.items()})


def _counted(keyword: Keyword) -> Keyword:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        left = _steps.get() - 1
        _steps.set(left)
        if left < 0:
            message = f"checking an answer takes more than {MAX_STEPS} steps; simplify the schema"
            raise GrammarError(message, kind="limit", param="json_schema")
        yield from keyword(validator, value, instance, schema) or ()

    return counted


# ------------------------------------------------------------------------------------------------------ our keywords


def _search(pattern: str, text: str) -> bool:
    """A pattern that takes too long counts as matching: the mask has enforced it wherever it could."""
    try:
        return translate(pattern).search(text)
    except TimeoutError:
        return True


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _search(pattern, instance):
        yield ValidationError(f"the string does not match {pattern[:100]!r}")


def _format(validator: Any, name: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    known = formats.known(name)
    if known is not None and isinstance(instance, str) and not known.check(instance):
        yield ValidationError(f"the string is no {name}")


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Exactly, in decimals: 19.99 is a multiple of 0.01."""
    if isinstance(instance, int | float) and not isinstance(instance, bool) and not _divides(divisor, instance):
        yield ValidationError(f"the number is not a multiple of {divisor}")


def _divides(divisor: float, number: float) -> bool:
    try:
        return (
            number % divisor if isinstance(number, int) and isinstance(divisor, int) else _rest(number, divisor)
        ) == 0
    except (ArithmeticError, ValueError):
        return False


def _rest(number: float, divisor: float) -> Decimal:
    return Decimal(repr(number)) % Decimal(repr(divisor))


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if isinstance(instance, dict) else ():
        for name, value in instance.items():
            if _search(pattern, name):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    for name, value in instance.items() if isinstance(instance, dict) else ():
        known = name in schema.get("properties", {}) or any(
            _search(p, name) for p in schema.get("patternProperties", ())
        )
        if not known:
            yield from validator.descend(value, part, path=name)


def parse(text: bytes | bytearray | str) -> Json:
    """The value of a JSON text. Raises ValueError for what JSON does not know, too."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(word: str) -> Json:
    raise ValueError(f"{word} is not JSON")
