"""Command line options made from a config dataclass: its fields are the options, its metadata their help."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sglite.errors import ConfigError

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


def add_file(path: Path, configs: Sequence[type], namespace: argparse.Namespace) -> None:
    """Put a TOML file's options into the namespace where the command line gave none. Raises ConfigError."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read {path}: {reason}") from None
    kinds = {field.name: get_type_hints(config)[field.name] for config in configs for field in fields(config)}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"{path}: unknown option {key!r}; known are {', '.join(sorted(kinds))}")
        if name not in namespace:
            setattr(namespace, name, _checked(value, kinds[name], f"{path}: {key}"))


def _checked(value: Any, kind: Any, where: str) -> Any:
    kind = _without_none(kind)
    if get_origin(kind) is Literal:
        wanted, good = f"one of {', '.join(map(str, get_args(kind)))}", value in get_args(kind)
    elif get_origin(kind) is tuple:
        wanted, good = "a list of strings", isinstance(value, list) and all(isinstance(item, str) for item in value)
    elif kind is float:
        wanted, good = "a number", type(value) in (int, float)
    else:
        wanted, good = f"of type {kind.__name__}", type(value) is kind
    if not good:
        raise ConfigError(f"{where} must be {wanted}, not {value!r:.80}")
    return tuple(value) if isinstance(value, list) else value


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
