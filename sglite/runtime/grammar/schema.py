"""A JSON Schema constraint, from its text to what a request needs: a mask, a judge, a validation."""

from __future__ import annotations

import graphlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglite.errors import GrammarError
from sglite.runtime.grammar.base import MaskGrammar
from sglite.runtime.grammar.blame import blame_pattern, contradiction
from sglite.runtime.grammar.hints import hints
from sglite.runtime.grammar.judge import SchemaJudge
from sglite.runtime.grammar.lower import EFFORTS, lower
from sglite.runtime.grammar.lowering import Effort, Lowered
from sglite.runtime.grammar.refs import Dialect, Json, Scope, dialect_of, refuse, root_scope
from sglite.runtime.grammar.spots import Atlas
from sglite.runtime.grammar.validation import Validation

MAX_CONDITIONS = 4
"""With more of them none is spelled out as alternatives: where they meet in one object, each multiplies it, and with
some hundred combinations llguidance leaves some out without a word."""


@dataclass(frozen=True)
class SchemaPlan:
    """``masks`` allows at least the schema's values; ``judge`` sees to the rest, and is None where there is none;
    ``validation`` checks finished answers; ``how`` says for each keyword how it is enforced; ``patterns`` are all
    that strings may have to match; ``hints`` are values that it speaks of."""

    masks: MaskGrammar
    mask_schema: dict[str, Any]
    judge: SchemaJudge | None
    validation: Validation
    how: dict[str, str]
    patterns: tuple[str, ...]
    hints: tuple[bytes, ...]


def plan_schema(source: str, compile: Callable[[str], MaskGrammar]) -> SchemaPlan:
    """``source`` is the schema as compact JSON; ``compile`` has the mask engine compile one. Raises GrammarError."""
    schema = json.loads(source)
    dialect = dialect_of(schema, source)
    scope = root_scope(schema, source, dialect)
    lowered, masks = _masks(schema, scope, dialect, EFFORTS[_has_many_conditions(schema, source) :], compile)
    atlas = Atlas(schema, scope, dialect, lowered.judged)
    validation = Validation(schema, dialect)
    judge = SchemaJudge(atlas, validation) if lowered.judged else None
    patterns = tuple(dict.fromkeys(pattern.source for _, pattern in lowered.patterns))
    return SchemaPlan(masks, lowered.mask, judge, validation, lowered.how, patterns, hints(schema) if judge else ())


def _masks(
    schema: Json,
    scope: Scope,
    dialect: Dialect,
    efforts: Sequence[Effort],
    compile: Callable[[str], MaskGrammar],
) -> tuple[Lowered, MaskGrammar]:
    """Ask for as much as the mask engine can do. What it proves unsatisfiable is: the mask allows no less."""
    refusal: GrammarError | None = None
    for effort in efforts:
        if refusal is not None and effort.merge and "circular" in str(refusal):
            continue  # only merging less helps
        lowered = lower(schema, scope, dialect, effort)
        if refusal is None:
            _refuse_cycles(Atlas(schema, scope, dialect, lowered.judged), lowered)
        try:
            return lowered, compile(json.dumps(lowered.mask, ensure_ascii=False))
        except GrammarError as error:
            if error.kind == "malformed":
                blame_pattern(lowered)
                raise
            if error.kind == "unsatisfiable":
                refuse(str(error), contradiction(schema, scope, dialect, effort, compile), error.kind)
            refusal = error
    assert refusal is not None
    raise refusal


def _has_many_conditions(schema: Json, source: str) -> bool:
    few = '"depende' not in source and sum(map(source.count, ('"if":', '"not":', '"minP'))) <= MAX_CONDITIONS
    return not few and _conditions(schema) > MAX_CONDITIONS


def _conditions(node: Json) -> int:
    """How many conditions could be spelled out (or a few more: properties may have such names, too)."""
    if isinstance(node, list):
        return sum(map(_conditions, node))
    if not isinstance(node, dict):
        return 0
    own = sum(len(node[k]) for k in ("dependencies", "dependentRequired", "dependentSchemas") if _is_map(node.get(k)))
    return own + sum(k in node for k in ("if", "not", "minProperties")) + sum(map(_conditions, node.values()))


def _is_map(value: Json) -> bool:
    return isinstance(value, dict)


def _refuse_cycles(atlas: Atlas, lowered: Lowered) -> None:
    """A node that leads back to itself without going into a value means nothing, and checking it never ends. Only
    references lead back."""
    graph: dict[int, list[int]] = {}
    todo = [(node, scope.enter(node)) for node, scope in lowered.targets if isinstance(node, dict)]
    while todo:
        placed = todo.pop()
        if id(placed[0]) not in graph:
            reached = list(atlas.same_value(placed))
            graph[id(placed[0])] = [id(node) for node, _ in reached]
            todo += reached
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        refuse("a reference leads back to itself without going into a value", "")
