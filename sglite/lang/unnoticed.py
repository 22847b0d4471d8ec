"""Which functions may be run once more, with symbols for arguments, without anybody noticing."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, is_typeddict

_BUILTINS = frozenset({"abs", "all", "any", "bool", "enumerate", "float", "int", "len", "list", "max", "min", "range"})
_BUILTINS |= {"repr", "reversed", "set", "sorted", "str", "sum", "tuple", "zip"}
_CHANGING = frozenset({"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "reverse", "sort"})
_REFUSED = frozenset({"IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"})
_BLIND = frozenset({"IS_OP", "CHECK_EXC_MATCH"})
"""Where a symbol goes another way than its value, without being asked: ``x is None``, ``except TypeError``."""
_UNKNOWN = object()


def is_unnoticed(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Whether a run with symbols takes the way of all runs and changes nothing but its arguments: it names only sglite,
    plain values, types of data, harmless builtins and functions like itself."""
    if not isinstance(function, FunctionType):
        return False
    if function in seen:
        return True
    instructions = [each for code in _codes(function.__code__) for each in dis.get_instructions(code)]
    if any(_is_refused(each, function.__code__.co_freevars) for each in instructions):
        return False
    named = {each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    assigns = any(each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") for each in instructions)
    safe = _Harmless(seen | {function}, (tuple,) if assigns else (tuple, list))
    return all(safe(value) for value in _values(function, named))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_refused(instruction: dis.Instruction, outer: tuple[str, ...]) -> bool:
    match instruction.opname:
        case "STORE_DEREF" | "DELETE_DEREF":
            return instruction.argval in outer
        case "LOAD_METHOD" | "LOAD_ATTR":
            return instruction.argval in _CHANGING
        case name:
            return name in _REFUSED or name in _BLIND or ("JUMP" in name and name.endswith("_NONE"))


def _values(function: FunctionType, named: set[str]) -> Iterator[Any]:
    """What it takes from outside, but for harmless builtins."""
    for name in named:
        if name in function.__globals__ or name not in _BUILTINS:
            yield function.__globals__.get(name, _UNKNOWN)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty: it cannot be used yet
            yield cell.cell_contents


class _Harmless(NamedTuple):
    """Values that may be used without anybody noticing; of containers those that are not assigned to."""

    seen: frozenset[Any]
    containers: tuple[type, ...]

    def __call__(self, value: Any) -> bool:
        if type(value) in self.containers:
            return all(self(each) for each in value)
        if isinstance(value, str | bytes | int | float | None):
            return True
        if isinstance(value, type) and (is_dataclass(value) or issubclass(value, Enum) or _is_model(value)):
            return True
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        return home.partition(".")[0] == "sglite" or is_unnoticed(value, self.seen)


def _is_model(kind: type) -> bool:
    return is_typeddict(kind) or hasattr(kind, "model_fields")
