"""The least text that satisfies a constraint: what a backend without a model answers."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from sglite.errors import GrammarError, UnsupportedError
from sglite.protocol import Constraint

_FORMATS = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@b.co",
    "hostname": "a.co",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "http://a.co",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


@lru_cache(256)
def least_text(constraint: Constraint) -> str:
    """Raises GrammarError for malformed constraints and UnsupportedError for kinds without a known answer."""
    if constraint.kind == "choices":
        return str(json.loads(constraint.source)[0])
    if constraint.kind == "regex":
        return shortest_match(constraint.source)
    if constraint.kind == "json_object":
        return "{}"
    if constraint.kind == "json_schema":
        return json.dumps(least_instance(json.loads(constraint.source)), ensure_ascii=False)
    raise UnsupportedError(f"no answer is known for constraints of kind {constraint.kind!r}", param="constraint")


def satisfies(text: str, constraint: Constraint) -> bool:
    """Whether ``text`` is an answer that ``constraint`` allows. Kinds nobody can judge here allow everything."""
    if constraint.kind == "choices":
        return text in json.loads(constraint.source)
    if constraint.kind == "regex":
        return _matches(constraint.source, text)
    if constraint.kind not in ("json_schema", "json_object"):
        return True
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) if constraint.kind == "json_object" else _is_valid(constraint.source, value)


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error as error:
        raise _bad_regex(pattern, error) from error


def _bad_regex(pattern: str, error: Exception) -> GrammarError:
    return GrammarError(f"regex {pattern!r}: {str(error) or 'it cannot be read as one'}", param="regex")


def _is_valid(source: str, value: Any) -> bool:
    import jsonschema

    schema = json.loads(source)
    checker: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(checker(schema).is_valid(value))


@lru_cache(256)
def shortest_match(pattern: str) -> str:
    """A shortest text that the whole regex matches; of several the one with the most usual characters."""
    import interegular

    try:
        fsm = interegular.parse_pattern(pattern.removeprefix("^").removesuffix("$")).to_fsm()
    except Exception as error:  # the library has no error type of its own for all of them
        raise _bad_regex(pattern, error) from error
    letters = {key: _usual(symbols) for key, symbols in fsm.alphabet.by_transition.items()}
    waiting = deque([(fsm.initial, "")])
    seen = {fsm.initial}
    while waiting:
        state, text = waiting.popleft()
        if state in fsm.finals:
            return text
        for key, target in fsm.map.get(state, {}).items():
            if target not in seen and letters[key]:
                seen.add(target)
                waiting.append((target, text + letters[key]))
    raise GrammarError(f"regex {pattern!r} matches nothing", kind="unsatisfiable", param="regex")


def _usual(symbols: Any) -> str:
    """A letter where there is one."""
    texts = [s if isinstance(s, str) else "a" for s in symbols]  # anything_else is no text
    return min(texts, key=lambda c: (not c.isalnum(), not c.isprintable(), c), default="")


def least_instance(schema: Any) -> Any:
    """A small JSON value that is valid under ``schema``. Raises UnsupportedError where none is found."""
    value = _instance(schema, schema, 0)
    if not _is_valid(json.dumps(schema), value):
        raise UnsupportedError(f"no small value was found for the schema {json.dumps(schema)}", param="json_schema")
    return value


def _instance(schema: Any, root: Any, depth: int) -> Any:
    if depth > 64:
        raise UnsupportedError("the schema has no finite value that could be found", param="json_schema")
    if not isinstance(schema, Mapping):
        return None
    schema = _merged(schema, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _first_alternative(schema, key, root, depth)
    kind = schema.get("type") or _implied_type(schema)
    kind = kind[0] if isinstance(kind, list) else kind
    return _MAKERS[kind](schema, root, depth)


def _merged(schema: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """References followed and ``allOf`` put together."""
    result = {k: v for k, v in schema.items() if k not in ("$ref", "allOf")}
    parts = list(schema.get("allOf", ()))
    if "$ref" in schema:
        parts.append(_resolve(schema["$ref"], root))
    for part in parts:
        for key, value in _merged(part, root).items() if isinstance(part, Mapping) else ():
            if key == "properties":
                value = {**result.get(key, {}), **value}
            elif key == "required":
                value = [*result.get(key, []), *value]
            result[key] = value
    return result


def _resolve(reference: str, root: Any) -> Any:
    target = root
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target[part.replace("~1", "/").replace("~0", "~")]
    return target


def _first_alternative(schema: Mapping[str, Any], key: str, root: Any, depth: int) -> Any:
    rest = {k: v for k, v in schema.items() if k != key}
    last: UnsupportedError | None = None
    for option in schema[key]:
        try:
            return _instance({**rest, "allOf": [option]}, root, depth + 8)
        except UnsupportedError as error:  # a recursive alternative: another one ends it
            last = error
    raise last or UnsupportedError(f"{key} has no alternatives", param="json_schema")


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema or "minItems" in schema:
        return "array"
    if "minimum" in schema or "maximum" in schema:
        return "number"
    return "string" if "pattern" in schema or "minLength" in schema else "null"


def _object(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    properties = schema.get("properties", {})
    return {name: _instance(properties.get(name, {}), root, depth + 1) for name in schema.get("required", ())}


def _array(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    heads = [_instance(item, root, depth + 1) for item in schema.get("prefixItems", ())]
    missing = schema.get("minItems", 0) - len(heads)
    return heads + [_instance(schema.get("items", {}), root, depth + 1) for _ in range(missing)]


def _string(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    if "pattern" in schema:
        return shortest_match(schema["pattern"])
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    return "a" * schema.get("minLength", 0)


def _number(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    step = schema.get("multipleOf", 1)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and low > 0:
        value = -(-low // step) * step
        return value + step if value == schema.get("exclusiveMinimum") else value
    if high is not None and high < 0:
        value = high // step * step
        return value - step if value == schema.get("exclusiveMaximum") else value
    return step if low == schema.get("exclusiveMinimum") == 0 else 0


def _integer(schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    return int(_number(schema, root, depth))


_MAKERS: dict[str, Callable[[Mapping[str, Any], Any, int], Any]] = {
    "object": _object,
    "array": _array,
    "string": _string,
    "number": _number,
    "integer": _integer,
    "boolean": lambda schema, root, depth: False,
    "null": lambda schema, root, depth: None,
}
