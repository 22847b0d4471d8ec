"""Schemas of many kinds with texts: what the matcher accepts is what the jsonschema package calls valid.

OURS are those in which we read a schema otherwise than that package does, with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from sglite.runtime.grammar.cache import GrammarCache
from sglite.runtime.grammar.check import Checker

DATA = Path(__file__).parent.parent / "data" / "grammar"
ROWS = [json.loads(line) for line in (DATA / "fresh.jsonl").read_text(encoding="utf-8").strip().split("\n")]
"""Each with the verdicts of jsonschema 4.26 on its texts."""


@pytest.fixture(scope="module")
def checker(bench) -> Checker:
    return Checker(GrammarCache(bench.backend), bench.ids)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["schema"])[:60])
def test_as_jsonschema_says(checker, row):
    answer = checker.record(row)
    assert answer["accepted"], answer
    assert [t["accepted"] for t in answer["texts"]] == row["valid"], answer["texts"]


def test_the_verdicts_are_those_of_jsonschema():
    for row in ROWS:
        assert [valid(row["schema"], text) for text in row["texts"]] == row["valid"], row


def valid(schema, text: str) -> bool:
    try:
        value = json.loads(text, parse_constant=lambda word: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))


OURS = [
    ({"multipleOf": 0.01}, ["19.99", "0.07"], ["0.075", "1.005"], "decimals, not the nearest binary fractions"),
    ({"pattern": "^\\p{Lu}\\p{Ll}+$"}, ['"Żaba"'], ['"żaba"', '"ŻABA"'], "ECMA-262's classes, which re lacks"),
    ({"pattern": "^\\d\\w\\s$"}, ['"1a "'], ['"٣a "', '"1ż "'], "ECMA-262's classes are ASCII"),
    ({"pattern": "^a$"}, ['"a"'], ['"a\\n"'], "$ is the end, not before a last line break"),
]


@pytest.mark.parametrize(("schema", "good", "bad", "why"), OURS)
def test_where_we_read_a_schema_otherwise(checker, schema, good, bad, why):
    answer = checker.record({"schema": schema, "texts": [*good, *bad]})
    assert [t["accepted"] for t in answer["texts"]] == [True] * len(good) + [False] * len(bad), why


FORMATS = [
    (
        "date-time",
        ["2024-02-29T12:00:00Z", "2024-02-29t12:00:00.5+01:00"],
        ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z", "2024-02-29T25:00:00Z"],
    ),
    ("date", ["2000-02-29", "1999-12-31"], ["1900-02-29", "2024-13-01", "24-01-01", "2024-4-1"]),
    ("time", ["12:00:00Z", "23:59:60Z", "01:02:03.4-05:00"], ["12:00:00", "24:00:00Z", "12:60:00Z"]),
    (
        "uuid",
        ["2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
        ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"],
    ),
    ("email", ["joe@example.com", "te.s+t@sub.example.org"], ["joe", ".joe@example.com", "joe@", "a b@c.de"]),
    ("ipv4", ["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    ("ipv6", ["::1", "fe80::1:2", "::ffff:1.2.3.4", "1:2:3:4:5:6:7:8"], ["12345::", "1::2::3", ":1", "1:2:3:4:5:6:7"]),
    ("uri", ["https://example.com/a?b=c#d", "urn:isbn:1", "mailto:a@b.c"], ["//x/y", "no uri", "http://a b", "\\\\x"]),
    ("hostname", ["example.com", "a-b.c"], ["-a.com", "a..b", "a_b.com", "x" * 64 + ".com"]),
    ("duration", ["P1Y2M3DT4H5M6S", "PT0S", "P4W"], ["P", "PT", "1Y", "P1D2H"]),
    ("json-pointer", ["", "/a~1b/0"], ["a", "/~2"]),
]


@pytest.mark.parametrize(("name", "good", "bad"), FORMATS)
def test_formats_are_assertions(checker, name, good, bad):
    texts = [json.dumps(text) for text in (*good, *bad)]
    answer = checker.record({"schema": {"type": "string", "format": name}, "texts": texts})
    assert [t["accepted"] for t in answer["texts"]] == [True] * len(good) + [False] * len(bad), answer["texts"]


REFUSED = [
    ({"type": "integer", "minimum": 5, "maximum": 1}, "unsatisfiable"),
    ({"enum": []}, "unsatisfiable"),
    (False, "unsatisfiable"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "unsatisfiable"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "unsatisfiable"),
    ({"required": ["a"], "properties": {"a": False}, "type": "object"}, "unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "unsatisfiable"),
    ({"type": "string", "pattern": "^a{5}$", "maxLength": 3}, "unsatisfiable"),
    ({"const": 5, "type": "string"}, "unsatisfiable"),
    ({"type": "banana"}, "malformed"),
    ({"pattern": "["}, "malformed"),
    ({"minimum": "5"}, "malformed"),
    ({"required": "a"}, "malformed"),
    ({"properties": []}, "malformed"),
    ({"items": 5}, "malformed"),
    ({"$ref": "#/$defs/none"}, "malformed"),
    ({"$ref": "#"}, "malformed"),
    ({"$ref": "https://example.com/x.json"}, "unsupported"),
    ({"$schema": "https://example.com/own"}, "unsupported"),
    ({"allOf": []}, "malformed"),
    ({"type": []}, "malformed"),
    ({"oneOf": [True, True]}, "unsatisfiable"),
    ({"not": {}}, "unsatisfiable"),
    ({"required": ["a"], "properties": {"b": {}}, "additionalProperties": False, "type": "object"}, "unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "kind"), REFUSED)
def test_refusals_by_kind(checker, schema, kind):
    answer = checker.record({"schema": schema})
    assert not answer["accepted"]
    assert answer["kind"] == kind, answer
