"""Constraints as the text that llguidance reads, and its messages as ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import llguidance

from sglite.errors import GrammarError
from sglite.protocol import Constraint, ConstraintKind, Whitespace
from sglite.runtime.grammar.gbnf import is_gbnf, lark_of

SEPARATORS: dict[str, Any] = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""At most one space, and only where json.dumps would put one: models loop in free whitespace, and fixed
whitespace is what makes keys forced."""

_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": True,
}
_WHITESPACE: dict[Whitespace, dict[str, Any]] = {
    "spaced": SEPARATORS,
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "pretty": {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": "\\n {0,16}| ",
    },
}
_OPTIONS = {name: json.dumps(_JSON_OPTIONS | spaces) for name, spaces in _WHITESPACE.items()}


def grammar_text(constraint: Constraint) -> str:
    if constraint.kind == "json_object":
        return _json('{"type": "object"}', constraint.whitespace)
    if constraint.kind == "json_schema":
        return _json(constraint.source, constraint.whitespace)
    return _SOURCES[constraint.kind](constraint.source)


def _json(schema: str, whitespace: Whitespace) -> str:
    """As LLMatcher.grammar_from_json_schema, which reads and writes the schema once more to put options into it."""
    comma = "" if schema == "{}" else ", "
    return f'{{"grammars": [{{"json_schema": {schema[:-1]}{comma}"x-guidance": {_OPTIONS[whitespace]}}}}}]}}'


def _regex(source: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(source))


def _choices(source: str) -> str:
    literals = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(source))
    return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(literals)))


def _structural_tag(source: str) -> str:
    """``source`` is a list of structures as tags.lowered_tags makes them."""
    tags = [
        llguidance.StructTag(
            trigger=item["trigger"],
            begin=item["begin"],
            grammar=item["schema"] | {"x-guidance": SEPARATORS},
            end=item["end"],
        )
        for item in json.loads(source)
    ]
    lark = llguidance.StructTag.to_grammar(tags, assume_special=False)
    return str(llguidance.LLMatcher.grammar_from_lark(lark))


def _ebnf(source: str) -> str:
    """Lark, or GBNF, known by its ``::=``."""
    return str(llguidance.LLMatcher.grammar_from_lark(lark_of(source) if is_gbnf(source) else source))


_SOURCES: dict[ConstraintKind, Callable[[str], str]] = {
    "regex": _regex,
    "choices": _choices,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}

# -------------------------------------------------------------------------------------------------------- messages

_KINDS = (
    ("limit", re.compile("too (complex|big|large|many|deep)|limit|fuel|exceed", re.IGNORECASE)),
    ("unsatisfiable", re.compile("unsatisfiable", re.IGNORECASE)),
    (
        "unsupported",
        re.compile("(?:not|only) supported|unsupported|unimplemented|unknown format|not disjoint", re.IGNORECASE),
    ),
)


def grammar_error(text: str, param: str) -> GrammarError:
    """llguidance's message as one line, sorted into our kinds, with the position of a fault in a regex."""
    kind = next((kind for kind, pattern in _KINDS if pattern.search(text)), "malformed")
    caret = re.search(r"^    ([^\n]*)\n    ( *)\^", text, re.MULTILINE)
    parsed = re.search(r"error: ([^\n]*)", text)
    message = parsed.group(1) if parsed and caret else text.split("\n", 1)[0]
    message = re.sub(r"\s+", " ", message).strip()[:300]
    pointer = str(len(caret.group(2))) if caret and param == "regex" else None
    where = f" at position {pointer}" if pointer else ""
    line = re.match(r"(?:at )?(\d+)\((\d+)\)", message) if param == "ebnf" and kind != "limit" else None
    pointer = f"{line.group(1)}:{line.group(2)}" if line else pointer
    return GrammarError(f"{param}: {message}{where}", kind=kind, param=param, pointer=pointer)
