"""The walk that turns a JSON Schema into the one the mask engine gets, and what its parts share.

The result never allows less than the schema does. Where it allows more, the node is *judged*: what it holds is
checked as values complete (judge.py), and taken back when it breaks the schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from sglite.errors import GrammarError
from sglite.runtime.grammar.ecma import Pattern, translate
from sglite.runtime.grammar.refs import Dialect, Json, Schema, Scope, check_id, refuse, step

MAX_DEPTH = 64
MAX_NODES = 20_000
HOW = ("annotation", "mask", "proof", "rollback")
"""How a keyword is enforced, from the easiest: not at all, by the mask engine's own support, rewritten into what
masks can say, or by the judge."""


@dataclass(frozen=True)
class Effort:
    """How much to ask of the mask engine.

    ``rewrite``: spell conditions out as alternatives; otherwise judge them.
    ``merge``: let it merge what stands beside references and branches into them, which it cannot where they recur;
    otherwise judge what stands beside.
    """

    rewrite: bool = True
    merge: bool = True


@dataclass(frozen=True)
class Lowered:
    """``mask`` for the mask engine; ``how`` each keyword is enforced; ``judged`` the ids of the nodes of the source
    that the mask does not fully enforce; ``patterns`` all patterns with their pointers; ``targets`` the nodes that
    references lead to."""

    mask: dict[str, Any]
    how: dict[str, str]
    judged: frozenset[int]
    patterns: tuple[tuple[str, Pattern], ...]
    targets: tuple[tuple[Json, Scope], ...]


Path = tuple["Path", str | int] | str
"""A JSON pointer, or one and a name below it: few are ever written out."""


def written(path: Path) -> str:
    names = []
    while not isinstance(path, str):
        path, name = path
        names.append(name)
    return reduce(step, reversed(names), path)


class Place(NamedTuple):
    """A node of the source, where it is, and where its references are read from."""

    node: dict[str, Any]
    scope: Scope
    path: Path
    depth: int

    def below(self, *names: str | int) -> Path:
        path = self.path
        for name in names:
            path = (path, name)
        return path

    def at(self, *names: str | int) -> str:
        return written(self.below(*names))


Handler = Callable[["Lowering", Place, dict[str, Any]], None]
Handlers = Mapping[str, tuple[int, Handler]]
"""For each keyword, which handler rewrites it, and the handler's turn."""


@dataclass
class Lowering:
    """A handler adds to ``out``, the lowered node."""

    dialect: Dialect
    effort: Effort
    handlers: Handlers
    how: dict[str, str] = field(default_factory=dict)
    judged: set[int] = field(default_factory=set)
    patterns: list[tuple[str, Pattern]] = field(default_factory=list)
    _made: list[Any] = field(default_factory=list)
    """Schemas made on the way, kept alive so that no id is given out twice."""
    _names: dict[int, str] = field(default_factory=dict)
    _todo: list[tuple[str, Json, Scope, Path]] = field(default_factory=list)
    _targets: list[tuple[Json, Scope]] = field(default_factory=list)
    _count: int = 0

    def run(self, schema: Json, scope: Scope) -> Lowered:
        """Raises GrammarError with a pointer for what is malformed, unsupported or beyond the limits."""
        root = self.schema(schema, scope, "", 0)
        if root is False:
            refuse("nothing can satisfy it", "", "unsatisfiable")
        mask = dict(root) if isinstance(root, dict) else {}
        defs: dict[str, Schema] = {}
        while self._todo:
            name, node, inner, path = self._todo.pop()
            defs[name] = self.schema(node, inner, path, 0)
        return Lowered(
            {**mask, "$defs": defs} if defs else mask,
            self.how,
            frozenset(self.judged),
            tuple(self.patterns),
            tuple(self._targets),
        )

    def schema(self, node: Json, scope: Scope, path: Path, depth: int) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            refuse("a schema must be an object or a boolean", written(path))
        node.pop("$schema", None)  # the dialect is known, and jsonschema would switch to its own validators here
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_NODES:
            refuse(f"more than {MAX_DEPTH} levels or {MAX_NODES} nodes", written(path), "limit")
        if "$id" in node:
            check_id(node, written(path))
        place = Place(node, scope.enter(node), path, depth)
        out: dict[str, Any] = {}
        for handler in self._handlers_of(node):
            handler(self, place, out)
        if not self.effort.merge:
            self._separate(place, out)
        return False if out.pop(NEVER, False) else _ordered(node, out)

    def _handlers_of(self, node: dict[str, Any]) -> list[Handler]:
        if "$ref" in node and self.dialect.ref_stands_alone:
            return [self.handlers["$ref"][1]]
        known = self.handlers
        return [handler for _, handler in sorted({known[keyword] for keyword in node if keyword in known})]

    def _separate(self, place: Place, out: dict[str, Any]) -> None:
        """Leave the mask a node's own keywords or the first thing that combines others, and judge the rest."""
        combining = [keyword for keyword in COMBINING if keyword in out]
        own = out.keys() - {NEVER, LAST, *combining}
        if not combining or not (own or len(combining) > 1 or len(out.get("allOf", ())) > 1):
            return
        dropped = combining if "properties" in own else [*own, *combining[1:]]
        if "properties" not in own and len(out.get("allOf", ())) > 1:
            out["allOf"] = out["allOf"][:1]
            self.judge(place, "allOf")
            self.judge_parts(place.node.get("allOf"))
        for keyword in dropped:
            del out[keyword]
            self.judge(place, keyword)
            self.judge_parts(place.node.get(keyword))

    def judge_parts(self, parts: Json) -> None:
        """Judge the schemas of properties or items by themselves, too, so that a fault shows early."""
        several = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, list) else ()
        self.judged.update(id(part) for part in (parts, *several) if isinstance(part, dict))

    def sub(self, place: Place, value: Json, *names: str | int) -> Schema:
        """Lower the subschema ``value`` found at ``names`` below ``place``."""
        return self.schema(value, place.scope, place.below(*names), place.depth + 1)

    def made(self, place: Place, schema: Schema, *names: str | int) -> Schema:
        """Lower a schema that was made on the way: what is to be judged in it is judged with ``place``."""
        self._made.append(schema)
        known = len(self.judged)
        lowered = self.sub(place, schema, *names)
        if len(self.judged) > known:
            self.judged.add(id(place.node))
        return lowered

    def note(self, keyword: str, how: str) -> None:
        if how != self.how.get(keyword):
            self.how[keyword] = max(self.how.get(keyword, "annotation"), how, key=HOW.index)

    def judge(self, place: Place, keyword: str) -> None:
        self.note(keyword, "rollback")
        self.judged.add(id(place.node))

    def define(self, node: Json, scope: Scope, path: Path) -> str:
        """The reference under which a referenced node is (or will be) found in the mask."""
        if id(node) not in self._names:
            self._names[id(node)] = str(len(self._names))
            self._todo.append((self._names[id(node)], node, scope, path))
            self._targets.append((node, scope))
        return f"#/$defs/{self._names[id(node)]}"


def _ordered(node: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
    """The mask engine lets properties appear in the order in which it meets them: keep that of the source, but let
    branches and conditions, which mostly repeat some of a node's properties, come last."""
    if len(out) < 2 and LAST not in out:
        return out
    last = out.pop(LAST, [])
    first = {keyword: out[keyword] for keyword in node if keyword in out and keyword not in ("anyOf", "oneOf")}
    ordered = first | out
    if last and "allOf" in ordered:
        return {"allOf": [ordered, *last]}
    return {**ordered, "allOf": last} if last else ordered


COMBINING = ("$ref", "anyOf", "oneOf", "allOf")
NEVER, LAST = "never", "last"
"""Marks in a node that is being lowered: nothing can satisfy it; what is to come last in its allOf."""


def conjoin(out: dict[str, Any], schema: Schema) -> None:
    """Make ``schema`` hold as well."""
    if schema is False:
        out[NEVER] = True
    elif isinstance(schema, dict) and schema:
        out.setdefault("allOf", []).append(schema)


def alternatives(out: dict[str, Any], branches: Sequence[Schema]) -> None:
    """Make one of ``branches`` hold as well."""
    useful = [branch for branch in branches if branch is not False]
    if any(branch is True or branch == {} for branch in useful):
        return
    if len(useful) == 1 or not useful:
        conjoin(out, useful[0] if useful else False)
    elif "anyOf" in out:
        conjoin(out, {"anyOf": useful})
    else:
        out["anyOf"] = useful


def conjoin_last(out: dict[str, Any], branches: Sequence[Schema]) -> None:
    """Make one of ``branches`` hold as well, looked at after everything else."""
    both: dict[str, Any] = {}
    alternatives(both, branches)
    if both.pop(NEVER, False):
        out[NEVER] = True
    elif both:
        out.setdefault(LAST, []).append(both)


# --------------------------------------------------------------------------------------------------- checks of values


def a_list(place: Place, keyword: str) -> list[Any]:
    value = place.node.get(keyword, [])
    return value if isinstance(value, list) else refuse(f"{keyword} must be a list", place.at(keyword))


def a_map(place: Place, keyword: str) -> dict[str, Any]:
    value = place.node.get(keyword, {})
    return value if isinstance(value, dict) else refuse(f"{keyword} must be an object", place.at(keyword))


def branches_of(place: Place, keyword: str) -> list[Any]:
    return a_list(place, keyword) or refuse(f"{keyword} must not be empty", place.at(keyword))


def strings(value: Json, place: Place, *names: str) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    return refuse(f"{names[0]} must be a list of strings", place.at(*names))


def count(place: Place, keyword: str, default: int) -> int:
    value = place.node.get(keyword, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        refuse(f"{keyword} must be an integer that is not negative", place.at(keyword))
    return int(value)


def number(place: Place, keyword: str) -> float:
    value = place.node[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(f"{keyword} must be a number", place.at(keyword))
    return value


def pattern(low: Lowering, text: Json, pointer: str) -> Pattern:
    if not isinstance(text, str):
        refuse("a pattern must be a string", pointer)
    try:
        found = translate(text)
    except GrammarError as error:
        refuse(str(error), pointer)
    low.patterns.append((pointer, found))
    return found
