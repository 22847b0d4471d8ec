"""From what an author wants a text to be, to the constraint that makes it so and the function that reads it."""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglite.errors import GrammarError, ProgramError
from sglite.lang.nodes import Typed
from sglite.protocol import Constraint

Wanted = tuple[Constraint, Typed]

# A number ends where the model writes a space or a new line, which is then a stop string.
_NUMBER_END = (" ", "\n")


@dataclass(frozen=True, slots=True)
class Dtype:
    """``stops`` end the text; they are not part of it."""

    regex: str
    read: Typed
    stops: tuple[str, ...] = ()


def _read_bool(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("neither True nor False")
    return text == "True"


def _read_str(text: str) -> str:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        raise ValueError("not in double quotes")
    return text[1:-1]


_DTYPES: dict[str, Dtype] = {
    "int": Dtype(r"[-+]?[0-9]+[ \n]?", int, _NUMBER_END),
    "float": Dtype(r"[-+]?[0-9]*\.?[0-9]+[ \n]?", float, _NUMBER_END),
    "bool": Dtype(r"(True|False)", _read_bool),
    "str": Dtype(r'"[^"\\\n]*"', _read_str),
}


def dtype_of(dtype: Any) -> Dtype:
    """Raises ProgramError for what is none of int, float, bool and str."""
    name = dtype.__name__ if isinstance(dtype, type) else dtype
    if not isinstance(name, str) or name not in _DTYPES:
        raise ProgramError(f"dtype must be int, float, bool or str, not {dtype!r}; use schema=... for other types")
    return _DTYPES[name]


def from_json_schema(schema: Any, argument: str = "json_schema") -> Wanted:
    """``schema`` is a JSON Schema: a dict, a boolean, or JSON text. Raises GrammarError naming ``argument``."""
    source = schema if isinstance(schema, str) else _dump(schema, argument)
    validate = _validator(source, argument)

    def read(text: str) -> Any:
        value = json.loads(text)
        problem = validate(value)
        if problem:
            raise ValueError(problem)
        return value

    return Constraint("json_schema", source), read


def from_type(kind: Any) -> Wanted:
    """``kind`` is anything pydantic understands, or a JSON Schema as a dict. Raises GrammarError (param "schema")."""
    if isinstance(kind, Mapping | bool | str):
        return from_json_schema(kind, "schema")
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(_modern(kind))
        source = json.dumps(adapter.json_schema())
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise GrammarError(f"schema={kind!r} cannot be turned into a JSON Schema: {reason}", param="schema") from error
    return Constraint("json_schema", source), adapter.validate_json


def _modern(kind: Any) -> Any:
    """``typing.TypedDict`` as the one of typing_extensions, which is the only one pydantic takes before Python 3.12."""
    if sys.version_info >= (3, 12):
        return kind
    if typing.is_typeddict(kind):
        import typing_extensions

        hints = {name: _modern(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
        return typing_extensions.TypedDict(kind.__name__, hints, total=kind.__total__)  # type: ignore[operator]
    if typing.get_origin(kind) in (list, dict, tuple, set):
        return typing.get_origin(kind)[tuple(map(_modern, typing.get_args(kind)))]
    return kind


def _dump(schema: Any, argument: str) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{argument} is not JSON: {error}", param=argument) from error


@lru_cache(256)
def _validator(source: str, argument: str) -> Callable[[Any], str]:
    """A function that says what is wrong with a value, or nothing. Raises GrammarError for a bad schema."""
    import jsonschema

    try:
        schema: Any = json.loads(source)
    except ValueError as error:
        raise GrammarError(f"{argument} is not JSON: {error}", param=argument) from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{argument} must be a JSON Schema (an object), not {schema!r}", param=argument)
    checker: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        checker.check_schema(schema)
    except jsonschema.SchemaError as error:
        pointer = "".join(f"/{part}" for part in error.absolute_path)
        message = f"{argument} is not a JSON Schema: {error.message} at {pointer or 'its top'}"
        raise GrammarError(message, param=argument, pointer=pointer) from error
    validator = checker(schema)

    def problem(value: Any) -> str:
        first = next(iter(validator.iter_errors(value)), None)
        return "" if first is None else f"{first.message} (at {first.json_path})"

    return problem
