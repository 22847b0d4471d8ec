"""How sure the model was of each field: arithmetic on made-up logprobs, and the whole way with a scripted model."""

from __future__ import annotations

import asyncio
import json
import math

import httpx
import pytest

import sglite as sgl
from sglite.confidence import field_confidence
from sglite.errors import InvalidRequestError, ProgramError, UnsupportedError
from sglite.protocol import Constraint, TokenLogprob
from sglite.runtime.server.app import create_app
from sglite.runtime.testing import scripted_engine
from sglite.testing import MockBackend

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}, "c": {"enum": ["red", "rose", "blue"]}},
    "required": ["ok", "n", "c"],
}


def token(text: str, p: float = 1.0, **others: float) -> TokenLogprob:
    """``others``: what else could have come, with its probability."""
    top = [(i + 1, math.log(q), word) for i, (word, q) in enumerate(others.items())]
    return TokenLogprob(0, math.log(p), text, ((0, math.log(p), text), *top))


def test_each_leaf_has_the_probability_of_its_value():
    tokens = [token('{"ok": '), token("tr", 0.5, f=0.5), token("ue"), token(', "n": '), token("4", 0.5, **{"5": 0.5})]
    tokens += [token("2", 0.5, **{",": 0.5}), token(', "c": "', 0.75, **{"0": 0.25})]
    tokens += [token("r", 0.5, blue=0.25, re=0.125, b=0.125), token("ed", 0.5, ose=0.5), token('"}')]
    text = "".join(t.text for t in tokens)
    found = {one.pointer: one for one in field_confidence(Constraint("json_schema", json.dumps(SCHEMA)), text, tokens)}
    assert list(found) == ["/ok", "/n", "/c"]
    assert (found["/ok"].value, found["/n"].value, found["/c"].value) == (True, 42, "red")
    assert found["/ok"].distribution == pytest.approx({"true": 0.5, "false": 0.5})
    assert found["/n"].probability == pytest.approx(0.5 * 0.5 * 0.75), "that it ends there is a part of it"
    assert found["/n"].distribution == {}
    shares = {'"red"': 0.75 * (0.5 * 0.5 + 0.125), '"rose"': 0.75 * 0.5 * 0.5, '"blue"': 0.75 * (0.25 + 0.125)}
    assert found["/c"].distribution == pytest.approx(shares)
    assert found["/c"].undecided == 0


def test_what_several_values_share_is_told_apart():
    tokens = [token("blue", 0.5, r=0.5)]
    (one,) = field_confidence(Constraint("choices", '["red", "rose", "blue"]'), "blue", tokens)
    assert one.distribution == pytest.approx({"red": 0, "rose": 0, "blue": 0.5})
    assert one.undecided == pytest.approx(0.5)


def test_pointers_of_nested_and_of_escaped_names():
    text = '{"a/b": [1, {"x": null}], "~": ["s", []], "é": "\\"q"}'
    found = field_confidence(Constraint("json_object"), text, [token(text, 0.5)])
    assert [(one.pointer, one.value) for one in found] == [
        ("/a~1b/0", 1),
        ("/a~1b/1/x", None),
        ("/~0/0", "s"),
        ("/é", '"q'),
    ]


def test_a_constraint_without_fields_is_refused():
    with pytest.raises(InvalidRequestError, match="json_schema"):
        field_confidence(Constraint("regex", "a"), "a", [])


def test_over_rest_forced_tokens_are_certain():
    with scripted_engine(lambda history: 65, context_length=512, kv_tokens=4096) as engine:
        schema = json.dumps({"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k"]})
        body = {
            "text": "x",
            "sampling_params": {"json_schema": schema, "max_new_tokens": 64, "temperature": 0},
            "field_confidence": True,
        }
        answer = post(engine, body)
        assert answer["meta_info"]["field_confidence"][0]["pointer"] == "/k"
        assert answer["meta_info"]["field_confidence"][0]["probability"] == pytest.approx(1)
        refused = post(engine, {"text": "x", "field_confidence": True})
        assert refused["error"]["param"] == "field_confidence"


SURE = {
    "type": "object",
    "properties": {"k": {"const": "v"}, "n": {"enum": [1]}},
    "required": ["k", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("chat", [False, True])
def test_over_openais_routes(chat):
    asked = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    route = "/v1/chat/completions" if chat else "/v1/completions"
    with scripted_engine(lambda history: 65, context_length=1024, kv_tokens=4096) as engine:
        body = {**asked, "guided_json": SURE, "max_tokens": 64, "temperature": 0, "field_confidence": True}
        (choice,) = post(engine, body | {"json_whitespace": "compact"}, route)["choices"]
        assert (choice["message"]["content"] if chat else choice["text"]) == '{"k":"v","n":1}'
        assert [one["pointer"] for one in choice["field_confidence"]] == ["/k", "/n"]
        assert choice["logprobs"] is None
        for wrong, param in (
            ({"stream": True}, "field_confidence"),
            ({"logprobs": True if chat else 1}, "field_confidence"),
            ({"guided_json": None}, "field_confidence"),
            ({"guided_json": None, "field_confidence": False, "json_whitespace": "pretty"}, "json_whitespace"),
        ):
            assert post(engine, body | wrong, route)["error"]["param"] == param


def test_in_a_program():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("k", 64, json_schema=json.dumps(SURE), json_whitespace="compact", field_confidence=True)

    with scripted_engine(lambda history: 65, context_length=512, kv_tokens=4096) as engine:
        state = program.run(backend=engine, temperature=0)
        assert state["k"] == '{"k":"v","n":1}'
        first = state.get_meta_info("k")["field_confidence"][0]
        assert (first["pointer"], first["value"], first["probability"]) == ("/k", "v", pytest.approx(1))
        assert "output_token_logprobs" not in state.get_meta_info("k")


def test_what_cannot_be_asked_for_in_a_program_is_named():
    for wrong in ({"regex": "a", "json_whitespace": "compact"}, {"field_confidence": True}):
        with pytest.raises(ProgramError, match="json_schema"):
            sgl.gen("k", **wrong)
    with pytest.raises(ProgramError, match="spaced"):
        sgl.gen("k", json_schema="{}", json_whitespace="tight")
    with pytest.raises(ProgramError, match="combined"):
        sgl.gen("k", json_schema="{}", field_confidence=True, return_logprob=True)

    @sgl.function
    def program(s):
        s += sgl.gen("k", json_schema="{}", field_confidence=True)

    with pytest.raises(UnsupportedError, match="field_confidence"):
        program.run(backend=MockBackend())["k"]


def post(engine, body: dict, route: str = "/generate") -> dict:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(route, json=body)

    return asyncio.run(send()).json()
