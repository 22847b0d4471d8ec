"""What a program appends to its state: small immutable nodes, put in a row by ``+``.

Nodes hold what the author wrote; what it means is in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from sglite.errors import ProgramError
from sglite.protocol import Constraint

if TYPE_CHECKING:
    from sglite.lang.branch import Branch
    from sglite.lang.choices import ChoicesMethod
    from sglite.lang.variables import Variable

Appendable = Union[str, "Expr"]
Typed = Callable[[str], Any]
"""From a generated text to the value the author asked for; raises ValueError."""


class Expr:
    """Anything that may stand right of ``s +=``."""

    __slots__ = ()

    def __add__(self, other: Appendable) -> Row:
        return Row((*flatten(self), *flatten(other)))

    def __radd__(self, other: Appendable) -> Row:
        return Row((*flatten(other), *flatten(self)))


@dataclass(slots=True, eq=False)
class Row(Expr):
    """Nodes one after another, never nested."""

    nodes: tuple[Expr, ...]


@dataclass(slots=True, eq=False)
class Say(Expr):
    """Constant text."""

    text: str


@dataclass(slots=True, eq=False)
class Gen(Expr):
    """A call of the model. ``given`` holds the options the author set, by SamplingParams' and LogprobOptions' names.

    ``argument`` names the argument that made ``constraint``, for messages. ``reasoning`` is a model type whose
    reasoning is split off. ``field_confidence``: the meta info says how sure the model was of each field.
    """

    name: str | None
    given: tuple[tuple[str, Any], ...] = ()
    constraint: Constraint | None = None
    argument: str = ""
    typed: Typed | None = None
    reasoning: str | None = None
    field_confidence: bool = False


@dataclass(slots=True, eq=False)
class Select(Expr):
    """A choice among texts by their probability."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesMethod


@dataclass(slots=True, eq=False)
class RoleBegin(Expr):
    role: str


@dataclass(slots=True, eq=False)
class RoleEnd(Expr):
    role: str


@dataclass(slots=True, eq=False)
class ScopeBegin(Expr):
    name: str


@dataclass(slots=True, eq=False)
class ScopeEnd(Expr):
    name: str


@dataclass(slots=True, eq=False)
class ForkPoint(Expr):
    """Where children start from; the state puts it in itself."""

    children: tuple[Branch, ...]


@dataclass(slots=True, eq=False)
class Gather(Expr):
    """Takes the children's variables over as lists, once they are done."""

    children: tuple[Branch, ...]
    targets: Mapping[str, Variable]


@dataclass(slots=True, eq=False)
class Concatenate(Expr):
    """Appends what each child added since the fork, in order."""

    children: tuple[Branch, ...]


ROLES = ("system", "user", "assistant")


def flatten(value: Any) -> tuple[Expr, ...]:
    """The nodes of anything appendable. Raises ProgramError for what is not."""
    if isinstance(value, str):
        return (Say(value),)
    if isinstance(value, Row):
        return value.nodes
    if isinstance(value, Expr):
        return (value,)
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    hint = "None: does the expression return something?" if value is None else f"{article} {kind}: use str(...)"
    raise ProgramError(f"only text and sglite expressions can be appended, not {hint}")


def role(name: str, expr: Appendable | None = None) -> Row:
    """A whole turn."""
    return Row((RoleBegin(name), *(() if expr is None else flatten(expr)), RoleEnd(name)))


def check_name(name: Any) -> None:
    """Raises ProgramError for what cannot name a variable."""
    if name is not None and (not isinstance(name, str) or not name):
        raise ProgramError(f"the name of a variable must be a text that is not empty, not {name!r}")
