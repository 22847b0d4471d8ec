"""Places in a JSON text that follows a schema: what is complete is left out of the name.

After a property's value nothing depends on that value any more, as long as the schema leaves one way to read what is
around it: the properties of one object, the items of one array. There the name holds keys and how many items there
are. Within a string that only its length restricts, the name holds how many characters there are. All else is told
apart to the letter: values of ``enum``, patterns, numbers, and everything within a value that two branches describe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, NamedTuple

from sglite.runtime.grammar.negate import ANNOTATIONS, type_of
from sglite.runtime.grammar.places import LONGEST
from sglite.runtime.grammar.refs import Json

LONGEST_NAME = 2048
"""Bytes of what is around a value. What follows on more is unknown for good, or every token would hold as much."""
_UNSAID = ANNOTATIONS | {"$schema", "$defs", "definitions"}
_WORDS = {
    "string": {"minLength", "maxLength"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
}
"""What may be said of a value of that type for its inside to have places."""
_OTHER_WORDS = {
    "string": {"pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_TYPED = {name: _WORDS.get(name, set()) | _OTHER_WORDS.get(name, set()) for name in (*_WORDS, *_OTHER_WORDS)}
"""Words that mean nothing to values of other types."""
_KINDS = {ord('"'): "string", ord("{"): "object", ord("["): "array"}
MAX_REFERENCES = 8
FREE = 1 << 62
BELOW, WITHIN = -2, -1
"""Of a string: no token can make it long enough; it is, and none can make it too long."""


class Node:
    """What the schema says of a value. ``schema`` None: nothing that is understood here."""

    def __init__(self, schema: Json, root: Json) -> None:
        self._schema = schema
        self._root = root
        self._nodes: dict[str | int | None, Node] = {}

    def within(self, byte: int) -> Node | None:
        """What is said of a value that begins with ``byte``, where that is one plain description."""
        if byte not in self._nodes:
            kind = _KINDS.get(byte)
            found = _pick(self._schema, kind, self._root, 0) if kind is not None else None
            self._nodes[byte] = Node(found, self._root)
        node = self._nodes[byte]
        return node if node._schema is not None else None

    def of_key(self, text: bytes) -> Node:
        """``text`` is the key as it is written. llguidance tells names apart as they are written, too, so one with
        escapes is not the property that it spells."""
        if b"\\" in text:
            return Node(None, self._root)
        key = text[1:-1].decode(errors="replace")
        name = key if key in self._schema.get("properties", {}) else None  # one node for all that nobody named
        if name not in self._nodes:
            self._nodes[name] = Node(self._property(key), self._root)
        return self._nodes[name]

    def of_item(self, i: int) -> Node:
        key = f"item {min(i, len(self._schema.get('prefixItems', ())))}"  # an array has no keys
        if key not in self._nodes:
            prefix = self._schema.get("prefixItems", ())
            self._nodes[key] = Node(prefix[i] if i < len(prefix) else self._schema.get("items", True), self._root)
        return self._nodes[key]

    @cached_property
    def length(self) -> tuple[int, int]:
        """Of a string."""
        return int(self._schema.get("minLength", 0)), int(self._schema.get("maxLength", FREE))

    def _property(self, key: str) -> Json:
        if "patternProperties" in self._schema:
            return None
        return self._schema.get("properties", {}).get(key, self._schema.get("additionalProperties", True))


def _pick(schema: Json, kind: str, root: Json, depth: int) -> dict[str, Any] | None:
    """The one object that tells all about values of type ``kind`` in ``schema``; None where there is not just one."""
    if schema is True:
        return {}
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return None
    words = schema.keys() - _UNSAID
    if words == {"$ref"}:
        return _pick(_target(schema["$ref"], root), kind, root, depth + 1)
    if words == {"anyOf"}:
        branches = [branch for branch in schema["anyOf"] if _may_be(branch, kind, root, 0)]
        return _pick(branches[0], kind, root, depth + 1) if len(branches) == 1 else None
    others = set().union(*(words for name, words in _TYPED.items() if name != kind))
    return schema if words <= {"type"} | _WORDS[kind] | others and kind in _types(schema) else None


def _may_be(schema: Json, kind: str, root: Json, depth: int) -> bool:
    """False only where no value of type ``kind`` satisfies ``schema``."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return schema is not False
    if schema.keys() == {"$ref"}:
        return _may_be(_target(schema["$ref"], root), kind, root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return kind in _types(schema) and (values is None or any(type_of(value) == kind for value in values))


def _types(schema: dict[str, Any]) -> Any:
    types = schema.get("type", tuple(_WORDS))
    return [types] if isinstance(types, str) else types


def _target(reference: str, root: Json) -> Json:
    """What a pointer in this document leads to; None for another reference."""
    if not reference.startswith("#/"):
        return root if reference == "#" else None
    node = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) and "%" not in name else None
    return node


Step = Callable[["Place", int], "Place"]


class Frame(NamedTuple):
    """An open array or object: what is said of it, where in the name it begins, its complete members."""

    node: Node
    start: int
    members: int


class Place(NamedTuple):
    """``step`` reads the next byte. ``around`` is the text so far, values left out. ``text`` is exact: of the key or
    value one is in, or the beginning of a character; ``length`` counts the characters of a string before it. ``depth``
    counts what is open in an exact value. ``space`` is white space at the end."""

    step: Step
    around: bytes
    frames: tuple[Frame, ...]
    node: Node
    text: bytes = b""
    length: int = 0
    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    space: bytes = b""


_SPACE = b" \t\r\n"
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_ORDINARY = re.compile(rb'[^"\\\x80-\xff]*').fullmatch
_UNKNOWN = b"?" * (LONGEST + 1)


class JsonPlaces:
    """See places.Places. No token has more than ``longest`` bytes."""

    def __init__(self, schema: Json, longest: int) -> None:
        self.start = Place(_value, b"", (), Node(schema, schema))
        self._longest = longest

    def after(self, place: Place | None, data: bytes) -> Place | None:
        if place is None:
            return None
        if place.step is _string and not place.escaped and not place.text and _ORDINARY(data):
            return Place(_string, place.around, place.frames, place.node, b"", place.length + len(data))
        for byte in data:
            place = place.step(place, byte)
        return place if len(place.around) <= LONGEST_NAME and len(place.space) <= LONGEST else None

    def key(self, place: Place | None) -> Hashable | None:
        if place is None or len(place.text) > LONGEST:
            return None
        length = self._distance(place) if place.step is _string else 0
        return place.step, place.around, place.text, length, place.escaped, place.space

    def _distance(self, place: Place) -> int:
        """The length of a string where one more token can make it long enough, or too long."""
        least, most = place.node.length
        reach = place.length + self._longest
        if reach < least:
            return BELOW
        return WITHIN if least <= place.length and reach <= most else place.length


def _value(place: Place, byte: int) -> Place:
    if byte in _SPACE:
        return place._replace(space=place.space + bytes((byte,)))
    if byte == ord("]"):
        return _close(place)
    node, place = place.node.within(byte), place._replace(space=b"")
    if node is None:
        return _exact(place._replace(step=_exact), byte)
    if byte == _QUOTE:
        return place._replace(step=_string, node=node, length=0)
    frames = (*place.frames, Frame(node, len(place.around), 0))
    return _next(place._replace(around=place.around + bytes((byte,)), frames=frames))


def _next(place: Place) -> Place:
    """Before the next member of what is open."""
    node, _, members = place.frames[-1]
    if place.around[-1:] in (b"{", b";"):
        return place._replace(step=_key, space=b"")
    return place._replace(step=_value, node=node.of_item(members), space=b"")


def _string(place: Place, byte: int) -> Place:
    if place.escaped:
        if byte == ord("u"):  # how surrogates count is not for here to say
            return place._replace(step=_exact, text=_UNKNOWN, quoted=True, escaped=False)
        return place._replace(escaped=False, length=place.length + 1)
    if byte == _BACKSLASH:
        return place._replace(escaped=True)
    if byte == _QUOTE:
        return _complete(place)
    if byte < 0x80:
        return place._replace(length=place.length + 1)
    return _character(place, place.text + bytes((byte,)))


def _character(place: Place, text: bytes) -> Place:
    """``text`` is the beginning of a character of several bytes, or all of it."""
    size = 2 + (text[0] >= 0xE0) + (text[0] >= 0xF0)
    return place._replace(text=b"", length=place.length + 1) if len(text) == size else place._replace(text=text)


def _exact(place: Place, byte: int) -> Place:
    """As far as need be to see where the value ends."""
    if not place.quoted and not place.depth and place.text and byte in b",]} \t\r\n":
        return _after(_complete(place), byte)
    text = place.text if len(place.text) > LONGEST else place.text + bytes((byte,))
    quoted, escaped, depth = place.quoted, False, place.depth
    if quoted:
        escaped = byte == _BACKSLASH and not place.escaped
        quoted = byte != _QUOTE or place.escaped
    else:
        quoted = byte == _QUOTE
        depth += (byte in b"[{") - (byte in b"]}")
    ended = not quoted and not depth and byte in b'"]}'
    return _complete(place) if ended else place._replace(text=text, quoted=quoted, escaped=escaped, depth=depth)


def _complete(place: Place) -> Place:
    around = place.around + b"v"
    return Place(_after, around, place.frames, place.node)


def _after(place: Place, byte: int) -> Place:
    if byte in _SPACE:
        return place._replace(space=place.space + bytes((byte,)))
    if byte != _COMMA or not place.frames:
        return _close(place)
    frame = place.frames[-1]
    separator = b";" if place.around[frame.start] == ord("{") else b","
    frames = (*place.frames[:-1], frame._replace(members=frame.members + 1))
    return _next(place._replace(around=place.around + separator, frames=frames))


def _close(place: Place) -> Place:
    *frames, last = place.frames
    return _complete(place._replace(around=place.around[: last.start], frames=tuple(frames)))


def _key(place: Place, byte: int) -> Place:
    if byte in _SPACE:
        return place._replace(space=place.space + bytes((byte,)))
    return _close(place) if byte == ord("}") else place._replace(step=_name, text=b'"', space=b"")


def _name(place: Place, byte: int) -> Place:
    text = place.text + bytes((byte,))
    if byte != _QUOTE or place.escaped:
        return place._replace(text=text, escaped=byte == _BACKSLASH and not place.escaped)
    node = place.frames[-1].node.of_key(text)
    return place._replace(step=_colon, around=place.around + text, node=node, text=b"")


def _colon(place: Place, byte: int) -> Place:
    if byte in _SPACE:
        return place._replace(space=place.space + bytes((byte,)))
    return place._replace(step=_value, around=place.around + b":", space=b"")
