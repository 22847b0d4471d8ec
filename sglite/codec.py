"""The protocol's frozen types as plain JSON values and back, for every wire: HTTP, a worker's socket, a trace file.

One reflective codec instead of a pair of functions per type: ``encode`` leaves out fields that hold their default,
``decode`` checks every type strictly and names the field at fault. Unions of dataclasses are told apart by their
fields, so there are no type tags.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sglite import errors
from sglite.errors import GrammarError, InvalidRequestError, NotFoundError, RequestError, SgliteError

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]
_UNION = (Union, types.UnionType)
_NAMES: dict[type, str] = {str: "a string", int: "an integer", bool: "true or false", float: "a number"}


def encode(value: Any) -> Any:
    """``value`` as dicts, lists, strings, numbers, booleans and None. Fields at their default are left out."""
    if dataclasses.is_dataclass(value):
        return _encode_fields(value)
    if isinstance(value, tuple | list):
        return value if _plain(value) else [encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: Any, where: str = "") -> T:
    """A ``kind`` from what ``encode`` gave. Raises InvalidRequestError naming the field at fault."""
    build: Decoder = _decoder(kind)  # type: ignore[arg-type]
    result: T = build(value, where)
    return result


def encode_error(error: BaseException) -> dict[str, Any]:
    """An exception as a plain dict. Only the text of our own exceptions travels: others may hold paths."""
    ours = isinstance(error, SgliteError)
    fields = {name: getattr(error, name, None) for name in ("param", "kind", "pointer", "request_id")}
    return {
        "code": error.code if isinstance(error, SgliteError) else "internal_error",
        "message": str(error) if ours else "internal error",
        **{name: value for name, value in fields.items() if value is not None},
    }


def decode_error(value: Mapping[str, Any]) -> SgliteError:
    """The exception ``encode_error`` described; an unknown code becomes a RequestError that names it."""
    known = _errors_by_code().get(str(value.get("code")))
    message = str(value.get("message") or "unknown error")
    if known is None:
        return RequestError(message, request_id=value.get("request_id"))
    keywords = _keywords(known)
    return known(message, **{name: value[name] for name in keywords if value.get(name) is not None})


# --------------------------------------------------------------------------------------------------------- encoding


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((f.name, _default(f)) for f in dataclasses.fields(kind))


def _default(field: dataclasses.Field[Any]) -> Any:
    """The field's default; MISSING, which equals nothing, where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _encode_fields(value: Any) -> dict[str, Any]:
    pairs = ((name, getattr(value, name), default) for name, default in _defaults(value.__class__))
    return {name: encode(item) for name, item, default in pairs if item is not default and item != default}


def _plain(items: tuple[Any, ...] | list[Any]) -> bool:
    return set(map(type, items)) <= {int, str, float, bool}


# --------------------------------------------------------------------------------------------------------- decoding


@cache
def _decoder(kind: Any) -> Decoder:
    """Built once per type, so that a chunk in the hot path costs a few dict lookups."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)  # type: ignore[arg-type]
    if origin is Literal:
        return _literal_decoder(args)
    if origin in _UNION:
        return _union_decoder(args)
    if origin is tuple:
        return _list_decoder(args[0]) if args[-1] is ... else _row_decoder(args)
    if origin is frozenset:
        items = _list_decoder(args[0])
        return lambda value, where: frozenset(items(value, where))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping
    return _scalar_decoder(kind)


def _fail(where: str, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where or 'the value'} must be {wanted}", param=where or None)


def _scalar_decoder(kind: Any) -> Decoder:
    if kind is type(None):
        return _none
    accepted: tuple[type, ...] = (float, int) if kind is float else (kind,)

    def scalar(value: Any, where: str) -> Any:
        if type(value) not in accepted:
            raise _fail(where, _NAMES[kind])
        return value

    return scalar


def _none(value: Any, where: str) -> None:
    if value is not None:
        raise _fail(where, "null")


def _mapping(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _fail(where, "an object")
    return value


def _literal_decoder(allowed: tuple[Any, ...]) -> Decoder:
    def literal(value: Any, where: str) -> Any:
        if not isinstance(value, str) or value not in allowed:
            raise _fail(where, f"one of {', '.join(map(str, allowed))}")
        return value

    return literal


def _list_decoder(kind: Any) -> Decoder:
    item = _decoder(kind)

    def items(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple):
            raise _fail(where, "a list")
        if kind is int and set(map(type, value)) <= {int}:  # a prompt of 100,000 ids at the speed of C
            return tuple(value)
        return tuple(item(entry, f"{where}[{i}]") for i, entry in enumerate(value))

    return items


def _row_decoder(kinds: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(kind) for kind in kinds]

    def row(value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(decoders):
            raise _fail(where, f"a list of {len(decoders)}")
        return tuple(d(entry, f"{where}[{i}]") for i, (d, entry) in enumerate(zip(decoders, value, strict=True)))

    return row


def _union_decoder(kinds: tuple[Any, ...]) -> Decoder:
    classes = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    others = [kind for kind in kinds if kind not in classes]

    def union(value: Any, where: str) -> Any:
        if value is None and type(None) in others:
            return None
        if isinstance(value, dict) and classes:
            return _decoder(_class_for(value, classes))(value, where)
        for kind in others:
            if kind is not type(None) and _fits(value, kind):
                return _decoder(kind)(value, where)
        raise _fail(where, " or ".join(_NAMES.get(kind, "an object") for kind in kinds if kind is not type(None)))

    return union


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _class_for(value: dict[str, Any], classes: list[Any]) -> Any:
    """The class that has all of the value's fields and whose required fields are all there; else the first."""
    for kind in classes:
        fields = dataclasses.fields(kind)
        required = {f.name for f in fields if _required(f)}
        if required <= value.keys() <= {f.name for f in fields}:
            return kind
    return classes[0]


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _dataclass_decoder(kind: type) -> Decoder:
    required = [f.name for f in dataclasses.fields(kind) if _required(f)]
    hints = get_type_hints(kind)
    decoders: dict[str, Decoder] = {}  # filled on first use: types may refer to each other

    def build(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(where, "an object")
        prefix = f"{where}." if where else ""
        for name in value:
            if name not in hints:
                raise InvalidRequestError(f"unknown field {prefix}{name}", param=f"{prefix}{name}")
        for name in required:
            if name not in value:
                raise InvalidRequestError(f"{prefix}{name} is missing", param=f"{prefix}{name}")
        for name in value:
            if name not in decoders:
                decoders[name] = _decoder(hints[name])
        return kind(**{name: decoders[name](item, prefix + name) for name, item in value.items()})

    return build


# ----------------------------------------------------------------------------------------------------------- errors


@cache
def _errors_by_code() -> dict[str, type[SgliteError]]:
    found = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, SgliteError)]
    return {kind.code: kind for kind in found}


def _keywords(kind: type[SgliteError]) -> tuple[str, ...]:
    if issubclass(kind, GrammarError):
        return ("param", "kind", "pointer")
    if issubclass(kind, InvalidRequestError | NotFoundError):
        return ("param",)
    return ("request_id",) if issubclass(kind, RequestError) else ()
