"""Which part of a refused schema is at fault, where the mask engine only says that something is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice

from sglite.errors import GrammarError
from sglite.runtime.grammar.base import MaskGrammar
from sglite.runtime.grammar.lower import lower
from sglite.runtime.grammar.lowering import Effort, Lowered
from sglite.runtime.grammar.refs import Dialect, Json, Scope, refuse, step

PARTS_TRIED = 200
"""Each is lowered and compiled by itself, a millisecond in most schemas."""

_DATA = frozenset({"enum", "const", "default", "examples"})


def blame_pattern(lowered: Lowered) -> None:
    """Raise the error of a pattern that is no regular expression, if there is one."""
    for pointer, pattern in lowered.patterns:
        try:
            pattern.check()
        except GrammarError as error:
            refuse(str(error), pointer)


def contradiction(
    schema: Json, scope: Scope, dialect: Dialect, effort: Effort, compile: Callable[[str], MaskGrammar]
) -> str:
    """The pointer of an inmost part that nothing satisfies, taken by itself; "" where only the whole has none."""
    for pointer, part in islice(_inmost_first(schema, ""), PARTS_TRIED):
        try:
            compile(json.dumps(lower(part, scope, dialect, effort).mask, ensure_ascii=False))
        except GrammarError as error:
            if error.kind == "unsatisfiable":
                return pointer + (error.pointer or "")
    return ""


def _inmost_first(node: Json, pointer: str) -> Iterator[tuple[str, Json]]:
    if isinstance(node, list):
        for i, child in enumerate(node):
            yield from _inmost_first(child, step(pointer, i))
    elif isinstance(node, dict):
        for name, child in node.items():
            if name not in _DATA:
                yield from _inmost_first(child, step(pointer, name))
        yield pointer, node
