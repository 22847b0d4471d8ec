"""Which JSON Schema a schema is written in, and what its references mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import referencing
import referencing.exceptions
import referencing.jsonschema
from jsonschema_specifications import REGISTRY as METASCHEMAS

from sglite.errors import GrammarError

Json = Any
Schema = dict[str, Json] | bool


def refuse(message: str, pointer: str, kind: str = "malformed") -> NoReturn:
    """Raise the GrammarError for a fault at ``pointer`` in a schema."""
    raise GrammarError(f"json_schema at {pointer or '/'}: {message}", kind=kind, param="json_schema", pointer=pointer)


def step(pointer: str, name: str | int) -> str:
    """The JSON pointer one level further down."""
    return f"{pointer}/{str(name).replace('~', '~0').replace('/', '~1')}"


# ------------------------------------------------------------------------------------------------------------ dialect


@dataclass(frozen=True)
class Dialect:
    """``year`` orders the drafts (4, 6, 7, 2019, 2020). In a schema that says so itself and is no newer than draft 7,
    a ``$ref`` stands alone: what is written beside it is ignored."""

    year: int
    declared: bool

    @property
    def ref_stands_alone(self) -> bool:
        return self.declared and self.year <= 7


_YEARS = {
    "json-schema.org/draft-03/schema": 4,
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}
_OF_OLD = ('"dependencies"', '"additionalItems"', '"definitions"', '"items":[')
_OF_LATE = ('"$defs"', '"prefixItems"', '"dependentRequired"', '"dependentSchemas"', '"unevaluated', '"minContains"')


def dialect_of(schema: Json, source: str) -> Dialect:
    """As ``$schema`` says; without it 2020-12, or draft 7 when only words of draft 7 are used.

    ``source`` is the schema as compact JSON.
    """
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if name is None:
        old = any(word in source for word in _OF_OLD) and not any(word in source for word in _OF_LATE)
        return Dialect(7 if old else 2020, declared=False)
    year = _YEARS.get(str(name).split("://")[-1].rstrip("#"))
    if year is None:
        refuse(f"{str(name)[:100]!r} is not a JSON Schema draft known here", "/$schema", "unsupported")
    return Dialect(year, declared=True)


_SPECIFICATIONS = {
    4: referencing.jsonschema.DRAFT4,
    6: referencing.jsonschema.DRAFT6,
    7: referencing.jsonschema.DRAFT7,
    2019: referencing.jsonschema.DRAFT201909,
    2020: referencing.jsonschema.DRAFT202012,
}

# -------------------------------------------------------------------------------------------------------------- scopes


class Scope(Protocol):
    """The place a reference is read from."""

    def enter(self, node: Mapping[str, Json]) -> Scope:
        """The scope inside ``node``, which may set a new base with its ``$id``."""
        ...

    def look_up(self, ref: str) -> tuple[Json, Scope]:
        """The value ``ref`` points to, and its scope. Raises LookupError."""
        ...


@dataclass(frozen=True)
class Pointers:
    """For schemas without embedded ids and anchors, which are nearly all: ``#/a/b`` counted from the root."""

    root: Json

    def enter(self, node: Mapping[str, Json]) -> Pointers:
        return self

    def look_up(self, ref: str) -> tuple[Json, Pointers]:
        node = self.root
        for part in ref[1:].split("/")[1:]:
            node = _child(node, _unquote(part).replace("~1", "/").replace("~0", "~"))
        return node, self


def _child(node: Json, name: str) -> Json:
    if isinstance(node, list) and name.isdigit() and int(name) < len(node):
        return node[int(name)]
    if isinstance(node, dict) and name in node:
        return node[name]
    raise LookupError(name)


def _unquote(part: str) -> str:
    return unquote(part) if "%" in part else part


@dataclass(frozen=True)
class Resources:
    """Everything else, with the ``referencing`` library; nothing is ever fetched."""

    resolver: Any
    specification: Any

    def enter(self, node: Mapping[str, Json]) -> Resources:
        return Resources(self.resolver.in_subresource(self.specification.create_resource(node)), self.specification)

    def look_up(self, ref: str) -> tuple[Json, Resources]:
        try:
            found = self.resolver.lookup(ref)
        except referencing.exceptions.Unresolvable:
            raise LookupError(ref) from None
        return found.contents, Resources(found.resolver, self.specification)


def check_id(node: Json, pointer: str) -> None:
    if isinstance(node, dict) and not isinstance(node.get("$id", ""), str):
        refuse("$id must be a string", f"{pointer}/$id")


def root_scope(schema: Json, source: str, dialect: Dialect) -> Scope:
    check_id(schema, "")
    if not _has_bases(schema, source, dialect):
        return Pointers(schema)
    specification = _SPECIFICATIONS[dialect.year]
    resource = specification.create_resource(schema)
    return Resources(METASCHEMAS.resolver_with_root(resource), specification)


_REFERENCES = ('"$ref"', '"$dynamicRef"', '"$recursiveRef"')


def _has_bases(schema: Json, source: str, dialect: Dialect) -> bool:
    """Whether anything but a root pointer could be meant by a reference."""
    if not any(ref in source for ref in _REFERENCES):
        return False
    word = '"id":"' if dialect.year <= 4 else '"$id":"'
    own = isinstance(schema, dict) and isinstance(schema.get(word[1:-3]), str)
    plain = sum(source.count(f'{ref}:"#/') + source.count(f'{ref}:"#"') for ref in _REFERENCES)
    return source.count(word) > own or "nchor" in source or plain < sum(map(source.count, _REFERENCES))
