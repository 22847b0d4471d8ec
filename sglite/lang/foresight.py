"""What a program's trace tells the runtime ahead of a batch: with each call, how many are still to come.

A trace runs the program's function once more, so only functions are traced that do nothing but append to their state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sglite.lang import nodes as n
from sglite.lang.tracer import Forked, TracedBranch, trace_program
from sglite.lang.unnoticed import is_unnoticed

if TYPE_CHECKING:
    from sglite.lang.program import Program


class Foreseen(NamedTuple):
    """As in ProgramInfo. ``last``: neither its branch calls again, nor what is forked from it later."""

    last: bool
    ahead: int


Foresight = Mapping[str, tuple[Foreseen, ...]]
"""By the branch's name, its calls in order."""

NOTHING_FORESEEN: Foresight = {}


def foresee(program: Program) -> Foresight:
    """Nothing where the calls depend on arguments or answers, or where a trace might be noticed."""
    if not is_unnoticed(program.func):
        return NOTHING_FORESEEN
    traced = trace_program(program, {})
    return _foresight(traced.root) if not traced.ended else NOTHING_FORESEEN


def _foresight(root: TracedBranch) -> Foresight:
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
