"""The dry run: one record, the batch form, the command."""

from __future__ import annotations

import argparse
import json

import pytest

from sglite.errors import ConfigError
from sglite.protocol import Constraint
from sglite.runtime.grammar import check
from sglite.runtime.grammar.cache import GrammarCache
from sglite.runtime.grammar.check import Checker, check_lines

RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "tags": {"type": "array", "uniqueItems": True}},
    "required": ["a"],
}


@pytest.fixture(scope="module")
def checker(bench) -> Checker:
    return Checker(GrammarCache(bench.backend), bench.ids)


def test_a_record_says_how_and_what(checker):
    answer = checker.record({"id": 7, "schema": RECORD, "texts": ['{"a": 1}', '{"a": 1, "tags": [1, 1]}', "nonsense"]})
    assert (answer["id"], answer["accepted"], answer["reason"], answer["pointer"]) == (7, True, None, None)
    assert answer["keywords"]["uniqueItems"] == "rollback"
    assert answer["keywords"]["required"] == "mask"
    assert answer["compile_ms"] > 0
    assert [text["accepted"] for text in answer["texts"]] == [True, False, False]
    assert answer["texts"][0]["forced_tokens"] > 0
    assert "uniqueItems" in answer["texts"][1]["reason"]


def test_another_order_is_valid_but_not_as_written(checker):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    texts = ['{"a": 1, "b": 2}', '{"b": 2, "a": 1.0}', '{"a": 1, "b": 2, "a": 1}', '{"b": 2, "a": "x"}']
    answer = checker.record({"schema": schema, "texts": texts})
    assert [(text["accepted"], text["as_written"]) for text in answer["texts"]] == [
        (True, True),
        (True, False),
        (False, False),
        (False, False),
    ]


@pytest.mark.parametrize(
    ("whitespace", "texts"),
    [
        ("compact", {'{"a":1,"tags":[]}': True, '{"a": 1}': False, '{"a":1, "tags":[]}': False}),
        ("spaced", {'{"a":1,"tags":[]}': True, '{"a": 1, "tags": []}': True, '{\n  "a": 1\n}': False}),
        ("pretty", {'{"a":1}': True, json.dumps({"a": 1, "tags": [1, 2]}, indent=2): True, '{\n\n"a":1}': False}),
    ],
)
def test_whitespace_is_a_choice(checker, whitespace, texts):
    constraint = Constraint("json_schema", json.dumps(RECORD), whitespace)
    found = checker.check(constraint, list(texts))["texts"]
    assert [text["as_written"] for text in found] == list(texts.values())


def test_whitespace_belongs_to_json(checker):
    answer = checker.check(Constraint("regex", "a", "pretty"), [])
    assert not answer["accepted"]
    assert "whitespace" in answer["reason"]


def test_refusals_have_a_pointer_and_one_bad_line_stops_nothing(checker):
    lines = [
        json.dumps({"id": "a", "schema": {"properties": {"x/y": {"type": "banana"}}}}),
        "not json",
        json.dumps({"id": "b"}),
        json.dumps({"id": "c", "regex": "a+", "schema": {}}),
        json.dumps({"id": "d", "regex": "a+", "texts": "a"}),
        "",
        json.dumps({"id": "e", "regex": "a+", "texts": ["aa", "b", "\ud800"]}),
        json.dumps({"id": "f", "choices": ["x", "xy"], "texts": ["xy"]}),
        json.dumps({"id": "g", "ebnf": 'start: "a"', "texts": ["a"]}),
        "[" * 100_000,
    ]
    answers = list(check_lines(checker, lines))
    assert [answer["id"] for answer in answers] == ["a", None, "b", "c", "d", "e", "f", "g", None]
    assert [answer["accepted"] for answer in answers] == [False] * 5 + [True] * 3 + [False]
    assert answers[0]["pointer"] == "/properties/x~1y/type"
    assert answers[1]["reason"].startswith("the line is not JSON")
    assert [text["accepted"] for text in answers[5]["texts"]] == [True, False, False]


@pytest.fixture
def command(checker, monkeypatch):
    monkeypatch.setattr(check, "_checker", lambda options: checker)
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return lambda *arguments: check.main(parser.parse_args([str(argument) for argument in arguments]))


def test_command_for_one_schema(command, tmp_path, capsys):
    schema, good = tmp_path / "s.json", tmp_path / "good.json"
    schema.write_text(json.dumps(RECORD))
    good.write_text('{"a": 1}\n')
    assert command("--schema", schema, "--instance", good) == 0
    assert json.loads(capsys.readouterr().out)["texts"][0]["accepted"]
    assert command("--schema", schema, "--text", "{}") == 1
    assert command("--regex", "a+", "--text", "aa") == 0


def test_command_for_a_batch(command, tmp_path):
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    separator = '{"id": 3, "schema": {"const": "\u2028"}, "texts": ["\\"\u2028\\""]}'
    lines.write_text(f'{{"id": 1, "regex": "a", "texts": ["a"]}}\nbroken\n{{"id": 2, "regex": "["}}\n{separator}')
    assert command("--jsonl", lines, "--out", out) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(answer["id"], answer["accepted"]) for answer in answers] == [
        (1, True),
        (None, False),
        (2, False),
        (3, True),
    ]
    assert answers[3]["texts"][0]["accepted"]


def test_command_refuses_what_does_not_go_together(command, tmp_path):
    with pytest.raises(ConfigError, match="exactly one"):
        command("--regex", "a", "--schema", tmp_path / "x")
    with pytest.raises(ConfigError, match="cannot read"):
        command("--schema", tmp_path / "missing")
    with pytest.raises(ConfigError, match="--out"):
        command("--regex", "a", "--out", tmp_path / "x")
    with pytest.raises(ConfigError, match="--instance"):
        command("--jsonl", tmp_path / "x", "--text", "a")
