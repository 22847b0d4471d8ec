"""Tool calls: Python functions become a schema, the model's answer becomes a call of one of them, ready to make."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglite.errors import ProgramError
from sglite.lang.api import gen
from sglite.lang.nodes import Gen
from sglite.lang.schema import from_json_schema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments`` are validated, in the types that the function's annotations name."""

    name: str
    arguments: Mapping[str, Any]
    function: Callable[..., Any]

    def call(self) -> Any:
        """What the function returns (for an ``async def`` function: something to await)."""
        return self.function(**self.arguments)


def tool_call(
    name: str | None, tools: Sequence[Callable[..., Any]], max_tokens: int | None = None, **options: Any
) -> Gen:
    """A gen whose text is ``{"name": ..., "arguments": {...}}`` for one of ``tools``, valid for its signature.

    ``s.value(name)`` is a ToolCall. ``options`` are those of ``gen``. Raises ProgramError for tools whose parameters
    cannot be given by name in JSON.
    """
    if not isinstance(tools, Sequence) or not tools or not all(callable(tool) for tool in tools):
        raise ProgramError(f"tools must be a list of at least one function, not {tools!r}")
    known = {_name(tool): tool for tool in tools}
    if len(known) < len(tools):
        raise ProgramError(f"tools must have different names; these are {[_name(tool) for tool in tools]}")
    readers = {name: _Reader(tool) for name, tool in known.items()}
    _, read_json = from_json_schema(schema := _schema(readers), "tools")

    def read(text: str) -> ToolCall:
        call = read_json(text)
        return ToolCall(call["name"], readers[call["name"]].read(call["arguments"]), known[call["name"]])

    node = gen(name, max_tokens, json_schema=schema, **options)
    assert isinstance(node, Gen)
    node.typed, node.argument = read, "tools"
    return node


def _name(tool: Callable[..., Any]) -> str:
    name = getattr(tool, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise ProgramError(f"a tool needs a name; {tool!r} has none")
    return name


class _Reader:
    """Turns JSON arguments into a function's own types, without calling it."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        from pydantic import PydanticUserError, TypeAdapter

        for parameter in inspect.signature(tool).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ProgramError(f"{_name(tool)}(): the parameter {parameter.name!r} cannot be given by its name")
        try:
            self.adapter: TypeAdapter[Any] = TypeAdapter(_collector(tool))
        except PydanticUserError as error:
            raise ProgramError(f"{_name(tool)}(): its parameters have no JSON Schema: {error}") from error

    def read(self, arguments: Any) -> Mapping[str, Any]:
        result: Mapping[str, Any] = self.adapter.validate_json(json.dumps(arguments))
        return result


def _collector(tool: Callable[..., Any]) -> Any:
    """A function with the tool's signature that returns its arguments."""

    @functools.wraps(tool)
    def collect(**arguments: Any) -> dict[str, Any]:
        return arguments

    return collect


def _schema(readers: Mapping[str, _Reader]) -> dict[str, Any]:
    from pydantic import PydanticUserError, TypeAdapter

    try:
        inputs = [(name, "validation", reader.adapter) for name, reader in readers.items()]
        found, shared = TypeAdapter.json_schemas(inputs)  # type: ignore[arg-type]
    except PydanticUserError as error:
        raise ProgramError(f"the parameters of a tool have no JSON Schema: {error}") from error
    calls = [_call_schema(name, found[name, "validation"]) for name in readers]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, **({"$defs": shared["$defs"]} if "$defs" in shared else {})}


def _call_schema(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
