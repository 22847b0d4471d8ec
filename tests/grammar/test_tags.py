"""Structural tags: text is free, a region that was begun is not."""

from __future__ import annotations

import json

import pytest

from sglite.errors import GrammarError

CALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def source(schema: object = CALL, **more) -> str:
    structures = [{"begin": "<tool name=f>", "schema": schema, "end": "</tool>"}]
    return json.dumps({"structures": structures, "triggers": ["<tool"]} | more)


def test_language(bench):
    grammar = bench.compile("structural_tag", source())
    call = '<tool name=f>{"a":1}</tool>'
    good = ["", "hello", "a<b", f"hi {call} bye", call + call.replace("1", " 2")]
    bad = ["<tool name=g>", "<tool", call[:-3], call.replace("1", '"x"'), call.replace('"a":1', "")]
    assert [text for text in good if not bench.accepts(grammar, text)] == []
    assert [text for text in bad if bench.accepts(grammar, text)] == []


def test_a_trigger_that_begins_another(bench):
    structures = [
        {"begin": "<t", "schema": {"type": "integer"}, "end": ">"},
        {"begin": "<tool>", "schema": {"type": "string", "format": "date"}, "end": "</tool>"},
    ]
    grammar = bench.compile("structural_tag", source(structures=structures, triggers=["<t", "<tool>"]))
    good = ["<t5>", 'a <tool>"2024-02-29"</tool> b', '<t5><tool>"2024-12-31"</tool>', "<"]
    bad = ["<tool>5>", '<tool>"2023-02-29"</tool>', "<t", "<t5"]
    assert [text for text in good if not bench.accepts(grammar, text)] == []
    assert [text for text in bad if bench.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("text", "kind", "pointer"),
    [
        (source({"type": "banana"}), "malformed", "/structures/0/schema/type"),
        (source({"type": "array", "uniqueItems": True}), "unsupported", "/structures/0/schema"),
        (source(triggers=["<call"]), "malformed", "/structures/0/begin"),
        (source(triggers=[]), "malformed", ""),
        (source(triggers=["<tool", "<other"]), "malformed", "/triggers/1"),
        (source(structures=[1]), "malformed", "/structures/0"),
        ("[]", "malformed", ""),
    ],
)
def test_refusals(bench, text, kind, pointer):
    with pytest.raises(GrammarError) as caught:
        bench.compile("structural_tag", text)
    assert (caught.value.kind, caught.value.pointer, caught.value.param) == (kind, pointer, "structural_tag")
