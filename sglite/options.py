"""Command line options made from a config dataclass: its fields are the options, its metadata their help."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser, config: type, title: str) -> None:
    """One option a field. What the user does not give is absent from the namespace, so defaults stay in one place."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for field in fields(config):
        group.add_argument(_flag(field.name), **_argument(field, hints[field.name]))


def read_options(config: type[T], namespace: argparse.Namespace) -> T:
    """The config with what the user gave."""
    return config(**given_options(config, namespace))


def given_options(config: type, namespace: argparse.Namespace) -> dict[str, Any]:
    given = vars(namespace)
    return {field.name: given[field.name] for field in fields(config) if field.name in given}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argument(field: Field[Any], kind: Any) -> dict[str, Any]:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    default = None if field.default is MISSING else field.default
    shown = f" (default: {default})" if default not in (None, "", ()) and "default" not in text else ""
    argument: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text + shown}
    kind = _without_none(kind)
    if kind is bool:
        return {**argument, "action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {**argument, "choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {**argument, "nargs": "*", "type": get_args(kind)[0], "metavar": "VALUE"}
    return {**argument, "type": kind, "metavar": {int: "N", float: "X"}.get(kind, "NAME")}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return next(k for k in get_args(kind) if k is not type(None))
