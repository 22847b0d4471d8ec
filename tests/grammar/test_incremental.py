"""The parts of the schema machinery against oracles: patterns, complements, proofs, formats, the JSON stream."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from sglite.errors import GrammarError
from sglite.runtime.grammar.ecma import translate
from sglite.runtime.grammar.formats import FORMATS
from sglite.runtime.grammar.negate import complement
from sglite.runtime.grammar.proofs import all_disjoint, disjoint_patterns
from sglite.runtime.grammar.refs import Dialect, Pointers
from sglite.runtime.grammar.tokens import TokenTable
from sglite.runtime.grammar.validation import Validation
from sglite.runtime.grammar.way_out import Brackets

VALUES = [
    None,
    True,
    False,
    0,
    1,
    3,
    2.5,
    -7,
    "",
    "a",
    "b",
    "ab",
    "abc",
    [],
    [1],
    {},
    {"a": 1},
    {"k": "x"},
    {"k": "y", "a": 2},
]

PATTERNS = {
    "^\\d{2}$": (["12"], ["1", "٣٤", "123"]),
    "^[\\w-.]+$": (["a-b.c"], ["a b", "é"]),
    "^\\S$": (["x"], [" ", "\ufeff", "\u00a0"]),
    "\\u{1F600}|\\ud83d\\udc32": (["😀", "x🐲"], ["x"]),
    "^[^]$": (["\n"], [""]),
    "^.$": (["x"], ["\n", "\u2028"]),
    "a$": (["ba"], ["a\n"]),
    "^(?=.*[0-9])[a-z0-9]+$": (["a1"], ["ab", "A1"]),
    "^(?!ab)[a-c]+$": (["ac", "ba"], ["abc"]),
    "^(a)\\1$": (["aa"], ["a"]),
    "{a}": (["x{a}"], ["a"]),
    "[a&&b]": (["&"], ["c"]),
}


@pytest.mark.parametrize("source", PATTERNS)
def test_patterns_mean_what_ecma_says(bench, source):
    good, bad = PATTERNS[source]
    pattern = translate(source)
    assert [text for text in good if not pattern.search(text)] == []
    assert [text for text in bad if pattern.search(text)] == []
    grammar = bench.compile("json_schema", json.dumps({"type": "string", "pattern": source}))
    assert [text for text in good if not bench.accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in bad if bench.accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize("source", ["[a", "\\", "(?x)", "\\z", "a{2,1}\\1"])
def test_broken_patterns_say_where(bench, source):
    with pytest.raises(GrammarError) as caught:
        bench.compile("json_schema", json.dumps({"properties": {"p": {"type": "string", "pattern": source}}}))
    assert caught.value.pointer == "/properties/p/pattern"


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 3},
        {"const": "ab"},
        {"enum": ["a", 1, True, None]},
        {"type": ["string", "object"]},
        {"required": ["a"]},
        {"properties": {"k": {"const": "x"}}},
        {"properties": {"k": {"const": "x"}}, "required": ["k"]},
        {"anyOf": [{"const": 1}, {"type": "array"}]},
        {"allOf": [{"type": "object"}, {"required": ["a"]}]},
        {"not": {"type": "string"}},
        True,
        False,
    ],
)
def test_a_complement_holds_exactly_where_the_schema_does_not(schema):
    other = complement(schema)
    assert other is not None
    dialect = Dialect(2020, declared=True)
    for value in VALUES:
        refused = Validation(other, dialect).error(value) is not None
        assert refused == jsonschema.Draft202012Validator(schema).is_valid(value)


def random_flat_schema(rng: random.Random) -> dict:
    choices = [
        {"type": rng.choice(["string", "number", "array", "object", "null", "boolean"])},
        {"enum": rng.sample([v for v in VALUES if not isinstance(v, dict | list)], 3)},
        {"type": "number", "minimum": rng.choice([-5, 0, 2]), "maximum": rng.choice([-6, 1, 3])},
        {"type": "string", "pattern": rng.choice(["^a", "b$", "^abc$", "^[ab]*$"])},
        {"type": "object", "required": [rng.choice("ka")], "properties": {"k": {"const": rng.choice("xy")}}},
        {"type": "object", "required": ["a"], "additionalProperties": False, "properties": {"a": {"type": "integer"}}},
        {"type": "array", "minItems": rng.choice([0, 1]), "maxItems": rng.choice([0, 2])},
    ]
    return rng.choice(choices)


def test_what_is_proved_disjoint_is():
    rng, proved = random.Random(3), 0
    for _ in range(400):
        pair = [random_flat_schema(rng), random_flat_schema(rng)]
        if all_disjoint(pair, Pointers({})):
            proved += 1
            both = [v for v in VALUES if all(jsonschema.Draft202012Validator(schema).is_valid(v) for schema in pair)]
            assert both == [], pair
    assert proved > 100


def test_disjoint_patterns():
    assert disjoint_patterns(["^a", "^b"])
    assert disjoint_patterns(["^[0-9]+$", "^[a-z]+$"])
    assert not disjoint_patterns(["[0-9]{2,}", "X_"])  # their alphabets differ; "12X_" has both
    assert not disjoint_patterns(["^a|b", "^b"])
    assert not disjoint_patterns(["f.*", "b.*"])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("time", "23:59:60Z", "22:59:60Z"),
        ("date-time", "1990-12-31T15:59:60-08:00", "2024-01-01"),
        ("duration", "P4DT12H30M5S", "P"),
        ("email", '"joe bloggs"@example.com', "joe@"),
        ("hostname", "xn--4gbwdl.xn--wgbh1c", "xn--X"),
        ("ipv4", "1.2.3.4", "1.2.3.400"),
        ("ipv6", "::ffff:192.168.0.1", "1::2::3"),
        ("uri", "http://[::1]/a?b#c", "//no/scheme"),
        ("uri-reference", "a/b", "\\\\share"),
        ("uuid", "123E4567-E89B-12D3-A456-426614174000", "x"),
        ("json-pointer", "/a~1b/0", "a"),
        ("regex", "a+", "a("),
    ],
)
def test_formats(bench, name, good, bad):
    assert FORMATS[name].check(good)
    assert not FORMATS[name].check(bad)
    grammar = bench.compile("json_schema", json.dumps({"type": "string", "format": name}))
    assert bench.accepts(grammar, json.dumps(good))
    assert not bench.accepts(grammar, json.dumps(bad))


def test_brackets_do_not_depend_on_how_the_text_is_cut():
    text = b'{"a\\"]": [1, {"b": "}\\\\"}]'
    whole = Brackets().after(text)
    for cut in range(len(text)):
        assert Brackets().after(text[:cut]).after(text[cut:]) == whole
    assert whole.open == 1


def test_token_table():
    table = TokenTable([b"a", b"ab", b"b", b"abc", b"", b"\xff\xff"])
    assert sorted(table.starting_with(b"ab").tolist()) == [1, 3]
    assert table.starting_with(b"\xff").tolist() == [5]
    assert table.fewest(b"abcab") == [3, 1]
    assert table.fewest(b"") == []
    assert table.fewest(b"x") is None
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = bytes(rng.choice(list(b"abc"), 12).tolist())
        found = table.fewest(text)
        assert found is None or table.text(found) == text
