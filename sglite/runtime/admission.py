"""Who starts: waiting sequences in the policy's order, those that are held for a prefix, and whether there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from sglite.runtime.holding import Holding
from sglite.runtime.ledger import PageLedger, cacheable
from sglite.runtime.order import in_order
from sglite.runtime.policy import PATIENCE, Policy
from sglite.runtime.room import ANYONE, Room
from sglite.runtime.sequence import Sequence, Status
from sglite.runtime.slots import Slots
from sglite.runtime.tally import Tally
from sglite.runtime.tree import Lease
from sglite.runtime.waiting import WaitingQueue

Work = list[tuple[Sequence, int]]
"""Sequences with the position up to which each computes in this step."""


class _Entry(Enum):
    """What became of an attempt to admit a sequence."""

    ADMITTED = "admitted"
    HELD = "held"
    LATER = "later"
    FULL = "full"


class Admission:
    """The waiting sequences, until they have a slot."""

    def __init__(self, policy: Policy, ledger: PageLedger, slots: Slots, room: Room, tally: Tally) -> None:
        self._policy = policy
        self._ledger = ledger
        self._slots = slots
        self._room = room
        self._tally = tally
        self._queue = WaitingQueue()
        self._holding = Holding(ledger.page_size)

    def __len__(self) -> int:
        return len(self._queue) + len(self._holding)

    def __bool__(self) -> bool:
        """Whether anybody waits who is not held for somebody that runs."""
        return bool(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that are not held, in the queue's order."""
        return iter(self._queue)

    @property
    def held(self) -> int:
        """How often a sequence was made to wait for another's prefix."""
        return self._holding.total

    # ------------------------------------------------------------------------------------------------------- the queue

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._queue.add(sequence)
        self._room.full = False

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._queue:
            self._queue.remove(sequence)
        else:
            self._holding.forget(sequence)

    def settle(self) -> None:
        """Newcomers get the admission by which they should have started."""
        self._queue.settle(self._tally.admissions + len(self) + PATIENCE)

    def lead(self, sequence: Sequence) -> None:
        """It runs, and has its lease: others may wait for what it computes."""
        self._holding.lead(sequence)

    def dismiss(self, leader: Sequence) -> None:
        """Those that were held back may look into the tree again."""
        for follower in self._holding.dismiss(leader):
            self.add(follower)

    # ------------------------------------------------------------------------------------------------------- admission

    def admit(self, work: Work, budget: int, now: float) -> None:
        """Add waiting sequences to the step, in the policy's order, until one does not fit.

        In a walk through prefixes, once one is held for a prefix nobody goes on to another: that one comes first.
        """
        holding = False
        if budget == 0 or self._room.full or not (self._slots.free and self._queue):
            return
        for sequence in in_order(self._queue, self._policy, self._ledger, self._tally.admissions):
            entry = self._try(sequence, now, wait=holding)
            holding = self._policy.by_prefix and (holding or entry is _Entry.HELD)
            if entry is _Entry.ADMITTED:
                n = min(sequence.remaining, budget)
                work.append((sequence, sequence.computed + n))
                self._ledger.grow(work[-1:])
                budget -= n
            if entry in (_Entry.FULL, _Entry.LATER) or budget == 0 or not self._slots.free:
                return

    def _try(self, sequence: Sequence, now: float, *, wait: bool) -> _Entry:
        lease = self._ledger.match(sequence)
        leader = self._holding.leader(lease, sequence.tokens, cacheable(sequence)) if lease else None
        overdue = sequence.overdue(self._tally.admissions)
        if leader is not None and not overdue:
            self._ledger.release(lease)
            self._queue.remove(sequence)
            self._holding.follow(sequence, leader)
            return _Entry.HELD
        urgent = overdue or not self._slots.running
        if wait and not urgent:
            self._ledger.release(lease)
            return _Entry.LATER
        if not self._room.fits(sequence, lease, self._slots.running, ANYONE if urgent else sequence.rank, now):
            self._ledger.release(lease)
            self._room.full = True
            return _Entry.FULL
        self._enter(sequence, lease)
        return _Entry.ADMITTED

    def _enter(self, sequence: Sequence, lease: Lease | None) -> None:
        self._queue.admitted(sequence)
        self._ledger.enter(sequence, lease)
        sequence.late = sequence.overdue(self._tally.admissions)
        self._slots.enter(sequence)
        if sequence.retractions == 0:
            sequence.cached = sequence.computed
            self._tally.prompt_tokens += len(sequence.tokens)
            self._tally.hit_tokens += sequence.cached
        self._tally.admissions += 1
        self._holding.lead(sequence)

    # ---------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        self._queue.check()
        self._check_waiting([*self._queue, *self._holding.followers])
        assert self._holding.leaders <= set(self._slots.running)

    def _check_waiting(self, waiting: Iterable[Sequence]) -> None:
        for sequence in waiting:
            assert sequence.status is Status.WAITING and sequence.computed == 0
            assert sequence.slot == -1 and not sequence.pages and sequence.lease is None
