"""Typed results: schemas from types, tool calls, and what the mock answers to them."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Literal, TypedDict

import pytest
from pydantic import BaseModel, Field

import sglite as sgl
from sglite.errors import ProgramError
from sglite.lang.backends.instances import least_instance, satisfies, shortest_match
from sglite.protocol import Constraint
from sglite.testing import MockBackend


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Order(BaseModel):
    item: str = Field(min_length=2)
    amount: int = Field(ge=3)
    colour: Colour


@dataclasses.dataclass
class Point:
    x: int
    y: float


class Person(TypedDict):
    name: str
    tags: list[str]


def typed(schema, answer, **options):
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", schema=schema, **options)

    return program.run(backend=MockBackend([answer] if answer else None), max_new_tokens=500).value("x")


@pytest.mark.parametrize(
    ("schema", "answer", "value"),
    [
        (Order, '{"item": "lamp", "amount": 4, "colour": "red"}', Order(item="lamp", amount=4, colour=Colour.RED)),
        (Point, '{"x": 1, "y": 2.5}', Point(1, 2.5)),
        (Person, '{"name": "A", "tags": ["b"]}', {"name": "A", "tags": ["b"]}),
        (list[Person], '[{"name": "A", "tags": []}]', [{"name": "A", "tags": []}]),
        (Colour, '"blue"', Colour.BLUE),
        (Literal["yes", "no"], '"no"', "no"),
        (list[int], "[1, 2]", [1, 2]),
        (int | None, "null", None),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 3}', {"a": 3}),
    ],
)
def test_values_of_every_kind_of_schema(schema, answer, value) -> None:
    assert typed(schema, answer) == value


def test_the_mock_answers_a_schema_with_a_small_instance() -> None:
    assert typed(Order, None) == Order(item="aa", amount=3, colour=Colour.RED)
    assert typed(Point, None) == Point(0, 0.0)


def test_json_schema_as_text_or_dict_is_parsed_too() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}

    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", json_schema=json.dumps(schema)) + sgl.gen("y", json_schema=schema)

    state = program.run(backend=MockBackend(["[1]", "[2, 3]"]))
    assert (state["x"], state.value("x"), state.value("y")) == ("[1]", [1], [2, 3])


def test_several_samples_give_several_values() -> None:
    assert typed(Point, '{"x": 1, "y": 2}', n=3) == [Point(1, 2.0)] * 3


def test_text_that_does_not_fit_raises_with_the_text() -> None:
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", dtype=float)

    backend = MockBackend(["1.5"])
    assert program.run(backend=backend).value("x") == 1.5
    state = program.run(backend=MockBackend(["1.5"]))
    state._branch.variables["x"].value = "one"
    with pytest.raises(ProgramError, match="'one'"):
        state.value("x")


def test_dtype_bool_and_str() -> None:
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("b", dtype=bool) + sgl.gen("t", dtype="str") + sgl.gen_int("i") + sgl.gen_string("s")

    state = program.run(backend=MockBackend(["False", '"a b"', "-3", '""']))
    assert [state.value(name) for name in "btis"] == [False, "a b", -3, ""]
    assert state["t"] == '"a b"'


def search(query: str, limit: int = 3) -> list[str]:
    """Look something up."""
    return [query] * limit


async def paint(colour: Colour, where: Point) -> str:
    return f"{colour.name} at {where.x}"


def test_tool_calls_are_validated_and_ready() -> None:
    answers = [
        '{"name": "search", "arguments": {"query": "x", "limit": 2}}',
        '{"name": "paint", "arguments": {"colour": "blue", "where": {"x": 1, "y": 2}}}',
        None,
    ]

    @sgl.function
    async def program(s):
        for name in "abc":
            s += "q" + sgl.tool_call(name, tools=[search, paint])
            await s.get(name)
        return s.value("a").call(), await s.value("b").call(), s.value("c")

    looked, painted, least = program.run(backend=MockBackend(answers)).ret_value
    assert looked == ["x", "x"]
    assert painted == "BLUE at 1"
    assert (least.name, least.arguments) == ("search", {"query": "", "limit": 3})


def test_parallel_tool_calls_are_a_fork() -> None:
    @sgl.function
    def program(s):
        s += "plan"
        forks = s.fork(2)
        forks += lambda i: f" {i}" + sgl.tool_call("call", [search])
        forks.join()
        return [call.call() for call in s.value("call")]

    def answer(request):
        query = request.prompt[-1].value[-1]
        return json.dumps({"name": "search", "arguments": {"query": query, "limit": 1}})

    assert program.run(backend=MockBackend(answer)).ret_value == [["0"], ["1"]]


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ([], "at least one"),
        (["search"], "at least one"),
        ([search, search], "different names"),
        ([lambda x: x], "a name"),
        ([print], "by its name|JSON Schema"),
    ],
)
def test_tools_that_cannot_be_called(tools, match) -> None:
    with pytest.raises(ProgramError, match=match):
        sgl.tool_call("c", tools)


@pytest.mark.parametrize(
    ("pattern", "least"),
    [("[0-9]+", 1), ("(yes|no)", 2), ("^a{3,5}$", 3), (r"[-+]?[0-9]+[ \n]?", 1), (r'"[^"\\\n]*"', 2), ("", 0)],
)
def test_shortest_matches(pattern, least) -> None:
    text = shortest_match(pattern)
    assert len(text) == least
    assert satisfies(text, Constraint("regex", pattern))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["integer", "null"], "minimum": 5},
        {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 7},
        {"type": "number", "maximum": -2},
        {"type": "string", "pattern": "[A-Z]{2}[0-9]"},
        {"type": "string", "format": "date-time"},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 3},
        {"allOf": [{"properties": {"a": {"enum": [7]}}}, {"required": ["a"]}], "type": "object"},
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}},
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "required": ["next"],
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                }
            },
        },
    ],
)
def test_least_instances_are_valid(schema) -> None:
    least_instance(schema)  # validates itself
