"""How sure the model was of each field of a JSON answer, from the logprobs its tokens had under the constraint.

Ask for them with ``LogprobParams(top=MAX_TOP_LOGPROBS, constrained=True)``: there a token that had to come is certain,
so what remains is the choice of the values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglite.errors import InvalidRequestError
from sglite.protocol import MAX_TOP_LOGPROBS, Constraint, LogprobParams, TokenLogprob

KINDS = ("json_schema", "json_object", "choices")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"true|false|null")
_GOES_ON = frozenset("0123456789.eE+-")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_OPTIONS = 1000


@dataclass(frozen=True, slots=True)
class FieldConfidence:
    """``pointer`` is the JSON pointer of a leaf. ``probability`` is that of its value, given all text before it.

    Where the schema lists what the value can be, ``distribution`` has the probability of each, keyed by its JSON text;
    ``undecided`` is what several of the values not chosen share, because their texts begin alike.
    """

    pointer: str
    value: Any
    probability: float
    distribution: Mapping[str, float] = field(default_factory=dict)
    undecided: float = 0.0

    def as_json(self) -> dict[str, Any]:
        told = {"pointer": self.pointer, "value": self.value, "probability": self.probability}
        return told | (
            {"distribution": dict(self.distribution), "undecided": self.undecided} if self.distribution else {}
        )


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: tuple[str | int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A token and the characters of the answer that it wrote."""

    token: TokenLogprob
    start: int
    stop: int


def confidence_logprobs(constraint: Constraint | None) -> LogprobParams:
    """What to ask for. Raises InvalidRequestError (param "field_confidence") for a constraint without fields."""
    if constraint is None or constraint.kind not in KINDS:
        raise InvalidRequestError(f"field_confidence needs one of {', '.join(KINDS)}", param="field_confidence")
    return LogprobParams(top=MAX_TOP_LOGPROBS, constrained=True)


def field_confidence(constraint: Constraint, text: str, tokens: Sequence[TokenLogprob]) -> list[FieldConfidence]:
    """One entry for each leaf of ``text``, in order. Raises InvalidRequestError for a constraint without fields."""
    if constraint.kind not in KINDS:
        raise InvalidRequestError(f"field_confidence needs {', '.join(KINDS)}, not {constraint.kind}")
    pieces = list(_placed(text, tokens))
    if constraint.kind == "choices":
        options = json.loads(constraint.source)
        return [_told(_Leaf((), 0, len(text)), text, text, pieces, options, text)]
    schema = json.loads(constraint.source) if constraint.kind == "json_schema" else True
    return [_of_leaf(leaf, text, pieces, schema) for leaf in _leaves(text)]


def _of_leaf(leaf: _Leaf, text: str, pieces: Sequence[_Piece], schema: Any) -> FieldConfidence:
    value = json.loads(text[leaf.start : leaf.stop])
    options = _options(schema, schema, leaf.path, 0)
    spelled = [json.dumps(option, ensure_ascii=False) for option in options or ()]
    return _told(leaf, text, value, pieces, spelled, json.dumps(value, ensure_ascii=False))


# ------------------------------------------------------------------------------------------------------- where they are


def _leaves(text: str) -> Iterator[_Leaf]:
    """The strings, numbers and words of a JSON text that are values."""
    path: list[str | int] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char in "{[":
            path.append("" if char == "{" else 0)
            at += 1
        elif char in "}]":
            path.pop()
            at += 1
        elif char == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
            at += 1
        else:
            at = yield from _scalar(text, at, path)


def _scalar(text: str, at: int, path: list[str | int]) -> Generator[_Leaf, None, int]:
    """A value, or a key, or a gap; where it ends."""
    found = _STRING.match(text, at) or _NUMBER.match(text, at) or _WORD.match(text, at)
    if found is None:
        return at + 1
    follows = text[found.end() :].lstrip()[:1]
    if follows == ":" and path and isinstance(path[-1], str) and text[at] == '"':
        path[-1] = json.loads(found.group())
        return found.end() + text[found.end() :].index(":") + 1
    yield _Leaf(tuple(path), at, found.end())
    return found.end()


def _placed(text: str, tokens: Sequence[TokenLogprob]) -> Iterator[_Piece]:
    """Each token's characters. Those of tokens that are only a part of a character reach to the next whole one."""
    at = 0
    for i, token in enumerate(tokens):
        if "\ufffd" not in token.text or text.startswith(token.text, at):
            stop = at + len(token.text)
        else:
            whole = next((t.text for t in tokens[i + 1 :] if t.text and "\ufffd" not in t.text), None)
            stop = text.find(whole, at) if whole is not None else len(text)
        yield _Piece(token, at, max(at, stop))
        at = max(at, stop)


# --------------------------------------------------------------------------------------------------- how sure they are


def _told(
    leaf: _Leaf, text: str, value: Any, pieces: Sequence[_Piece], options: Sequence[str], chosen: str
) -> FieldConfidence:
    own = [piece for piece in pieces if piece.start < leaf.stop and piece.stop > leaf.start]
    probability = math.exp(sum(piece.token.logprob or 0.0 for piece in own)) * _ends(leaf, text, pieces)
    pointer = "".join(f"/{str(name).replace('~', '~0').replace('/', '~1')}" for name in leaf.path)
    if chosen not in options:
        return FieldConfidence(pointer, value, probability)
    shares = dict.fromkeys(options, 0.0) | {chosen: probability}
    return FieldConfidence(pointer, value, probability, shares, _share(shares, leaf, text, own))


def _ends(leaf: _Leaf, text: str, pieces: Sequence[_Piece]) -> float:
    """The probability that a number ends where it does; everything else says itself where it ends."""
    after = next((piece for piece in pieces if piece.start == leaf.stop and piece.stop > leaf.stop), None)
    if after is None or not text[leaf.stop - 1].isdigit():
        return 1.0
    on = sum(math.exp(logprob) for _, logprob, word in after.token.top if word[:1] in _GOES_ON)
    return max(0.0, 1.0 - on)


def _share(shares: dict[str, float], leaf: _Leaf, text: str, own: Sequence[_Piece]) -> float:
    """Add to ``shares`` what tokens not taken would have led to, each weighed with the probability of what came before
    it; what they leave open is the result."""
    before, undecided = 1.0, 0.0
    for piece in own:
        known = text[leaf.start : max(leaf.start, piece.start)]
        for id, logprob, word in piece.token.top:
            begun = known + (word if known else word[max(0, leaf.start - piece.start) :].lstrip())
            fitting = [o for o in shares if o.startswith(begun) or begun.startswith(o)] if begun else []
            if id != piece.token.id and len(fitting) == 1:
                shares[fitting[0]] += before * math.exp(logprob)
            elif id != piece.token.id and fitting:
                undecided += before * math.exp(logprob)
        before *= math.exp(piece.token.logprob or 0.0)
    return undecided


# ------------------------------------------------------------------------------------------- what the schema lists


def _options(root: Any, node: Any, path: tuple[str | int, ...], depth: int) -> list[Any] | None:
    """All values that the schema allows at ``path``, where it lists them; None where it does not."""
    if not isinstance(node, dict) or depth > 32:
        return None
    for parts in (node.get("allOf", ()), [_target(root, node["$ref"])] if "$ref" in node else ()):
        for part in parts:
            if (found := _options(root, part, path, depth + 1)) is not None:
                return found
    for keyword in ("anyOf", "oneOf"):
        if keyword in node:
            return _of_branches([_options(root, part, path, depth + 1) for part in node[keyword]])
    return _options(root, _child(node, path[0]), path[1:], depth + 1) if path else _listed(node)


def _of_branches(found: Sequence[list[Any] | None]) -> list[Any] | None:
    """A branch that does not list its values may still be one that was not taken: then nothing is known."""
    if any(options is None for options in found):
        return None
    return [option for options in found for option in options or ()]


def _listed(node: Mapping[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    if "enum" in node:
        return list(node["enum"])[:_MAX_OPTIONS]
    listed: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
    return listed.get(str(node.get("type")))


def _child(node: Mapping[str, Any], name: str | int) -> Any:
    if isinstance(name, str):
        return node.get("properties", {}).get(name, node.get("additionalProperties"))
    prefix = node.get("prefixItems", [])
    return prefix[name] if name < len(prefix) else node.get("items")


def _target(root: Any, ref: Any) -> Any:
    node = root
    for part in str(ref).removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node
