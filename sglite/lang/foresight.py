"""What a program's trace tells ahead of a batch: how many calls are still to come, and which runs begin alike.

A trace runs the program's function once more, so only functions are traced that do nothing but append to their state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from sglite.lang import nodes as n
from sglite.lang.tracer import Forked, Symbol, TracedBranch, TracedProgram, trace_program
from sglite.lang.unnoticed import is_unnoticed

if TYPE_CHECKING:
    from sglite.lang.program import Program


class Foreseen(NamedTuple):
    """As in ProgramInfo. ``last``: neither its branch calls again, nor what is forked from it later."""

    last: bool
    ahead: int


@dataclass(frozen=True, slots=True)
class Foresight:
    """``calls`` are a branch's in order, by its name. ``leading`` are the program's parameters in the order in which
    the text shows them before the first call: runs that agree on the first ones have the longest prefixes in common."""

    calls: Mapping[str, tuple[Foreseen, ...]] = field(default_factory=dict)
    leading: tuple[str, ...] = ()


NOTHING_FORESEEN = Foresight()


def foresee(program: Program) -> Foresight:
    """Nothing where a trace might be noticed, and no calls where they depend on arguments or answers."""
    if not is_unnoticed(program.func):
        return NOTHING_FORESEEN
    traced = trace_program(program, {})
    return Foresight({} if traced.ended else _by_branch(traced.root), _leading(traced))


def _leading(traced: TracedProgram) -> tuple[str, ...]:
    shown = takewhile(lambda entry: not isinstance(entry, n.Gen | n.Select | Forked), traced.root.entries)
    labels = [entry.label.partition("[")[0] for entry in shown if isinstance(entry, Symbol)]
    return tuple(dict.fromkeys(label for label in labels if label in traced.parameters))


def _by_branch(root: TracedBranch) -> Mapping[str, tuple[Foreseen, ...]]:
    calls = list(_calls(root, ""))
    found: dict[str, tuple[Foreseen, ...]] = {}
    for ahead, (branch, last) in zip(reversed(range(len(calls))), calls, strict=True):
        found[branch] = (*found.get(branch, ()), Foreseen(last, ahead))
    return found


def _calls(branch: TracedBranch, name: str) -> Iterator[tuple[str, bool]]:
    """Every call in the order of the text, as (its branch, whether it is the last there)."""
    entries, forked = branch.entries, 0
    for place, entry in enumerate(entries):
        if isinstance(entry, n.Gen | n.Select):
            yield name, not any(_leads_to_calls(later) for later in entries[place + 1 :])
        elif isinstance(entry, Forked):
            for child in entry.branches:
                yield from _calls(child, f"{name}.{forked}" if name else str(forked))
                forked += 1


def _leads_to_calls(entry: Any) -> bool:
    if isinstance(entry, Forked):
        return any(isinstance(each, n.Gen | n.Select) for child in entry.branches for each in child.all_entries())
    return isinstance(entry, n.Gen | n.Select)
