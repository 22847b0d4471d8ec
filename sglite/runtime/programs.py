"""What the scheduler knows of programs: how much they had so far, and the prefixes they will come back to.

A program between two calls keeps a lease on the path of each of its branches, so eviction takes others' pages first.
When pages run out nevertheless, programs give up their leases, the last in line first. A program that nobody heard of
for several times the usual gap is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

from sglite.protocol import ProgramInfo
from sglite.runtime.policy import Policy, Rank, Standing
from sglite.runtime.radix import Lease
from sglite.runtime.sequence import Sequence

SHORTEST_MEMORY = 2048
"""Steps for which a program between calls is remembered at least."""

GAPS_REMEMBERED = 8
"""... and at least so many times the mean gap between two calls."""


Key = tuple[str, str]
"""Namespace and program id."""


@dataclass(slots=True, eq=False)
class Program:
    """``arrival`` is its first sequence's, ``attained`` counts computed tokens, ``active`` sequences in the scheduler.
    ``rank`` says who gives way first, ``kept`` is by branch, ``idle_since`` a step."""

    arrival: int
    attained: int = 0
    active: int = 0
    rank: Rank = ()
    kept: dict[str, Lease] = field(default_factory=dict)
    idle_since: int = 0

    def take(self) -> list[Lease]:
        """Its leases, which it keeps no longer."""
        leases = list(self.kept.values())
        self.kept.clear()
        return leases


class Programs:
    """Every method that returns leases leaves it to the caller to release them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._programs: dict[Key, Program] = {}
        self._idle: OrderedDict[Key, Program] = OrderedDict()
        self._gap = 0.0

    def __len__(self) -> int:
        """Programs that have called, and may call again."""
        return len(self._programs)

    def join(self, sequence: Sequence, step: int) -> None:
        """A call arrives: the sequence takes its program's place in line, or has its own."""
        program, key = Program(sequence.arrival), self._key(sequence)
        if key:
            program = self._programs.setdefault(key, program)
            program.active += 1
            if self._idle.pop(key, None):
                self._gap += 0.1 * (step - program.idle_since - self._gap)
        sequence.rank = (*self._rank(sequence, program, resident=bool(program.kept)), sequence.arrival)
        program.rank = self._rank(sequence, program, resident=True)

    def leave(self, sequence: Sequence, lease: Lease | None, step: int) -> list[Lease]:
        """A call has ended. Its path is kept in place of the branch's last one, unless the branch has ended too."""
        key, info = self._key(sequence), sequence.request.program
        if key is None or info is None:
            return [lease] if lease else []
        program = self._programs[key]
        program.active -= 1
        program.attained += max(0, sequence.computed - sequence.cached)
        released = self._keep(program, info, lease)
        if program.active == 0:
            self._rest(key, program, step, ended=info.last and not program.kept)
        return released

    def yield_last(self, behind: Rank) -> list[Lease]:
        """The leases of the last program in line that keeps any, if it is behind the given rank."""
        keeping = [program for program in self._programs.values() if program.kept]
        last = max(keeping, key=attrgetter("rank"), default=None)
        return last.take() if last and last.rank > behind else []

    def expire(self, step: int) -> list[Lease]:
        """Forget those idle too long to be expected again; their leases."""
        released: list[Lease] = []
        memory = max(SHORTEST_MEMORY, int(GAPS_REMEMBERED * self._gap))
        while self._idle and step - next(iter(self._idle.values())).idle_since > memory:
            key, program = self._idle.popitem(last=False)
            del self._programs[key]
            released += program.take()
        return released

    def clear(self) -> list[Lease]:
        """All leases; the programs stay known."""
        return [lease for program in self._programs.values() for lease in program.take()]

    def _keep(self, program: Program, info: ProgramInfo, lease: Lease | None) -> list[Lease]:
        """What is not needed any longer. A call that never ran leaves the branch's path as it was."""
        if lease is None and not info.last:
            return []
        old = program.kept.pop(info.branch, None)
        if lease is not None and not info.last:
            program.kept[info.branch], lease = lease, None
        return [each for each in (old, lease) if each is not None]

    def _rest(self, key: Key, program: Program, step: int, *, ended: bool) -> None:
        if ended:
            del self._programs[key]
        else:
            program.idle_since = step
            self._idle[key] = program

    def _rank(self, sequence: Sequence, program: Program, *, resident: bool) -> Rank:
        return self._policy.rank(Standing(sequence.request.priority, resident, program.arrival, program.attained))

    def _key(self, sequence: Sequence) -> Key | None:
        """None: the sequence stands for itself."""
        info = sequence.request.program
        return (sequence.request.namespace, info.program) if info and self._policy.by_program else None
