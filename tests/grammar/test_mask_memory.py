"""Masks that are remembered: each is the very mask that the engine would compute, and no more are kept than allowed."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.guard import fill_batch
from sglite.runtime.grammar.json_places import JsonPlaces
from sglite.runtime.grammar.llguidance_backend import LLGuidanceBackend, fill_rows
from sglite.runtime.grammar.mask_memory import MaskMemory, places_of
from sglite.runtime.grammar.places import TextPlaces
from sglite.runtime.grammar.regex_places import MAX_SIZE, RegexPlaces

SLOW = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
NAMED = '{"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string", "maxLength": 9}}'


@pytest.fixture(scope="module")
def backends(bench):
    """One that remembers and its plain twin, which has no room to."""
    return LLGuidanceBackend(bench.vocabulary), LLGuidanceBackend(bench.vocabulary, memory=0)


def row_of(matcher) -> np.ndarray | str:
    row = np.full(matcher._vocabulary.words, 7, np.int32)
    try:
        matcher.fill(row)
    except GrammarError as error:
        return error.kind
    return row


def assert_same_masks(backends, constraint: Constraint, seed: int, walks: int = 12, steps: int = 30) -> None:
    """Random walks, with some steps back: the mask of every place is that of the plain twin."""
    try:
        warm, plain = (backend.compile(constraint) for backend in backends)
    except GrammarError:
        return
    rng = random.Random(seed)
    for _ in range(walks):
        one, other, taken = warm.matcher(), plain.matcher(), 0
        for _ in range(steps):
            mask, expected = row_of(one), row_of(other)
            assert np.array_equal(mask, expected), constraint
            allowed = (
                [] if isinstance(mask, str) else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            )
            if one.terminated or not len(allowed):
                break
            id = rng.choice(allowed.tolist())
            assert one.accept([id]) and other.accept([id])
            taken += 1
            if rng.random() < 0.15:
                back = rng.randint(1, min(3, taken))
                one.rollback(back), other.rollback(back)
                taken -= back
            if rng.random() < 0.1:
                one, other = one.clone(), other.clone()


ATOMS = st.sampled_from(
    [
        *(
            "a",
            "b",
            "x",
            "foo",
            "1",
            " ",
            '"',
            "\\.",
            "[ab]",
            "[^a]",
            "[a-f0-9]",
            "\\d",
            "\\w",
            "\\s",
            ".",
            "é",
            "[é-ü]",
        ),
        *("(?:ab|a)", "(foo|foobar)", "[^\\x41]", "\\D", "[\\w-]", "[-a]", "\\n", "(?i:ab)", "\\pL", "[[:alpha:]]"),
    ]
)
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,9}", "{2,}", "{1,16}", "", "", ""])
REGEXES = st.recursive(
    st.tuples(ATOMS, COUNTS).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        st.tuples(inner, COUNTS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@SLOW
@given(REGEXES, st.integers(0, 1000))
def test_masks_of_regexes(backends, source, seed):
    assert_same_masks(backends, Constraint("regex", source), seed)


LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "minLength": 3},
        {"type": "string", "minLength": 25, "maxLength": 60},
        {"type": "string", "pattern": "^(ab|a)+$"},
        {"type": "string", "pattern": "b", "maxLength": 4},
        {"type": "string", "format": "date"},
        {"type": ["string", "null"], "maxLength": 3},
        {"type": ["integer", "string", "array"], "minimum": 3, "maxLength": 2, "items": {"type": "null"}},
        {"type": "integer", "minimum": 3, "maximum": 120},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["red", "green", 3, None, {"a": 1}]},
        {"const": "aaa"},
        {"$ref": "#/$defs/tree"},
        {"$ref": "#/$defs/word"},
        True,
        {},
    ]
)


def records(inner):
    return st.dictionaries(st.sampled_from(["a", "b", "ab", 'q"', "é"]), inner, max_size=3).flatmap(
        lambda properties: st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.just(properties),
                "required": st.just([name for name in properties if len(name) == 1]),
                "additionalProperties": st.one_of(st.just(False), inner),
            },
            optional={"patternProperties": inner.map(lambda schema: {"^p": schema})},
        )
    )


def lists(inner):
    return st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 4),
            "prefixItems": st.lists(inner, max_size=2),
        },
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        records(inner), lists(inner), st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=8,
)
DEFS = {
    "word": {"type": "string", "maxLength": 3},
    "tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "w": {"$ref": "#/$defs/word"}}},
}


@SLOW
@given(SCHEMAS, st.sampled_from(["spaced", "compact", "pretty"]), st.integers(0, 1000))
def test_masks_of_schemas(backends, schema, whitespace, seed):
    source = json.dumps({"$defs": DEFS} | (schema if isinstance(schema, dict) else {}))
    assert_same_masks(backends, Constraint("json_schema", source, whitespace=whitespace), seed)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("choices", '["foo", "foobar", "for", "é"]'),
        ("ebnf", 'start: "a" b+ | start "c"\nb: /[0-9]/'),
        ("json_object", ""),
        ("regex", "(a[bc])*ad"),
        ("regex", r'\{"name": "[A-Za-z\' ]{1,16}", "age": [1-9][0-9]{0,2}\}'),
    ],
)
def test_masks_of_other_constraints(backends, kind, source):
    for seed in range(5):
        assert_same_masks(backends, Constraint(kind, source), seed)


def accepted(bench, grammar, text):
    matcher = grammar.matcher()
    assert matcher.accept(bench.ids(text))
    return matcher


@pytest.mark.parametrize(
    ("kind", "source", "one", "other", "same"),
    [
        ("regex", "[a-z ]{1,16}!", "ada", "bob", True),
        ("regex", "[a-z ]{1,16}!", "ada", "adam", False),
        ("regex", "[a-zé]{1,16}!", "ad", "aé", False),  # no place is known after é
        ("json_schema", '{"type": "string", "maxLength": 9}', '"aé\\n', '"bcd', True),
        ("json_schema", '{"type": "string", "maxLength": 9}', '"ab', '"bcd', False),
        ("json_schema", '{"type": "string", "minLength": 2}', '"abc', '"defgh', True),
        ("json_schema", '{"type": "string", "pattern": "^[a-z]+$"}', '"abc', '"abd', False),
        ("json_schema", '{"items": {"type": "object"}}', '[{"a": [1, "x"]}, {', '[{}, {', True),
        ("json_schema", '{"items": {"type": "object"}}', '[{"a": [1, "x"]}, {', '[{"a', False),
        ("json_schema", '{"properties": {"n": {"enum": [1, 3]}}}', '{"n": 1, "s": "a', '{"n":3,"s":"b', True),
        ("json_schema", NAMED, '{"a": "x', '{"a": "xyz', True),
        ("json_schema", NAMED, r'{"\u0061": "x', r'{"\u0061": "xyz', False),  # another name, for llguidance
        ("json_schema", NAMED, '{"b": "x', '{"b": "xyz', False),
    ],
)  # fmt: skip
def test_what_has_the_same_place(bench, backends, kind, source, one, other, same):
    grammar = backends[0].compile(Constraint(kind, source))
    keys = [accepted(bench, grammar, text)._key for text in (one, other)]
    assert keys[0] is not None
    assert (keys[0] == keys[1]) is same


def test_rows_share_masks_across_a_batch(bench, backends):
    grammar = backends[0].compile(Constraint("regex", "[a-z ]{1,16}!"))
    memory, hits = backends[0].memory, backends[0].memory.hits
    mask = np.zeros((3, bench.vocabulary.words), np.int32)
    assert fill_rows([(0, accepted(bench, grammar, "ada"))], mask) == {}
    assert fill_rows([(i, accepted(bench, grammar, text)) for i, text in ((1, "bob"), (2, "eve"))], mask) == {}
    assert memory.hits == hits + 2
    assert np.array_equal(mask[1], mask[0]) and np.array_equal(mask[2], mask[0]) and mask[0].any()


def test_no_more_is_kept_than_the_capacity():
    memory = MaskMemory(100)
    for i in range(9):
        memory.put((0, i), np.full(8, i, np.int32))
        assert memory.nbytes <= 100
        assert memory.get((0, i)) is not None
    assert [memory.get((0, i)) is not None for i in range(9)] == [False] * 6 + [True] * 3
    row = np.ones(8, np.int32)
    memory.put((1, 0), row)
    row[:] = 0
    kept = memory.get((1, 0))
    assert kept is not None and kept.all()
    memory.put((1, 1), np.zeros(26, np.int32))
    assert memory.nbytes == 0


@pytest.mark.parametrize(
    "source", ["a{1,2000}", "(?:){1000}" * 3, "((((x{0}){900}){900}){900}){900}", "(" * 5000, "(?=a)b", "a??"]
)
def test_what_no_automaton_is_made_of(source):
    assert isinstance(places_of(Constraint("regex", source), 9), TextPlaces)


def test_automata_and_schemas_are_used():
    assert isinstance(places_of(Constraint("regex", "[a-z]{1,16}(foo|bar)*"), 9), RegexPlaces)
    assert isinstance(places_of(Constraint("json_schema", "{}"), 9), JsonPlaces)


def test_places_of_long_texts_hold_little():
    places = RegexPlaces("[ab]*a[ab]{400}")
    place = places.start
    for byte in random.Random(0).choices(b"ab", k=3000):
        place = places.after(place, bytes([byte]))
    assert place is None and sum(map(len, places._states)) <= MAX_SIZE
    lists = JsonPlaces({}, 9)
    assert lists.key(lists.after(lists.start, b"[1" + b",2" * 500)) is not None
    assert lists.after(lists.start, b"[1" + b",2" * 5000) is None
    keys = b",".join(b'"%d":1' % i for i in range(99))
    assert lists.key(lists.after(lists.start, b"{" + keys + b"}")) is not None
    node = lists.start.node.within(ord("{"))
    assert node is not None and len(node._nodes) <= 2


def test_masks_of_a_guarded_batch(bench):
    grammar = bench.compile("json_schema", '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}')
    matchers = [grammar.matcher() for _ in range(4)]
    for matcher in matchers:
        assert matcher.accept(bench.ids('["a')) and matcher.retreat() == 0
    mask = np.zeros((4, bench.vocabulary.words), np.int32)
    for _ in range(2):
        assert fill_batch(matchers, mask) == {}
        assert all(np.array_equal(row, mask[0]) for row in mask)
