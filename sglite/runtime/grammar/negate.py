"""The complement of a schema as a schema, where that can be written without ``not``.

A mask can say "a or b" and "a and b", but not "not a". So ``not``, ``if`` and the like are turned around here for
the shapes people write: types, constants, presence of properties, and what is made of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sglite.runtime.grammar.refs import Json, Schema

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_VALUES = 32


def complement(schema: Json) -> Schema | None:
    """A schema that allows exactly what ``schema`` refuses, or None where none is found."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    parts = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        turn = _PARTS.get(keyword)
        part = turn(value) if turn is not None else None
        if part is None:
            return None
        parts.append(part)
    return any_of(parts)


def any_of(schemas: list[Schema]) -> Schema:
    useful = [schema for schema in schemas if schema is not False]
    if any(schema is True for schema in useful):
        return True
    return useful[0] if len(useful) == 1 else {"anyOf": useful} if useful else False


def type_of(value: Json) -> str:
    """The JSON type of a value; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _all_but(types: set[str]) -> Schema:
    rest = [name for name in TYPES if name not in types]
    return {"type": rest} if rest else False


def _type(value: Json) -> Schema | None:
    types = {value} if isinstance(value, str) else set(value) if isinstance(value, list) else set()
    if not types or not types <= set(TYPES):  # not "integer": the numbers with a fraction cannot be said
        return None
    return _all_but(types)


def _const(value: Json) -> Schema | None:
    return _enum([value])


def _enum(values: Json) -> Schema | None:
    if not isinstance(values, list) or len(values) > MAX_VALUES:
        return None
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    if by_type.keys() & {"array", "object"}:
        return None
    strings = [{"pattern": _other_than(text)} for text in by_type.pop("string", [])]
    numbers = [_other_number(number) for number in by_type.pop("number", [])]
    booleans = [{"const": not value} for value in by_type.pop("boolean", [])]
    by_type.pop("null", None)
    rest = _all_but({type_of(value) for value in values})
    groups: list[Schema] = [rest]
    for name, conditions in (("string", strings), ("number", numbers), ("boolean", booleans)):
        if conditions:
            groups.append({"type": name, "allOf": conditions})
    return any_of(groups)


def _other_number(number: float) -> dict[str, Any]:
    return {"anyOf": [{"exclusiveMaximum": number}, {"exclusiveMinimum": number}]}


def _other_than(text: str) -> str:
    """A pattern for every string but ``text``: it ends early, differs at some place, or goes on."""
    pattern = "[^]+"
    for char in reversed(text):
        literal = re.escape(char)
        pattern = f"(?:[^{literal}][^]*|{literal}(?:{pattern}))?"
    return f"^(?:{pattern})$"


def _required(names: Json) -> Schema | None:
    if not isinstance(names, list):
        return None
    missing: list[Schema] = [{"properties": {name: False}} for name in names]
    return {"type": "object", **_as_dict(any_of(missing))}


def _properties(properties: Json) -> Schema | None:
    """Some property is there and refused by its schema."""
    if not isinstance(properties, dict):
        return None
    wrong: list[Schema] = []
    for name, schema in properties.items():
        other = complement(schema)
        if other is None:
            return None
        wrong.append({"required": [name], "properties": {name: other}})
    return {"type": "object", **_as_dict(any_of(wrong))} if wrong else False


def _any_of(schemas: Json) -> Schema | None:
    parts = [complement(schema) for schema in schemas] if isinstance(schemas, list) else [None]
    return None if None in parts else {"allOf": parts}


def _all_of(schemas: Json) -> Schema | None:
    parts = [complement(schema) for schema in schemas] if isinstance(schemas, list) else [None]
    return None if None in parts else any_of([part for part in parts if part is not None])


def _as_dict(schema: Schema) -> dict[str, Json]:
    if isinstance(schema, dict):
        return schema
    return {} if schema else {"enum": []}


ANNOTATIONS = frozenset(
    {"title", "description", "$comment", "examples", "default", "deprecated", "readOnly", "writeOnly"}
)
_PARTS: dict[str, Callable[[Json], Schema | None]] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "required": _required,
    "properties": _properties,
    "anyOf": _any_of,
    "allOf": _all_of,
    "not": lambda schema: schema,
}


def same(one: Json, other: Json) -> bool:
    """Equal as JSON Schema sees it: 1 equals 1.0, but not true."""
    return normal(one) == normal(other)


def normal(value: Json) -> str:
    """A text that is equal for equal values."""
    return json.dumps(_numbers(value), sort_keys=True)


def _numbers(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return value
