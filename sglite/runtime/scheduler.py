"""Which sequences compute what in each step: the one place where decisions are made. No tensors, no clock, no I/O.

The engine thread calls, in turn::

    plan = scheduler.plan()        who computes which positions; pages and slots are taken
    ... start the forward pass of plan ...
    scheduler.commit(plan)         its positions count as computed, its whole prompt pages can be hit
    ... append sampled tokens to scheduler.sequence(row.slot).tokens, release what ended ...

``commit`` may be called as soon as the forward pass is queued before all later work on the device: pages that are
freed or shared from then on are written and read in step order. Between ``plan`` and ``commit`` sequences may be
submitted and released; a row whose sequence was released meanwhile is computed for nothing and forgotten.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter, itemgetter

from sglite.errors import CapacityError, OverloadedError
from sglite.runtime.holding import Holding
from sglite.runtime.ledger import PageLedger, cacheable
from sglite.runtime.pages import PageBook
from sglite.runtime.pins import Pins
from sglite.runtime.plan import Plan, Row
from sglite.runtime.policy import PATIENCE, OutputShare, Rank, policy_named
from sglite.runtime.programs import Programs
from sglite.runtime.radix import Lease, Namespace, PrefixCache
from sglite.runtime.sequence import Sequence, Status
from sglite.runtime.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """``running`` and ``waiting`` are now, the others count since the start. ``hit_tokens`` of ``prompt_tokens`` were
    found in the cache at first admission; ``held`` counts waits for a prefix that another sequence was computing.
    ``pages_cached`` are held by the prefix cache alone."""

    running: int
    waiting: int
    steps: int
    admissions: int
    retractions: int
    held: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    evicted_pages: int


class _Entry(Enum):
    """What became of an attempt to admit a sequence."""

    ADMITTED = "admitted"
    HELD = "held"
    FULL = "full"


ANYONE: Rank = ()
"""Every program is behind it."""

Work = list[tuple[Sequence, int]]
"""Sequences with the position up to which each computes in this step."""


class Scheduler:
    """Sequences wait in a queue, run in a slot, and leave by ``release``. Raises ConfigError for an unknown policy."""

    def __init__(
        self,
        book: PageBook,
        cache: PrefixCache | None,
        *,
        page_size: int,
        policy: str = "fcfs",
        max_running: int = 64,
        max_queue: int = 4096,
        max_step_tokens: int = 2048,
    ) -> None:
        self._ledger = PageLedger(book, cache, page_size)
        self._policy = policy_named(policy)
        self._max_queue = max_queue
        self._max_step_tokens = max_step_tokens
        self._slots: list[Sequence | None] = [None] * max_running
        self._free_slots = list(range(max_running))
        self._running: dict[Sequence, None] = {}
        self._queue = WaitingQueue()
        self._holding = Holding(page_size)
        self.programs = Programs(self._policy)
        self.pins = Pins()
        self._share = OutputShare()
        self._full = False
        """The pool was found too full to admit anyone, and nothing has changed since."""
        self._flight: Plan | None = None
        self._arrivals = 0
        self._steps = 0
        self._admissions = 0
        self._retractions = 0
        self._prompt_tokens = 0
        self._hit_tokens = 0
        self._computed_tokens = 0

    # ----------------------------------------------------------------------------------------------- what is going on

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._holding)

    @property
    def idle(self) -> bool:
        """Nobody runs and nobody waits."""
        return not self._running and not self._queue

    def sequence(self, slot: int) -> Sequence | None:
        """Who is in a slot; None if released. Slots are given anew only in ``plan``."""
        return self._slots[slot]

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=self.waiting,
            steps=self._steps,
            admissions=self._admissions,
            retractions=self._retractions,
            held=self._holding.total,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            computed_tokens=self._computed_tokens,
            pages_total=self._ledger.total,
            pages_free=self._ledger.free,
            pages_cached=self._ledger.idle,
            evicted_pages=self._ledger.evicted,
        )

    # ------------------------------------------------------------------------------------------------ coming and going

    def submit(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none.

        Raises CapacityError (``param`` "prompt" or "max_new_tokens") when one can never fit the pool, and
        OverloadedError when the queue has no room.
        """
        for sequence in sequences:
            self._refuse_too_long(sequence)
        if self.waiting + len(sequences) > self._max_queue:
            raise OverloadedError(f"{self.waiting} requests are waiting (max_queue={self._max_queue}); try again later")
        for sequence in sequences:
            self._arrivals += 1
            sequence.arrival = self._arrivals
            sequence.due = self._admissions + self.waiting + PATIENCE
            self.programs.join(sequence, self._steps)
            self._enqueue(sequence)

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence, whatever it is doing; for one that has ended or was never submitted, do nothing.

        Its computed whole pages stay in the prefix cache, or with ``keep=False`` only those that already were.
        """
        if sequence.status in (Status.NEW, Status.FINISHED):
            return
        lease = None
        if sequence.status is Status.WAITING:
            self._dequeue(sequence)
        else:
            self._learn(sequence)
            lease = self._leave(sequence, keep)
        sequence.status = Status.FINISHED
        self._let_go(self.programs.leave(sequence, lease, self._steps))

    def fail(self) -> list[Sequence]:
        """Instead of ``commit``: the planned step did not happen. Its sequences are released, and returned to be told.

        Without a planned step, do nothing.
        """
        plan, self._flight = self._flight, None
        failed = [sequence for row in plan.rows if (sequence := self._slots[row.slot])] if plan else []
        for sequence in failed:
            self.release(sequence, keep=False)
        return failed

    def rewind(self, sequence: Sequence) -> None:
        """Its last tokens were taken back: compute the position that is now the last one again, to sample anew.

        Where that position is already in the tree (the prompt's last, or after a retraction) the sequence goes back to
        the queue: it may not write into shared pages.
        """
        end = len(sequence.tokens) - 1
        sequence.computed = min(sequence.computed, end)
        sequence.scored = min(sequence.scored, end)
        if sequence.lease is not None and sequence.lease.length > end:
            self._requeue(sequence)

    def pin(self, namespace: Namespace, tokens: list[int], steps: int) -> int:
        """Keep the cached prefix of ``tokens`` for so many steps; how many positions that are.

        Only a sequence that has the engine to itself and still lacks pages breaks pins. Raises CapacityError when
        more than half of the pool would be pinned.
        """
        lease = self._ledger.match_prefix(namespace, tokens)
        if lease is None:
            return 0
        half = self._ledger.total * self._ledger.page_size // 2
        if self.pins.positions + lease.length > half:
            self._ledger.release(lease)
            raise CapacityError(f"at most half of the KV pool, {half} tokens, can be pinned", param="pin")
        self.pins.add(lease, self._steps + steps)
        return lease.length

    def flush(self) -> None:
        """Forget every cached prefix that no running sequence uses."""
        self._let_go([*self.programs.clear(), *self.pins.clear()])
        self._ledger.flush()

    # ---------------------------------------------------------------------------------------------------------- a step

    def plan(self) -> Plan:
        """The next step: running sequences catch up, then waiting ones are admitted while there is room."""
        assert self._flight is None, "commit or fail the previous plan first"
        self._let_go([*self.programs.expire(self._steps), *self.pins.expire(self._steps)])
        work = self._make_room(self._catch_up())
        self._admit(work)
        plan = Plan(self._steps, tuple([self._row(sequence, target) for sequence, target in work]))
        if work:
            self._steps += 1
            self._flight = plan
        return plan

    def commit(self, plan: Plan) -> None:
        """The step's positions are computed. Not called for a plan without rows."""
        assert plan is self._flight
        self._flight = None
        self._computed_tokens += plan.tokens
        for row in plan.rows:
            sequence = self._slots[row.slot]
            if sequence is not None:
                self._advance(sequence, row)

    def _catch_up(self) -> Work:
        """As much as the token budget allows, decodes before prefills."""
        budget, work = self._max_step_tokens, []
        behind = [(n, sequence) for sequence in self._running if (n := sequence.remaining)]
        for n, sequence in sorted(behind, key=itemgetter(0)):
            n = min(n, budget)
            if n == 0:
                break
            work.append((sequence, sequence.computed + n))
            budget -= n
        return work

    def _make_room(self, work: Work) -> Work:
        """Allocate the step's pages. If there are too few, programs between calls give way, then the last in line.

        The first in line is never retracted: alone it fits, by the check at submission.
        """
        while self._missing(work) > self._ledger.available:
            if self._let_go(self.programs.yield_last(ANYONE)):
                continue
            if len(self._running) == 1:
                self._break_pins(self._missing(work))
                break
            last = max(self._running, key=attrgetter("rank"))
            self._retract(last)
            work = [(sequence, target) for sequence, target in work if sequence is not last]
        self._ledger.grow(work)
        return work

    def _break_pins(self, needed: int) -> None:
        """For a sequence that is alone."""
        while needed > self._ledger.available:
            assert self.pins, "alone it fits"
            self._let_go(self.pins.take())

    def _missing(self, work: Work) -> int:
        return sum([self._ledger.missing(sequence, target) for sequence, target in work])

    def _row(self, sequence: Sequence, target: int) -> Row:
        start, tabled, pages = sequence.computed, sequence.tabled, sequence.pages
        sequence.tabled = len(pages)
        return Row(
            sequence.slot,
            start,
            tuple(sequence.tokens[start:target]),
            tuple(pages[tabled:]),
            tabled == 0,
            _logits(sequence, start, target),
            sequence.adapter,
        )

    def _advance(self, sequence: Sequence, row: Row) -> None:
        assert sequence.computed == row.start
        computed = sequence.computed = row.stop
        if sequence.score_from is not None:
            sequence.scored = max(sequence.scored, computed)
        if row.start < sequence.prompt_length:
            self._dismiss(sequence)
            self._ledger.publish(sequence, min(computed, sequence.prompt_length))
            self._holding.lead(sequence)

    # ------------------------------------------------------------------------------------------------------- admission

    def _admit(self, work: Work) -> None:
        """Add waiting sequences to the step, in the policy's order, until one does not fit."""
        budget = self._max_step_tokens - sum([target - sequence.computed for sequence, target in work])
        if budget == 0 or self._full or not (self._free_slots and self._queue):
            return
        for sequence in self._candidates():
            entry = self._try_to_admit(sequence)
            if entry is _Entry.ADMITTED:
                n = min(sequence.remaining, budget)
                work.append((sequence, sequence.computed + n))
                self._ledger.grow(work[-1:])
                budget -= n
            if entry is _Entry.FULL or budget == 0 or not self._free_slots:
                return

    def _candidates(self) -> list[Sequence]:
        """The front of the queue: first those overdue, then the policy's order."""
        overdue, front = self._queue.overdue(self._admissions), self._queue.front()
        if self._policy.cached_first:
            front.sort(key=lambda sequence: (-sequence.request.priority, -self._ledger.probe(sequence)))
        return list(dict.fromkeys([*overdue, *front]))

    def _try_to_admit(self, sequence: Sequence) -> _Entry:
        lease = self._ledger.match(sequence)
        leader = self._holding.leader(lease, sequence.tokens, cacheable(sequence)) if lease else None
        if leader is not None and sequence.due > self._admissions:
            self._ledger.release(lease)
            self._queue.remove(sequence)
            self._holding.follow(sequence, leader)
            return _Entry.HELD
        if not self._fits(sequence, lease):
            self._ledger.release(lease)
            self._full = True
            return _Entry.FULL
        self._enter(sequence, lease)
        return _Entry.ADMITTED

    def _fits(self, sequence: Sequence, lease: Lease | None) -> bool:
        """Whether there is room, which programs behind this one in line must make. Alone, anything fits."""
        urgent = not self._running or sequence.due <= self._admissions
        behind = ANYONE if urgent else sequence.rank
        while self._reserved(sequence, lease) > self._ledger.available:
            if not self._let_go(self.programs.yield_last(behind)):
                return not self._running and self._fits_alone(sequence, lease)
        return True

    def _fits_alone(self, sequence: Sequence, lease: Lease | None) -> bool:
        cached = lease.length // self._ledger.page_size if lease else 0
        self._break_pins(self._ledger.pages_for(len(sequence.tokens)) - cached)
        return True

    def _reserved(self, sequence: Sequence, lease: Lease | None) -> int:
        """Pages that the running sequences and this one are expected to need beyond those they have."""
        cached = lease.length // self._ledger.page_size if lease else 0
        expected = sum([max(0, self._expected_pages(other) - len(other.pages)) for other in self._running])
        return self._expected_pages(sequence) - cached + expected

    def _expected_pages(self, sequence: Sequence) -> int:
        length = len(sequence.tokens)
        return self._ledger.pages_for(length + int(self._share.value * (sequence.limit - length)))

    def _enter(self, sequence: Sequence, lease: Lease | None) -> None:
        self._queue.remove(sequence)
        self._ledger.enter(sequence, lease)
        sequence.status = Status.RUNNING
        sequence.slot = heapq.heappop(self._free_slots)
        if sequence.retractions == 0:
            sequence.cached = sequence.computed
            self._prompt_tokens += len(sequence.tokens)
            self._hit_tokens += sequence.cached
        self._slots[sequence.slot] = sequence
        self._running[sequence] = None
        self._admissions += 1
        self._holding.lead(sequence)

    # --------------------------------------------------------------------------------------------------------- leaving

    def _retract(self, sequence: Sequence) -> None:
        """Make room by taking a sequence off its slot. Nobody enters until something else has changed."""
        self._requeue(sequence)
        self._share.retracted()
        self._full = True

    def _requeue(self, sequence: Sequence) -> None:
        """Back to its place in the queue; what it computed stays in the cache as long as there is room."""
        self._ledger.release(self._leave(sequence, keep=True))
        sequence.computed = 0
        sequence.retractions += 1
        self._retractions += 1
        self._enqueue(sequence)

    def _leave(self, sequence: Sequence, keep: bool) -> Lease | None:
        self._dismiss(sequence)
        if keep:  # tokens may have been taken back since the last step
            self._ledger.publish(sequence, min(sequence.computed, len(sequence.tokens)))
        self._slots[sequence.slot] = None
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        del self._running[sequence]
        self._full = False
        return self._ledger.leave(sequence)

    def _let_go(self, leases: list[Lease]) -> bool:
        for lease in leases:
            self._ledger.release(lease)
            self._full = False
        return bool(leases)

    def _learn(self, sequence: Sequence) -> None:
        allowed = sequence.limit - sequence.prompt_length
        if allowed > 0:
            self._share.ended(sequence.output_length / allowed)

    # ------------------------------------------------------------------------------------------------------- the queue

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._queue.add(sequence)
        self._full = False

    def _dequeue(self, sequence: Sequence) -> None:
        if sequence in self._queue:
            self._queue.remove(sequence)
        else:
            self._holding.forget(sequence)

    def _dismiss(self, leader: Sequence) -> None:
        """Those that were held back may look into the tree again."""
        for follower in self._holding.dismiss(leader):
            self._enqueue(follower)

    def _refuse_too_long(self, sequence: Sequence) -> None:
        assert 0 < len(sequence.tokens) <= sequence.limit
        pool = self._ledger.total * self._ledger.page_size
        if len(sequence.tokens) > pool:
            raise CapacityError(f"the prompt has {len(sequence.tokens)} tokens, the KV pool {pool}", param="prompt")
        if sequence.limit > pool:
            raise CapacityError(
                f"prompt and output may reach {sequence.limit} tokens, the KV pool has {pool}; "
                f"ask for at most {pool - len(sequence.tokens)} new tokens",
                param="max_new_tokens",
            )

    # ---------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Assert every invariant of the scheduler, the tree and the pool; for tests and idle moments."""
        in_slots = {sequence: sequence.slot for sequence in self._slots if sequence is not None}
        assert in_slots.keys() == self._running.keys()
        assert sorted([*in_slots.values(), *self._free_slots]) == list(range(len(self._slots)))
        for sequence in self._running:
            assert sequence.status is Status.RUNNING
            assert sequence.computed <= len(sequence.tokens) <= sequence.limit
        self._check_waiting([*self._queue, *self._holding.followers])
        assert self._holding.leaders <= self._running.keys()
        self._queue.check()
        self._ledger.check(self._running)

    def _check_waiting(self, waiting: Iterable[Sequence]) -> None:
        for sequence in waiting:
            assert sequence.status is Status.WAITING and sequence.computed == 0
            assert sequence.slot == -1 and not sequence.pages and sequence.lease is None


def _logits(sequence: Sequence, start: int, stop: int) -> int:
    """How many of the last positions of a row have their logits wanted."""
    at_end = int(stop == len(sequence.tokens))
    if sequence.score_from is None:
        return at_end
    return max(at_end, stop - max(start, sequence.score_from, sequence.scored))
