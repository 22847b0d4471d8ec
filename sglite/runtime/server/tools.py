"""The tools of a chat request: their fields, and what the model may answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from sglite.errors import InvalidRequestError
from sglite.runtime.server import fields as f

MAX_TOOLS = 128
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]


def _parameters(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise f.bad("must be a JSON Schema object")
    if value.get("type", "object") != "object":
        raise f.bad('must be a JSON Schema of type "object": arguments are given by name')
    if len(json.dumps(value, ensure_ascii=False).encode()) > f.MAX_CONSTRAINT:
        raise f.bad(f"may have at most {f.MAX_CONSTRAINT} bytes")
    return value


Parameters = Annotated[
    dict[str, Any] | None,
    PlainValidator(_parameters),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]}),
]


class FunctionTool(f.Body):
    name: Name
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None
    """Taken either way: arguments always match the schema."""


class Tool(f.Body):
    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(f.Body):
    name: Name


class NamedChoice(f.Body):
    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What may be called: each name's schema of arguments. ``must_call``: the answer begins with a call."""

    schemas: Mapping[str, Mapping[str, Any]]
    must_call: bool
    repeats: bool


def toolbox(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Toolbox | None:
    """None where the model may call nothing. Raises InvalidRequestError for choices that make no sense."""
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
        return None
    schemas = {tool.function.name: arguments_schema(tool.function.parameters) for tool in tools}
    if len(schemas) < len(tools):
        raise InvalidRequestError("tools must have different names", param="tools")
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        return Toolbox(_only(schemas, choice.function.name), must_call=True, repeats=False)
    return Toolbox(schemas, must_call=choice == "required", repeats=parallel is not False)


def arguments_schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A tool's parameters, closed to names it does not have unless it says that it takes others."""
    if not parameters:
        return NO_ARGUMENTS
    closed = {} if _open(parameters) else {"additionalProperties": False}
    return {"type": "object", **closed, **parameters}


def _open(parameters: Mapping[str, Any]) -> bool:
    return any(word in parameters for word in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))


def takes_nothing(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("properties") and not _open(schema)


def _only(schemas: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Mapping[str, Any]]:
    if name not in schemas:
        raise InvalidRequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return {name: schemas[name]}
