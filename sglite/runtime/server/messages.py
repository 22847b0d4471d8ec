"""The messages of /v1/chat/completions, checked field by field."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from sglite.runtime.server import fields as f
from sglite.runtime.server.answers import Said

MAX_MESSAGES = 4096


def _content(value: Any) -> str:
    """Text, given as a string or as a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise f.bad("must be a string or a list of content parts")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        raise f.bad("content parts must be objects")
    kind = part.get("type")
    if kind != "text":
        raise f.bad(f"content parts of type {kind!r:.40} are not supported: this model reads text", "unsupported")
    if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
        raise f.bad("a text part must hold just a string named text")
    return str(part["text"])


Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]


class SystemMessage(f.Body):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(f.Body):
    role: Literal["user"]
    content: Content
    name: Name | None = None


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments travel as JSON text; templates want the object."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise f.bad("must be the JSON text of an object")
    return parsed


Arguments = Annotated[dict[str, Any], PlainValidator(_arguments), WithJsonSchema({"type": "string"})]


class FunctionCall(f.Body):
    name: Name
    arguments: Arguments


class ToolCall(f.Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(f.Body):
    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: Annotated[list[Any] | None, f.only([])] = None
    """As the openai package gives back its own answers."""
    refusal: f.Unsupported = None
    audio: f.Unsupported = None
    function_call: f.Unsupported = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise f.bad("must be a string or a list of content parts where there are no tool_calls", field="content")
        return self


class ToolMessage(f.Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: Name | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


def _answers_calls(messages: list[Message]) -> list[Message]:
    """What a tool gave belongs to a call that was made before."""
    made: set[str] = set()
    for i, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            made.update(call.id for call in message.tool_calls or ())
        elif isinstance(message, ToolMessage) and message.tool_call_id not in made:
            raise f.bad("no earlier message has a tool call of this id", field=f"{i}.tool_call_id")
    return messages


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(_answers_calls)
]


def said_in(message: AssistantMessage) -> Said:
    calls = ((call.function.name, json.dumps(call.function.arguments)) for call in message.tool_calls or ())
    return Said(message.content or "", message.reasoning_content or "", tuple(calls))


def for_template(message: Message) -> dict[str, Any]:
    """As chat templates expect it: absent fields absent, and a developer is the system."""
    plain = message.model_dump(exclude_none=True, exclude={"annotations"})
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    if plain["role"] == "developer":
        plain["role"] = "system"
    plain.setdefault("content", None)
    return plain
