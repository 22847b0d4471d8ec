"""Stop patterns against Python's own search, and what may not take long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.errors import InvalidRequestError
from sglite.runtime.stoppattern import StopPattern

PATTERNS = [
    r"ab|ba",
    r"a+b",
    r"a*?b{2,3}",
    r"(?:ab){1,2}c",
    r"[^a]c[a-c]",
    r"\bab\b",
    r"a\Bb",
    r"^a.b",
    r"(?m)^b.",
    r"(?m)a$",
    r"(?i)AB[c-d]?C",
    r"(?s)a.b",
    r"a.b",
    r"\d\W|\s\S",
    r"(a|b)*c(?:a|bb)+",
    r"(?i:A)b",
    r"x(?:|y)z|[^\n\W]1",
]


def plain(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return found.start() if found else None


@given(st.sampled_from(PATTERNS), st.text(alphabet="abcAxyz1 .\n", max_size=14))
def test_it_finds_a_match_exactly_where_python_does(pattern: str, text: str) -> None:
    """A character more makes every look ahead certain. The match that is complete first may begin later than the
    leftmost, which is then still open: both are matches."""
    scanner = StopPattern(pattern).scanner()
    whole = text + "\x00"
    scanner.feed(whole)
    assert (scanner.found is None) == (plain(pattern, whole) is None)
    if scanner.found is not None:
        assert re.compile(pattern).match(whole, scanner.found)
        assert scanner.found >= (plain(pattern, whole) or 0)


@given(st.sampled_from(PATTERNS), st.text(alphabet="abcAxyz1 .\n", max_size=14))
def test_what_is_not_held_back_is_never_part_of_a_match(pattern: str, text: str) -> None:
    scanner, certain = StopPattern(pattern).scanner(), 0
    for n, character in enumerate(text, 1):
        scanner.feed(character)
        if scanner.found is not None:
            assert scanner.found >= certain
            return
        certain = max(certain, n if scanner.earliest is None else scanner.earliest)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "not usable"),
        ("a*", "empty text"),
        ("|a", "empty text"),
        (r"\b", "empty text"),
        (r"(a)\1", "back-reference"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("a++", "possessive"),
        ("(?>a)b", "atomic"),
        ("a$", "end of the text"),
        (r"a\Z", "end of the text"),
        ("(?:a{50}){50}", "too large"),
        ("(?:){999999999}a{9999}", "too large"),
        ("(" * 5000 + "a" + ")" * 5000, "not usable"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(pattern: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        StopPattern(pattern)
    assert caught.value.param == "stop_regex"


def seconds(pattern: str, text: str) -> float:
    scanner = StopPattern(pattern).scanner()
    began = time.process_time()
    scanner.feed(text)
    assert scanner.found is None
    return time.process_time() - began


@pytest.mark.parametrize("pattern", [r"(?:a|aa)+[bc]", r"(a*)*b", "a?" * 60 + "b", r"(?:a+)+b|(x+x+)+y"])
def test_twice_the_text_takes_about_twice_as_long(pattern: str) -> None:
    short, long = (min(seconds(pattern, "a" * n) for _ in range(3)) for n in (500, 2000))
    assert long < 12 * short + 0.01
