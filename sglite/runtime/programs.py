"""What the scheduler knows of programs: how much they had so far, and the prefixes they will come back to.

A program between two calls keeps a lease on the path of each of its branches, so eviction takes others' pages first.
When pages run out nevertheless, the program gives up its leases first that is expected back last, by the gaps between
calls that were seen; of those that are in the middle of calls, the last in line. One that stays away for several times
the usual gap gives way to newcomers too, and is forgotten in the end.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from sglite.runtime.gaps import Gaps
from sglite.runtime.policy import Policy, Rank, Standing
from sglite.runtime.sequence import Sequence
from sglite.runtime.tree import Lease

FADING = 4
"""A program that stays away for so many usual gaps gives way to newcomers."""

GAPS_REMEMBERED = 16
"""... and for so many, but at least for the shortest memory, it is forgotten."""

FADED = 2
"""In a rank's second place, behind residents (0) and newcomers (1)."""

Key = tuple[str, str]
"""Namespace and program id."""


@dataclass(slots=True, eq=False)
class Program:
    """``arrival`` is its first sequence's, ``attained`` counts computed tokens, ``active`` sequences in the scheduler.

    ``rank`` says who gives way first, ``kept`` is by branch, as is ``found``: the positions that its first call found
    in the cache, which are others' too. ``dead`` are branches that ended, ``idle_since`` a time.
    """

    arrival: int
    attained: int = 0
    active: int = 0
    rank: Rank = ()
    kept: dict[str, Lease] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    idle_since: float = 0.0

    def take(self) -> list[Lease]:
        """Its leases, which it keeps no longer."""
        leases = list(self.kept.values())
        self.kept.clear()
        return leases

    def spent(self, branch: str, lease: Lease) -> Lease:
        """Nobody comes back to what the branch added to what it found. What a fork added is gone at once; what a whole
        program added may well be what the next one begins with."""
        lease.spent = self.found.get(branch, 0)
        lease.dropped = branch != ""
        return lease


class Programs:
    """Every method that returns leases leaves it to the caller to release them. Times are the scheduler's."""

    def __init__(self, policy: Policy, shortest_memory: float) -> None:
        self._policy = policy
        self._shortest_memory = shortest_memory
        self._programs: dict[Key, Program] = {}
        self._idle: OrderedDict[Key, Program] = OrderedDict()
        self._gaps = Gaps(shortest_memory / GAPS_REMEMBERED)

    def __len__(self) -> int:
        """Programs that have called, and may call again."""
        return len(self._programs)

    def join(self, sequence: Sequence, now: float) -> None:
        """A call arrives: the sequence takes its program's place in line, or has its own."""
        program, key = Program(sequence.arrival), self._key(sequence)
        if key:
            program = self._programs.setdefault(key, program)
            program.active += 1
            if self._idle.pop(key, None):
                self._gaps.observe(now - program.idle_since)
        rank = self._rank(sequence, program, resident=bool(program.kept))
        sequence.rank = (*rank, sequence.arrival)
        sequence.place = (rank, self._prefix(sequence), sequence.arrival)
        program.rank = self._rank(sequence, program, resident=True)

    def leave(self, sequence: Sequence, lease: Lease | None, now: float) -> list[Lease]:
        """A call has ended. Its path is kept in place of the branch's last one, unless the branch has ended too."""
        key, info = self._key(sequence), sequence.request.program
        if key is None or info is None:
            return [lease] if lease else []
        program = self._programs[key]
        program.active -= 1
        program.attained += max(0, sequence.computed - sequence.cached)
        program.found.setdefault(info.branch, sequence.cached)
        last = info.last or any(_covers(branch, info.branch) for branch in program.dead)
        released = self._keep(program, info.branch, lease, last=last)
        if program.active == 0:
            self._rest(key, program, now, ended=last and not program.kept)
        return released

    def end(self, namespace: str, name: str, branch: str) -> list[Lease]:
        """A branch and those below it make no more calls."""
        program = self._programs.get((namespace, name))
        if program is None:
            return []
        ended = sorted([each for each in program.kept if _covers(branch, each)], reverse=True)  # below before above
        leases = [program.spent(each, program.kept.pop(each)) for each in ended]
        if program.active:
            program.dead.add(branch)
        elif not program.kept or branch == "":
            self._forget((namespace, name))
        return leases

    def yield_last(self, behind: Rank, now: float) -> list[Lease]:
        """The leases of the program that has most time to come back, of those that are behind the given rank."""
        keeping = [program for program in self._programs.values() if program.kept]
        last = max(keeping, key=lambda program: self._expected(program, now), default=None)
        return last.take() if last and self._standing(last, now) > behind else []

    def _expected(self, program: Program, now: float) -> tuple[Rank, float, Rank]:
        """When it calls again: class by class, then by time, then by its place in line."""
        rank, away = self._standing(program, now), now - program.idle_since
        return rank[:2], -1.0 if program.active else self._gaps.remaining(away), rank[2:]

    def _standing(self, program: Program, now: float) -> Rank:
        """Its place in line to give way."""
        stays_away = not program.active and now - program.idle_since > FADING * self._gaps.usual
        return (*program.rank[:1], FADED, *program.rank[2:]) if stays_away else program.rank

    def expire(self, now: float) -> list[Lease]:
        """Forget those idle too long to be expected again; their leases."""
        released: list[Lease] = []
        memory = max(self._shortest_memory, GAPS_REMEMBERED * self._gaps.usual)
        while self._idle and now - next(iter(self._idle.values())).idle_since > memory:
            key = next(iter(self._idle))
            released += self._forget(key).take()
        return released

    def clear(self) -> list[Lease]:
        """All leases; the programs stay known."""
        return [lease for program in self._programs.values() for lease in program.take()]

    def _keep(self, program: Program, branch: str, lease: Lease | None, *, last: bool) -> list[Lease]:
        """What is not needed any longer. A call that never ran leaves the branch's path as it was."""
        if lease is None and not last:
            return []
        old = program.kept.pop(branch, None)
        if lease is not None and not last:
            program.kept[branch], lease = lease, None
        return [program.spent(branch, each) for each in (old, lease) if each is not None]

    def _rest(self, key: Key, program: Program, now: float, *, ended: bool) -> None:
        program.dead.clear()
        if ended:
            del self._programs[key]
        else:
            program.idle_since = now
            self._idle[key] = program

    def _forget(self, key: Key) -> Program:
        self._idle.pop(key, None)
        return self._programs.pop(key)

    def _rank(self, sequence: Sequence, program: Program, *, resident: bool) -> Rank:
        info = sequence.request.program
        ahead = info.ahead or 0 if info else 0
        return self._policy.rank(
            Standing(sequence.request.priority, resident, program.arrival, program.attained, ahead)
        )

    def _prefix(self, sequence: Sequence) -> bytes:
        return sequence.prefix() if self._policy.by_prefix else b""

    def _key(self, sequence: Sequence) -> Key | None:
        """None: the sequence stands for itself."""
        info = sequence.request.program
        return (sequence.request.namespace, info.program) if info and self._policy.by_program else None


def _covers(branch: str, other: str) -> bool:
    """Whether the other is the branch itself or below it."""
    return branch in ("", other) or other.startswith(f"{branch}.")
