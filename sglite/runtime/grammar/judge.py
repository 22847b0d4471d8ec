"""Judges values as they complete, by what the mask could not enforce."""

from __future__ import annotations

from collections.abc import Iterator

from jsonschema.exceptions import ValidationError

from sglite.runtime.grammar.negate import normal
from sglite.runtime.grammar.refs import Json
from sglite.runtime.grammar.spots import Atlas, Spot
from sglite.runtime.grammar.stream import Frame, Member, Violation
from sglite.runtime.grammar.validation import Validation, parse

MISSING = frozenset(
    {"required", "dependentRequired", "contains", "minContains", "minProperties", "minItems", "dependencies"}
)
"""What going on may still repair; for the rest something that was said must change."""

REPAIRS = 4
"""How often going on is tried."""


class SchemaJudge:
    """A ``stream.Judge`` for one schema, shared by all its matchers."""

    def __init__(self, atlas: Atlas, validation: Validation) -> None:
        self._validation = validation
        self.root: Spot = atlas.spot()

    def value(
        self, spot: Spot, text: bytes | bytearray, start: int, stop: int, end: int, frame: Frame | None
    ) -> Violation | None:
        if not spot.checks:
            return None
        value = parse(text[start:stop])
        for node, scope in spot.checks:
            error = self._validation.error_at(node, scope, value)
            if error is not None:
                return Violation(start, _ends(error, end, start, frame), _describe(error))
        return None

    def key(self, frame: Frame, key: str, start: int, end: int) -> Violation | None:
        if any(member.key == key for member in _members(frame)):
            return Violation(start, (end,), f"the property {key[:80]!r} is there twice")
        most = frame.spot.most
        if most is not None and frame.count >= most:
            return Violation(start, (start + 1,), f"more than {most} properties")
        for node, scope in frame.spot.names:
            error = self._validation.error_at({"propertyNames": node["propertyNames"]}, scope, {key: None})
            if error is not None:
                return Violation(start, (end,), _describe(error))
        return None

    def normal(self, frame: Frame, text: bytes | bytearray, start: int, stop: int) -> str | None:
        return normal(parse(text[start:stop])) if frame.spot.unique else None

    def item(self, frame: Frame, normal: str | None, start: int, end: int) -> Violation | None:
        if normal is not None and any(member.normal == normal for member in _members(frame)):
            return Violation(start, (end,), "uniqueItems: the item is there already")
        return None


def _members(frame: Frame) -> Iterator[Member]:
    """From the last to the first."""
    member = frame.members
    while member is not None:
        yield member
        member = member.before


def _ends(error: ValidationError, end: int, start: int, frame: Frame | None) -> tuple[int, ...]:
    """What to give up, in this order: the end of the value, where more of it may help; the member at fault; the
    members from the last to the first, of each its value and then its key."""
    if frame is None:
        return (end,)
    members = list(_members(frame))
    fault = [member for member in members if error.path and member.key == error.path[0]]
    ends = [end] * REPAIRS if error.validator in MISSING else [] if fault else [end]
    for member in [*fault, *members]:
        ends += [member.end, member.key_end]
    return (*ends, end, start + 1) if start else (*ends, end)


def _describe(error: ValidationError) -> str:
    pointer = "/".join(str(part) for part in error.absolute_path)
    return f"{error.validator}: {error.message[:200]}" + (f" at /{pointer}" if pointer else "")


def check_text(validation: Validation, text: bytes) -> str | None:
    """What is wrong with a finished text, or None."""
    try:
        value: Json = parse(text)
    except ValueError as fault:
        return f"not JSON: {fault}"
    error = validation.error(value)
    return None if error is None else _describe(error)
