"""Regular expressions of JSON Schema (ECMA-262), rewritten for the two engines that read them here.

One pass over the pattern writes every construct in a form that means the same to Rust's regex syntax (the mask) and
to the ``regex`` module in its V1 mode (checking a finished string): classes are spelled out in ASCII, escapes become
the characters they stand for, ``.`` excludes ECMA's four line ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn

import regex

from sglite.errors import GrammarError

SPACE = "\\t-\\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": SPACE}
CONTROLS = {"t": "\\t", "n": "\\n", "r": "\\r", "f": "\\f", "v": "\\v"}
DOT = "[^\\n\\r\u2028\u2029]"
NEVER, ALWAYS = "[^\\x00-\\U0010ffff]", "(?s:.)"
SECONDS = 0.05
"""A pattern that matches longer than this is given up: a hostile one can take for ever to backtrack."""


@dataclass(frozen=True)
class Pattern:
    """``portable`` is the pattern for the mask engine, None where it needs backtracking features (``unportable``
    names the first). Leading lookaheads are no such feature: they are ``conditions``, patterns that must match too.
    ``loose`` is always portable; it matches at least what the pattern does: assertions are left out."""

    source: str
    checked: str
    portable: str | None
    loose: str
    conditions: tuple[str, ...]
    unportable: str | None

    def check(self) -> None:
        """Raises GrammarError when the pattern as a whole is no regular expression."""
        _check(self.checked, self.source)

    def search(self, text: str) -> bool:
        """Whether it matches somewhere in ``text``. Raises TimeoutError after 50 ms."""
        self.check()
        return _compiled(self.checked).search(text, timeout=SECONDS) is not None


_REPEATS = re.compile(r"[*+?}][*+?{]")
"""Two repeats of one thing, perhaps: no regular expression here, but the mask engine takes it."""


@lru_cache(4096)
def translate(source: str) -> Pattern:
    """Raises GrammarError (malformed) with the position in ``pointer`` for what is wrong in itself; of a portable
    pattern the mask engine (or ``Pattern.check``) finds the rest."""
    whole = _Translator(source)
    conditions, rest = _leading_lookaheads(source)
    parts = [_Translator(part) for part in (rest, *conditions)] if conditions else [whole]
    unportable = next((part.unportable for part in parts if part.unportable), None)
    checked = "(?V1)" + whole.text(end="\\Z")
    if unportable or _REPEATS.search(source):
        _check(checked, source)
    return Pattern(
        source=source,
        checked=checked,
        portable=None if unportable else parts[0].text(end="$"),
        loose=whole.loose(),
        conditions=() if unportable else tuple(part.text(end="$") for part in parts[1:]),
        unportable=unportable,
    )


@lru_cache(4096)
def _compiled(checked: str) -> regex.Pattern[str]:
    return regex.compile(checked)


def _check(checked: str, source: str) -> None:
    try:
        _compiled(checked)
    except (regex.error, RecursionError) as error:
        raise GrammarError(f"pattern {source[:80]!r}: {error}", param="json_schema") from None


def _leading_lookaheads(source: str) -> tuple[list[str], str]:
    """``^(?=A)(?=B)C`` is the conjunction of ``^(?:A)``, ``^(?:B)`` and ``^C``, as long as ``^`` governs all of it."""
    found: list[str] = []
    at = 1
    if not source.startswith("^(?=") or has_top_level_bar(source):
        return [], source
    while source.startswith("(?=", at):
        end = _closing(source, at)
        if end < 0:
            return [], source
        found.append("^(?:" + source[at + 3 : end] + ")")
        at = end + 1
    return found, "^" + source[at:]


def _closing(source: str, start: int) -> int:
    """Index of the parenthesis that closes the one at ``start``, or -1."""
    depth = 0
    for at, char in plain_characters(source, start):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at
    return -1


def has_top_level_bar(source: str) -> bool:
    """Whether alternatives are written outside of any group."""
    depth = 0
    for _, char in plain_characters(source):
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            return True
    return False


def plain_characters(source: str, start: int = 0) -> list[tuple[int, str]]:
    """The characters that are neither escaped nor in a class, with their places."""
    found, at, inside = [], start, False
    while at < len(source):
        char = source[at]
        if char == "\\":
            at += 2
            continue
        if inside:
            inside = char != "]"
        elif char == "[":
            inside = True
        else:
            found.append((at, char))
        at += 1
    return found


END = "$"


class _Unportable(NamedTuple):
    """A piece that only backtracking engines know, and one that matches at least as much."""

    exact: str
    loose: str


class _Translator:
    """``out`` holds the pieces; the piece that is the very object END stands for the end of the text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.out: list[str | _Unportable] = []
        self.unportable: str | None = None
        while self.at < len(source):
            self.out.append(self._next())

    def text(self, *, end: str) -> str:
        pieces = (piece.exact if isinstance(piece, _Unportable) else piece for piece in self.out)
        return "".join(end if piece is END else piece for piece in pieces)

    def loose(self) -> str:
        return "".join(piece.loose if isinstance(piece, _Unportable) else piece for piece in self.out)

    def _next(self) -> str | _Unportable:
        char = self.source[self.at]
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._class()
        if char == "(":
            return self._group()
        self.at += 1
        if char == ".":
            return DOT
        if char == "$":
            return END
        if char == "{" and not self._counts():
            return "\\{"
        return "\\" + char if char == "]" or (char == "}" and not self._ends_count()) else char

    def _counts(self) -> bool:
        return re.match(r"\d+(,\d*)?\}", self.source[self.at : self.at + 24]) is not None

    def _ends_count(self) -> bool:
        return re.search(r"\{\d+(,\d*)?$", self.source[max(0, self.at - 24) : self.at - 1]) is not None

    def _group(self) -> str | _Unportable:
        opening = re.compile(r"\((\?(:|=|!|<=|<!|P?<[^>]*>)?)?").match(self.source, self.at)
        assert opening is not None
        text = opening.group()
        if text in ("(?=", "(?!", "(?<=", "(?<!"):
            return self._lookaround(text)
        self.at = opening.end()
        return text if text != "(?" else self._fail("unknown group")

    def _lookaround(self, opening: str) -> _Unportable:
        start, end = self.at + len(opening), _closing(self.source, self.at)
        if end < 0:
            self._fail("unclosed group")
        self.at = end + 1
        self.unportable = self.unportable or f"lookaround {opening}...)"
        return _Unportable(opening + _Translator(self.source[start:end]).text(end="\\Z") + ")", "(?:)")

    def _class(self) -> str:
        self.at += 1
        negated = self._skip("^")
        if self._skip("]"):
            return ALWAYS if negated else NEVER
        items: list[str] = []
        while not self._skip("]"):
            items.append(self._class_item())
        return "[" + "^" * negated + "".join(items) + "]"

    def _class_item(self) -> str:
        if self.at >= len(self.source):
            self._fail("unclosed class")
        first = self._class_atom()
        is_range = self.source[self.at : self.at + 1] == "-" and self.source[self.at + 1 : self.at + 2] not in ("]", "")
        if not is_range or len(first) > 2:  # after a class such as \\d a dash is a dash
            return first
        self.at += 1
        last = self._class_atom()
        return f"{first}-{last}" if len(last) <= 2 else f"{first}\\-{last}"

    def _class_atom(self) -> str:
        """One member: a character of at most two, or a set."""
        if self.source[self.at] == "\\":
            return self._character_escape(inside=True)
        char = self.source[self.at]
        self.at += 1
        return _literal(char)

    def _escape(self) -> str | _Unportable:
        start, char = self.at, self.source[self.at + 1 : self.at + 2]
        self.at += 2
        if char and char in "bB":
            return self._backtracking(start, "word boundary", "(?:)")
        if char and char in "k123456789":
            return self._backtracking(start, "back-reference", "(?s:.)*")
        self.at = start
        return self._character_escape(inside=False)

    def _character_escape(self, *, inside: bool) -> str:
        start, char = self.at, self.source[self.at + 1 : self.at + 2]
        self.at += 2
        if not char:
            self._fail("nothing after the last backslash")
        if char.lower() in CLASSES:
            return _set(CLASSES[char.lower()], negated=char.isupper(), inside=inside)
        if char in CONTROLS:
            return CONTROLS[char]
        if char in "pP":
            return self._property(start)
        if char == "b":
            return "\\x08"
        return _literal(self._character(char, start))

    def _character(self, char: str, start: int) -> str:
        """The character an escape stands for."""
        code = re.compile(r"\\(?:u\{([0-9A-Fa-f]+)\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|c([A-Za-z]))")
        found = code.match(self.source, start)
        if found is None:
            return "\0" if char == "0" else self._identity(char)
        self.at = found.end()
        if found.group(4):
            return chr(ord(found.group(4)) % 32)
        value = int(found.group(1) or found.group(2) or found.group(3), 16)
        low = code.match(self.source, self.at)
        if 0xD800 <= value < 0xDC00 and low is not None and low.group(2):
            self.at = low.end()
            value = 0x10000 + ((value - 0xD800) << 10) + (int(low.group(2), 16) - 0xDC00)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            self._fail("not a character")
        return chr(value)

    def _identity(self, char: str) -> str:
        return self._fail(f"unknown escape \\{char}") if char.isalnum() else char

    def _property(self, start: int) -> str:
        found = re.compile(r"\\[pP]\{[A-Za-z_0-9=]+\}").match(self.source, start)
        if found is None:
            return self._fail("a property needs braces, as \\p{L}")
        self.at = found.end()
        return found.group()

    def _backtracking(self, start: int, what: str, loose: str) -> _Unportable:
        named = re.compile(r"\\k<(\w+)>").match(self.source, start)
        if named is not None:
            self.at = named.end()
        self.unportable = self.unportable or f"{what} {self.source[start : self.at]}"
        exact = f"(?P={named.group(1)})" if named is not None else self.source[start : self.at]
        return _Unportable(exact, loose)

    def _skip(self, char: str) -> bool:
        found = self.source[self.at : self.at + 1] == char
        self.at += found
        return found

    def _fail(self, why: str) -> NoReturn:
        message = f"pattern {self.source[:80]!r}: {why} before position {self.at}"
        raise GrammarError(message, param="json_schema", pointer=str(self.at))


def _set(content: str, *, negated: bool, inside: bool) -> str:
    if negated:
        return f"[^{content}]"
    return content if inside else f"[{content}]"


def _literal(char: str) -> str:
    """``char`` for use in a class and outside of one."""
    return "\\" + char if char in "\\^$.|?*+()[]{}-&~#" else char
