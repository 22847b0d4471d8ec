"""The output stream through its seam: pieces in, certain text and covering ids out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.runtime.output import Emission, OutputStream
from sglite.runtime.stoppattern import StopPattern


class Bytes:
    """A detokenizer over UTF-8 bytes: token n is byte n, ids above 255 are the pieces of ``extra``."""

    def __init__(self, extra: Sequence[str] = ()) -> None:
        self._extra = [piece.encode() for piece in extra]
        self._rest = b""

    def whole(self, token: int) -> str | None:
        """Letters are known."""
        return None if self._rest or not 97 <= token <= 122 else chr(token)

    def push_one(self, token: int) -> str:
        self._rest += bytes([token]) if token < 256 else self._extra[token - 256]
        for cut in range(len(self._rest), -1, -1):
            try:
                text = self._rest[:cut].decode()
            except UnicodeDecodeError:
                continue
            self._rest = self._rest[cut:]
            return text
        raise AssertionError("the empty prefix always decodes")

    def flush(self) -> str:
        text, self._rest = self._rest.decode(errors="replace"), b""
        return text

    @property
    def pending(self) -> bool:
        return bool(self._rest)


def run(stream: OutputStream, ids: Sequence[int]) -> list[Emission]:
    emissions = []
    for token in ids:
        emissions.append(stream.push(token))
        if emissions[-1].stopped is not None:
            return emissions
    return [*emissions, stream.close()]


def text_of(emissions: Sequence[Emission]) -> str:
    return "".join(e.text for e in emissions)


def ids_of(emissions: Sequence[Emission]) -> list[int]:
    return [i for e in emissions for i in e.ids]


def test_text_without_stops_is_handed_out_at_once() -> None:
    stream = OutputStream(Bytes())
    assert stream.push(ord("a")) == Emission("a", (ord("a"),))


def test_no_half_characters_and_ids_wait_for_their_text() -> None:
    stream = OutputStream(Bytes())
    first, *middle, last = "é😀".encode()[2:]
    assert stream.push(first) == Emission()
    assert all(stream.push(byte) == Emission() for byte in middle)
    assert stream.push(last) == Emission("😀", (first, *middle, last))


def test_a_possible_stop_is_held_back_and_then_given() -> None:
    stream = OutputStream(Bytes(), ["stop"])
    assert text_of([stream.push(ord(c)) for c in "sto"]) == ""
    assert stream.push(ord("a")) == Emission("stoa", tuple(b"stoa"))


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "covered", "stop"),
    [
        (["ab\n", "\ncd"], ["\n\n"], "ab", 0, "\n\n"),  # spans tokens and cuts both
        (["STOP"], ["STOP"], "", 0, "STOP"),  # at the very first token
        (["a", "b", "STOP", "c"], ["STOP"], "ab", 2, "STOP"),
        (["x", "日本", "。終"], ["。"], "x日本", 2, "。"),
        (["aSTOPb", "c"], ["OP", "STOP"], "a", 0, "STOP"),  # the earliest wins
        (["abcd"], ["bc", "b"], "a", 0, "bc"),  # at the same place the longest
        (["a😀", "b"], ["😀b"], "a", 0, "😀b"),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], text: str, covered: int, stop: str) -> None:
    emissions = run(OutputStream(Bytes(pieces), stops), range(256, 256 + len(pieces)))
    assert text_of(emissions) == text
    assert emissions[-1].stopped == stop
    assert len(ids_of(emissions)) == covered
    assert emissions[-1].uncovered == len(text) - len("".join(pieces[:covered]))


@given(st.text(max_size=20))
def test_what_is_passed_by_is_as_if_it_was_pushed(text: str) -> None:
    ids = text.encode()
    fast, slow = OutputStream(Bytes()), OutputStream(Bytes())
    parts, emissions = list[Emission](), run(slow, ids)
    for token in ids:
        known = fast.passed(token)
        parts.append(fast.push(token) if known is None else Emission(known, (token,)))
    assert [*parts, fast.close()] == emissions


def test_nothing_is_passed_by_where_something_may_be_held_back() -> None:
    assert OutputStream(Bytes()).passed(ord("a")) == "a"
    assert OutputStream(Bytes(), ["zzz"]).passed(ord("a")) is None
    assert OutputStream(Bytes(), patterns=[StopPattern("z")]).passed(ord("a")) is None
    begun = OutputStream(Bytes())
    begun.push("é".encode()[0])
    assert begun.passed(ord("a")) is None


@pytest.mark.parametrize(
    ("pieces", "patterns", "text", "pattern"),
    [
        (["ab1", "2c"], [r"\d+c"], "ab", r"\d+c"),
        (["12", "34", "x"], [r"\d+[a-c]"], "1234x", None),
        (["say: en", "d now"], ["end|stop"], "say: ", "end|stop"),
        (["a q"], ["a.*z|q"], "a ", "a.*z|q"),  # what is complete counts, not what may become so
    ],
)
def test_stop_patterns(pieces: list[str], patterns: list[str], text: str, pattern: str | None) -> None:
    stream = OutputStream(Bytes(pieces), patterns=[StopPattern(p) for p in patterns])
    emissions = run(stream, range(256, 256 + len(pieces)))
    assert text_of(emissions) == text
    assert emissions[-1].stopped == pattern


def test_an_incomplete_character_at_the_end_is_replaced_and_its_ids_are_kept() -> None:
    head = "😀".encode()[:2]
    emissions = run(OutputStream(Bytes(), ["zzz"]), [ord("a"), *head])
    assert text_of(emissions).startswith("a") and "\ufffd" in text_of(emissions)
    assert ids_of(emissions) == [ord("a"), *head]


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_against_the_plain_definition(text: str, stops: list[str], size: int) -> None:
    """Whatever the token boundaries, the text ends before the first stop, and the ids decode to its beginning."""
    data = text.encode()
    extra = [data[i : i + size] for i in range(0, len(data), size)]
    detokenizer = Bytes()
    detokenizer._extra = extra
    emissions = run(OutputStream(detokenizer, stops), range(256, 256 + len(extra)))
    # a token at a time, the stop that is completed first counts; among those the earliest place, then the longest
    expected, found = text, None
    for end in range(1, len(extra) + 1):
        known = b"".join(extra[:end]).decode(errors="ignore")
        hits = [(known.find(s), -len(s), s) for s in stops if s in known]
        if hits:
            at, _, found = min(hits)
            expected = known[:at]
            break
    assert text_of(emissions) == expected
    assert emissions[-1].stopped == found
    covered = b"".join(extra[i - 256] for i in ids_of(emissions))
    uncovered = emissions[-1].uncovered
    assert covered == expected[: len(expected) - uncovered].encode()
