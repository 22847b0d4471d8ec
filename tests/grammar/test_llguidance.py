"""The mask engine behind the seam: masks, EOS, rollback, forced tokens, errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sglite.errors import ConfigError, GrammarError
from sglite.runtime.grammar.guard import fill_batch
from sglite.runtime.grammar.vocabulary import Vocabulary

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "[0-9]+(\\.[0-9]+)?", ["1", "1.5", "10"], ["", "1.", "a", "1 "]),
        ("regex", "^ab$", ["ab"], ["xab", "abx"]),
        ("choices", '["foo", "foobar", "é\\n\\"x"]', ["foo", "foobar", 'é\n"x'], ["fo", "foob", ""]),
        ("choices", '[""]', [""], ["a"]),
        ("ebnf", 'start: "a" b+\nb: /[0-9]/', ["a1", "a12"], ["a", "1"]),
        ("ebnf", 'root ::= "a" b+\nb ::= [0-9]', ["a1", "a12"], ["a", "1"]),
        ("json_object", "", ["{}", '{"a": [1, {"b": null}]}', '{"a":1}'], ["[]", "1", "{", '{"a":  1}']),
        ("json_schema", PERSON, ['{"name": "Ada", "age": 3}', '{"name":"żółw 😀","age":-3}'], ["{}", '{"name": "x"}']),
        ("json_schema", '{"type": "string"}', ['"\\u00e9\\n\\ud83d\\ude00"', '"\x85"'], ['"\t"', '"\\ud83d"', '"\\x"']),
    ],
)
def test_language(bench, kind, source, good, bad):
    grammar = bench.compile(kind, source)
    assert [text for text in good if not bench.accepts(grammar, text)] == []
    assert [text for text in bad if bench.accepts(grammar, text)] == []


def test_eos_exactly_where_the_text_may_end(bench):
    matcher = bench.compile("choices", '["foo", "foobar"]').matcher()
    for text, may_end in [("f", False), ("oo", True), ("b", False), ("ar", True)]:
        assert matcher.accept(bench.ids(text))
        assert matcher.accepting == may_end
        assert (set(bench.eos) <= bench.allowed(matcher)) == may_end
    assert bench.allowed(matcher) == set(bench.eos)
    assert matcher.terminated


def test_mask_holds_no_special_token_and_no_padding(bench):
    matcher = bench.compile("json_schema", '{"type": "string"}').matcher()
    assert matcher.accept(bench.ids('"x'))
    allowed = bench.allowed(matcher)
    assert len(allowed) > 200
    assert not allowed & {0, 1, 2}
    assert max(allowed) < bench.size
    assert not matcher.accept([2])


def test_wrong_tokens_change_nothing(bench):
    matcher = bench.compile("json_schema", PERSON).matcher()
    assert matcher.accept(bench.ids('{"name'))
    before = bench.allowed(matcher)
    for wrong in (
        [0],
        [1],
        [bench.size],
        [bench.vocabulary.width],
        [10**9],
        [-1],
        [*bench.ids('":'), 5],
        bench.ids("}"),
    ):
        assert not matcher.accept(wrong)
        assert bench.allowed(matcher) == before
    assert matcher.accept(bench.ids('":"Ada","age":3}'))
    assert matcher.terminated


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 3}', '{"name":"żółw","age":-3}'])
def test_rollback_restores_every_place(bench, text):
    matcher = bench.compile("json_schema", PERSON).matcher()
    ids = [*bench.ids(text), bench.eos[1]]
    masks = []
    for id in ids:
        masks.append(bench.allowed(matcher))
        assert matcher.accept([id])
    for n in range(1, len(ids) + 1):
        matcher.rollback(n)
        assert bench.allowed(matcher) == masks[len(ids) - n]
        assert not matcher.accept([ids[-n], 10**9])
        assert matcher.accept(ids[len(ids) - n :])
        assert matcher.terminated


def test_clone_is_independent(bench):
    matcher = bench.compile("json_schema", PERSON).matcher()
    matcher.accept(bench.ids('{"'))
    twin = matcher.clone()
    assert twin.accept(bench.ids("name"))
    assert not twin.accept(bench.ids("name"))
    assert matcher.accept(bench.ids("name"))


def test_forced_tokens_are_canonical_and_stop_where_there_is_a_choice(bench):
    matcher = bench.compile("json_schema", PERSON).matcher()
    forced = matcher.forced()
    full = bench.ids('{"name": "Ada", "age": 3}')
    assert forced == full[: len(forced)]
    assert len(forced) >= 2
    assert matcher.accept(forced)
    choice = bench.compile("choices", '["order", "orderId"]').matcher()
    assert choice.accept(bench.ids("order"))
    assert choice.forced() == []


def test_random_walks_are_valid(bench):
    rng = np.random.default_rng(0)
    grammar = bench.compile("json_schema", PERSON)
    for _ in range(20):
        matcher, ids = grammar.matcher(), []
        while not matcher.terminated and len(ids) < 300:
            allowed = sorted(bench.allowed(matcher))
            ids.append(int(rng.choice(allowed)))
            assert matcher.accept(ids[-1:])
        if matcher.terminated:
            value = json.loads(bench.tokenizer.decode(ids))
            assert list(value) == ["name", "age"]
            assert isinstance(value["age"], int)


def test_batch_equals_single_rows_and_contains_failures(bench):
    grammars = [
        bench.compile("json_schema", PERSON),
        bench.compile("regex", "[a-c]+"),
        bench.compile("regex", "[ac]\\x04b"),
    ]
    matchers = [grammars[0].matcher(), None, grammars[1].matcher(), grammars[2].matcher(), grammars[0].matcher()]
    matchers[3].accept(bench.ids("a"))
    matchers[4].accept(bench.ids('{"name": "Ada", "age": 3}'))
    mask = np.zeros((5, bench.vocabulary.words), np.int32)
    failed = fill_batch(matchers, mask)
    assert list(failed) == [3]
    assert failed[3].kind == "unsatisfiable"
    assert (mask[1] == -1).all()
    for i in (0, 2, 4):
        row = np.zeros_like(mask[i])
        matchers[i].fill(row)
        assert (row == mask[i]).all()


@pytest.mark.parametrize(
    ("kind", "source", "error_kind", "pointer"),
    [
        ("regex", "a(?=b)c", "unsupported", "1"),
        ("regex", "ab[", "malformed", "2"),
        ("regex", "(a)\\1", "unsupported", "3"),
        ("json_schema", '{"type": "banana"}', "malformed", "/type"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}', "unsatisfiable", ""),
        ("ebnf", "start: x", "malformed", "1:8"),
        ("regex", "\\x04", "unsatisfiable", None),
        ("ebnf", 'start: x\nx: x "a"', "unsatisfiable", None),
        ("ebnf", 'root ::= "a', "malformed", "1:12"),
        ("structural_tag", "{}", "malformed", ""),
    ],
)
def test_refusals_say_what_and_where(bench, kind, source, error_kind, pointer):
    with pytest.raises(GrammarError) as caught:
        bench.compile(kind, source)
    assert (caught.value.kind, caught.value.pointer, caught.value.param) == (error_kind, pointer, kind)
    assert "\n" not in str(caught.value)


def test_vocabulary_needs_an_eos_inside_the_logits():
    for eos in ((), (7,)):
        with pytest.raises(ConfigError):
            Vocabulary("{}", 7, eos)


def test_a_mask_from_before_a_rollback_does_not_come_back(bench):
    """llguidance 1.9.1 alone would allow ``null`` as a key here."""
    schema = {"properties": {"q": {"type": "array", "items": {"type": "null"}}, "a": {"type": "string"}}}
    grammar = bench.compile("json_schema", json.dumps({"type": "object", "required": ["a"]} | schema))
    one, other = grammar.matcher(), grammar.matcher()
    word = {text: id for id, text in enumerate(bench.masks.tokens.bytes_of)}
    assert all(one.accept([word[text]]) for text in (b'{"', b"q", b'"', b":", b"[", b"null", b","))
    bench.allowed(one)
    one.rollback(2)
    for matcher, texts in ((one, (b"]", b",")), (other, (b'{"', b"q", b'"', b":", b"[", b"]", b","))):
        assert all(matcher.accept([word[text]]) for text in texts)
    assert bench.allowed(one) == bench.allowed(other)
