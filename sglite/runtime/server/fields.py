"""Field types of request bodies: strict, bounded, and refused by name where sglite cannot honour them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from sglite.protocol import MAX_N, MAX_STOPS, MAX_TOP_LOGPROBS, Constraint, ConstraintKind, Prompt, Text, Tokens

MAX_STOP_LENGTH = 4096
MAX_BIASES = 1024
MAX_CONSTRAINT = 64 << 10
MAX_PROMPTS = 1024
_MAX_INT = 2**31 - 1
_TOKEN_ID = re.compile(r"\d{1,10}\Z")


class Body(BaseModel):
    """A request body or a part of one: nothing is coerced, nothing unknown is dropped."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=(), populate_by_name=True
    )


def bad(message: str, code: str = "invalid_request", field: str | None = None) -> PydanticCustomError:
    """A validator's complaint; the field's path is added where it is reported.

    ``field``: of the object that a whole object's validator complains of.
    """
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})


# ---------------------------------------------------------------------------------------------------------- refused


def _refuse(value: Any) -> None:
    if value is not None:
        raise bad("this field is not supported", "unsupported")


def only(*allowed: Any) -> BeforeValidator:
    """For a field whose other documented values are not supported."""

    def check(value: Any) -> Any:
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            shown = ", ".join(json.dumps(a) for a in allowed)
            raise bad(f"only {shown} is supported", "unsupported")
        return value

    return BeforeValidator(check)


Unsupported = Annotated[None, BeforeValidator(_refuse)]
"""A documented field that is refused by name; null is the same as leaving it out."""

# ---------------------------------------------------------------------------------------------------------- numbers

Count = Annotated[int, Field(ge=0, le=_MAX_INT)]
Temperature = Annotated[float, Field(ge=0, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=2)]
Samples = Annotated[int, Field(ge=1, le=MAX_N)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Start = Annotated[int, Field(ge=-1, le=_MAX_INT)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
"""Larger is sooner."""


def _top_k(value: int) -> int:
    if value == 0:
        raise bad("must be -1 (no limit) or at least 1; use temperature 0 for greedy")
    return value


TopK = Annotated[int, Field(ge=-1, le=_MAX_INT), BeforeValidator(lambda v: _top_k(v) if type(v) is int else v)]

# ---------------------------------------------------------------------------------------------------------- strings

RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:\-]{1,128}$")]
Label = Annotated[str, Field(max_length=512)]
"""Something a client tells us for the log."""


def _strings(value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(items, list | tuple):
        raise bad("must be a string or a list of strings")
    if len(items) > MAX_STOPS:
        raise bad(f"may hold at most {MAX_STOPS} strings")
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= MAX_STOP_LENGTH:
            raise bad(f"must hold strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(items)


_STRINGS_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        {
            "type": "array",
            "maxItems": MAX_STOPS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        },
        {"type": "null"},
    ]
}
Strings = Annotated[tuple[str, ...], PlainValidator(_strings), WithJsonSchema(_STRINGS_SCHEMA)]


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise bad("must be a list of token ids")
    if value and not (min(value) >= 0 and max(value) <= _MAX_INT):
        raise bad(f"token ids must be between 0 and {_MAX_INT}")
    return tuple(value)


def _stop_ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else _ids(value)
    if len(ids) > MAX_STOPS:
        raise bad(f"may hold at most {MAX_STOPS} token ids")
    return ids


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_INT}}
TokenIds = Annotated[tuple[int, ...], PlainValidator(_ids), WithJsonSchema({**_IDS_SCHEMA, "minItems": 1})]
StopIds = Annotated[
    tuple[int, ...],
    PlainValidator(_stop_ids),
    WithJsonSchema({"anyOf": [{**_IDS_SCHEMA, "maxItems": MAX_STOPS}, {"type": "null"}]}),
]


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad("must be an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise bad(f"may hold at most {MAX_BIASES} entries")
    return tuple(_bias_pair(key, bias) for key, bias in value.items())


def _bias_pair(key: str, bias: Any) -> tuple[int, float]:
    if not _TOKEN_ID.match(key) or int(key) > _MAX_INT:
        raise bad(f"keys must be token ids, not {key!r:.40}")
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        raise bad("biases must be numbers between -100 and 100")
    return int(key), float(bias)


_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        {"type": "null"},
    ]
}
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)]

# ---------------------------------------------------------------------------------------------------------- prompts


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One or several prompts, each a text or a list of token ids. Text is raw: special tokens in it count."""
    if isinstance(value, str):
        return (raw_text(value),)
    if not isinstance(value, list) or not value:
        raise bad("must be a string, a list of token ids, or a non-empty list of those")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (tokens(value),)
    if len(value) > MAX_PROMPTS:
        raise bad(f"may hold at most {MAX_PROMPTS} prompts")
    if kinds == {str}:
        return tuple(raw_text(text) for text in value)
    if kinds == {list}:
        return tuple(tokens(ids) for ids in value)
    raise bad("must not mix strings, token ids and lists")


def raw_text(text: str) -> Prompt:
    return (Text(text, special=True),)


def tokens(ids: Any) -> Prompt:
    if not ids:
        raise bad("a list of token ids must not be empty")
    return (Tokens(_ids(ids)),)


class PromptIds(NamedTuple):
    """``input_ids``: one prompt or several."""

    prompts: tuple[Prompt, ...]
    single: bool


def _prompt_ids(value: Any) -> PromptIds:
    if isinstance(value, list) and value and set(map(type, value)) <= {int, list}:
        return PromptIds(_prompts(value), single=type(value[0]) is int)
    raise bad("must be a non-empty list of token ids, or a non-empty list of those")


_PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {**_IDS_SCHEMA, "minItems": 1},
        {"type": "array", "items": {**_IDS_SCHEMA, "minItems": 1}, "minItems": 1},
    ]
}
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts), WithJsonSchema(_PROMPTS_SCHEMA)]
TokenPrompts = Annotated[
    PromptIds, PlainValidator(_prompt_ids), WithJsonSchema({"anyOf": _PROMPTS_SCHEMA["anyOf"][2:]})
]

# ------------------------------------------------------------------------------------------------------ constraints


def _json_source(value: Any) -> str:
    """A JSON Schema, given as an object or as its JSON text; ``true`` and ``false`` are schemas too."""
    if isinstance(value, str):
        return _bounded(value)
    if not isinstance(value, dict | bool):
        raise bad("must be a JSON Schema")
    return _bounded(json.dumps(value, ensure_ascii=False))


def _bounded(value: Any) -> str:
    if not isinstance(value, str):
        raise bad("must be a string")
    if len(value.encode()) > MAX_CONSTRAINT:
        raise bad(f"may have at most {MAX_CONSTRAINT} bytes")
    return value


def _choices(value: Any) -> str:
    if not isinstance(value, list) or not value or not set(map(type, value)) <= {str}:
        raise bad("must be a non-empty list of strings")
    return _bounded(json.dumps(value, ensure_ascii=False))


SchemaSource = Annotated[
    str,
    PlainValidator(_json_source),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}),
]
ConstraintText = Annotated[
    str, PlainValidator(_bounded), WithJsonSchema({"type": "string", "maxLength": MAX_CONSTRAINT})
]
Choices = Annotated[
    str,
    PlainValidator(_choices),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}),
]


def one_constraint(found: Iterable[tuple[str, ConstraintKind, str | None]]) -> tuple[str, Constraint] | None:
    """The constraint among fields that may each name one, after its field. Two at once are refused by name."""
    given = [(name, Constraint(kind, source)) for name, kind, source in found if source is not None]
    if len(given) > 1:
        raise bad(f"cannot be used together with {' and '.join(name for name, _ in given[1:])}", field=given[0][0])
    return given[0] if given else None
