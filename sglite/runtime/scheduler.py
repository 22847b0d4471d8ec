"""Which sequences compute what in each step: the one place where decisions are made. No tensors, no I/O.

The engine thread calls, in turn::

    plan = scheduler.plan()        who computes which positions; pages and slots are taken
    ... start the forward pass of plan ...
    scheduler.commit(plan)         its positions count as computed, its whole prompt pages can be hit
    ... append sampled tokens to the sequences of scheduler.planned(plan), release what ended ...

``commit`` may be called as soon as the forward pass is queued before all later work on the device: pages that are
freed or shared from then on are written and read in step order. Between ``plan`` and ``commit`` sequences may be
submitted and released; a row whose sequence was released meanwhile is computed for nothing and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from operator import attrgetter, itemgetter

from sglite.errors import CapacityError, OverloadedError
from sglite.runtime.admission import Admission, Work
from sglite.runtime.ledger import PageLedger, PagesError
from sglite.runtime.pages import PageBook
from sglite.runtime.pins import Pins
from sglite.runtime.plan import Plan, Row
from sglite.runtime.policy import policy_named
from sglite.runtime.programs import Programs
from sglite.runtime.radix import PrefixCache
from sglite.runtime.room import ANYONE, Room
from sglite.runtime.sequence import Sequence, Status
from sglite.runtime.slots import Slots
from sglite.runtime.tally import SchedulerStats, Tally
from sglite.runtime.tree import Lease, Namespace

MEMORY = 2048.0
"""Steps for which a program between calls is remembered at least."""


class Scheduler:
    """Sequences wait in a queue, run in a slot, and leave by ``release``. Raises ConfigError for an unknown policy.

    Pins and programs live by ``clock`` (None: the number of the step), in whose units ``memory`` is the least time for
    which a program between calls is remembered.
    """

    def __init__(
        self,
        book: PageBook,
        cache: PrefixCache | None,
        *,
        page_size: int,
        policy: str = "program",
        max_running: int = 64,
        max_queue: int = 4096,
        max_step_tokens: int = 2048,
        clock: Callable[[], float] | None = None,
        memory: float = MEMORY,
    ) -> None:
        self._policy = policy_named(policy)
        self._ledger = PageLedger(book, cache, page_size)
        self._max_queue = max_queue
        self._max_step_tokens = max_step_tokens
        self._slots = Slots(max_running)
        self.programs = Programs(self._policy, memory)
        self.pins = Pins()
        self._tally = Tally()
        self._room = Room(self._ledger, self.programs, self.pins)
        self._admission = Admission(self._policy, self._ledger, self._slots, self._room, self._tally)
        self._clock = clock or self._step_number
        self._flight: Plan | None = None
        self._arrivals = 0

    # ----------------------------------------------------------------------------------------------- what is going on

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._slots.running)

    @property
    def waiting(self) -> int:
        return len(self._admission)

    @property
    def idle(self) -> bool:
        """Nobody runs and nobody waits."""
        return not self._slots.running and not self._admission

    def sequence(self, slot: int) -> Sequence | None:
        """Who is in a slot; None if released. Slots are given anew only in ``plan``."""
        return self._slots[slot]

    def planned(self, plan: Plan) -> list[Sequence]:
        """The sequences of a plan's rows that were not released since."""
        return self._slots.planned(plan)

    @property
    def stats(self) -> SchedulerStats:
        tree = self._ledger.tree
        return SchedulerStats(
            **asdict(self._tally),
            running=len(self._slots.running),
            waiting=self.waiting,
            held=self._admission.held,
            pages_total=self._ledger.total,
            pages_free=self._ledger.free,
            pages_cached=tree.evictable,
            pages_protected=tree.protected,
            evicted_pages=tree.evicted,
            tree_nodes=tree.nodes,
            depth=round(tree.depth, 2),
            programs=len(self.programs),
            pinned_tokens=self.pins.positions,
        )

    # ------------------------------------------------------------------------------------------------ coming and going

    def submit(self, *sequences: Sequence) -> None:
        """Queue a request's sequences, all or none.

        Raises CapacityError (``param`` "prompt" or "max_new_tokens") when one can never fit the pool, or ("n" or
        "candidates") all of them never the queue; OverloadedError when the queue has no room now.
        """
        for sequence in sequences:
            self._ledger.refuse_too_long(sequence)
        if len(sequences) > self._max_queue:
            raise CapacityError(
                f"the request is {len(sequences)} sequences, max_queue={self._max_queue}; ask for fewer, or raise it",
                param="candidates" if sequences[0].request.candidates else "n",
            )
        if self.waiting + len(sequences) > self._max_queue:
            raise OverloadedError(f"{self.waiting} requests are waiting (max_queue={self._max_queue}); try again later")
        for sequence in sequences:
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self.programs.join(sequence, self._clock())
            self._admission.add(sequence)

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence, whatever it is doing; for one that has ended or was never submitted, do nothing.

        Its computed whole pages stay in the prefix cache, or with ``keep=False`` only those that already were.
        """
        if sequence.status in (Status.NEW, Status.FINISHED):
            return
        lease = None
        if sequence.status is Status.WAITING:
            self._admission.remove(sequence)
        else:
            self._room.learn(sequence)
            lease = self._leave(sequence, keep)
        sequence.status = Status.FINISHED
        self._room.let_go(self.programs.leave(sequence, lease, self._clock()))

    def end_program(self, namespace: str, program: str, branch: str = "") -> None:
        """No more calls come from a branch of a program and those below it; "" is the whole program."""
        self._room.let_go(self.programs.end(namespace, program, branch))

    def fail(self) -> list[Sequence]:
        """Instead of ``commit``: the planned step did not happen. Its sequences are released, and returned to be told.

        Without a planned step, do nothing.
        """
        plan, self._flight = self._flight, None
        failed = self._slots.planned(plan) if plan else []
        for sequence in failed:
            self.release(sequence, keep=False)
        return failed

    def shrink(self) -> bool:
        """Instead of ``commit``: the planned step was too large for the device.

        From now on steps are at most half as large, and of several sequences the last half in line are retracted.
        False, and nothing done, when it was a single sequence's smallest step.
        """
        assert self._flight is not None
        plan = self._flight
        if plan.tokens == 1:
            return False
        self._flight = None
        self._max_step_tokens = plan.tokens // 2
        planned = sorted(self._slots.planned(plan), key=attrgetter("rank"))
        for sequence in planned[(len(planned) + 1) // 2 :]:
            self._retract(sequence)
        return True

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

    def pin(self, namespace: Namespace, tokens: list[int], ttl: float) -> int:
        """Keep the cached prefix of ``tokens`` for so long; how many positions that are.

        Only a sequence that has the engine to itself and still lacks pages breaks pins. Raises CapacityError when
        more than half of the pool would be pinned.
        """
        return self._room.pin(namespace, tokens, self._clock() + ttl)

    def adopt(self, namespace: Namespace, tokens: list[int], write: Callable[[int, list[int]], None]) -> int:
        """Take in KV that was computed elsewhere: ``write(start, pages)`` puts that of the positions from ``start`` on
        into pages. Returns how many positions were news; 0 without a cache, or where there is no room."""
        return self._ledger.adopt(namespace, tokens, write)

    def flush(self) -> None:
        """Forget every cached prefix that no running sequence uses."""
        self._room.let_go([*self.programs.clear(), *self.pins.clear()])
        self._ledger.flush()

    # ---------------------------------------------------------------------------------------------------------- a step

    def plan(self) -> Plan:
        """The next step: running sequences catch up, then waiting ones are admitted while there is room.

        After a PagesError, and the release of its sequence, plan again.
        """
        assert self._flight is None, "commit or fail the previous plan first"
        self._room.expire(self._clock())
        self._admission.settle()
        self._preempt()
        try:
            work = self._make_room(self._catch_up())
            budget = self._max_step_tokens - sum([target - sequence.computed for sequence, target in work])
            self._admission.admit(work, budget, self._clock())
        except PagesError:
            self._ledger.forget_copies(self._slots.running)
            raise
        plan = Plan(self._tally.steps, tuple([self._ledger.row(sequence, target) for sequence, target in work]))
        if work:
            self._tally.steps += 1
            self._flight = plan
        return plan

    def commit(self, plan: Plan) -> None:
        """The step's positions are computed. Not called for a plan without rows."""
        assert plan is self._flight
        self._flight = None
        self._tally.computed_tokens += plan.tokens
        for row in plan.rows:
            sequence = self._slots[row.slot]
            if sequence is not None:
                self._advance(sequence, row, row.start + len(row.ids))

    def _catch_up(self) -> Work:
        """As much as the token budget allows, decodes before prefills."""
        behind = [(n, sequence) for sequence in self._slots.running if (n := len(sequence.tokens) - sequence.computed)]
        missing = sum([n for n, _ in behind])
        if missing > len(behind):
            behind.sort(key=itemgetter(0))
        if missing <= self._max_step_tokens:
            return [(sequence, len(sequence.tokens)) for _, sequence in behind]
        return self._within_budget(behind)

    def _within_budget(self, behind: Iterable[tuple[int, Sequence]]) -> Work:
        budget, work = self._max_step_tokens, []
        for n, sequence in behind:
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
        while (missing := self._ledger.missing_for(work)) and missing > self._ledger.available:
            if self._room.yield_kept(ANYONE, self._clock()):
                continue
            if len(self._slots.running) == 1:
                self._room.break_pins(missing)
                break
            last = self._slots.last_in_line()
            self._retract(last)
            work = [(sequence, target) for sequence, target in work if sequence is not last]
        if missing:
            self._ledger.grow(work)
        return work

    def _step_number(self) -> float:
        return self._tally.steps

    def _advance(self, sequence: Sequence, row: Row, computed: int) -> None:
        assert sequence.computed == row.start
        sequence.computed = computed
        if sequence.score_from is not None:
            sequence.scored = max(sequence.scored, computed)
        if row.start < sequence.prompt_length:
            self._admission.dismiss(sequence)
            self._ledger.publish(sequence, min(computed, sequence.prompt_length))
            self._admission.lead(sequence)

    # --------------------------------------------------------------------------------------------------------- leaving

    def _preempt(self) -> None:
        """Running sequences give up their places to waiting ones of higher priority that would have none."""
        if not self._policy.preempts or (self._slots.free and not self._room.full):
            return
        free = 0 if self._room.full else self._slots.free
        for waiting in islice(self._admission, free, self._slots.total):
            last = self._slots.last_to_preempt()
            if last is None or last.request.priority >= waiting.request.priority:
                return
            self._requeue(last)
            self._tally.preemptions += 1

    def _retract(self, sequence: Sequence) -> None:
        """Make room by taking a sequence off its slot. Nobody enters until something else has changed."""
        self._requeue(sequence)
        self._room.share.retracted()
        self._room.full = True

    def _requeue(self, sequence: Sequence) -> None:
        """Back to its place in the queue; what it computed stays in the cache as long as there is room."""
        self._ledger.release(self._leave(sequence, keep=True))
        sequence.computed = 0
        sequence.retractions += 1
        self._tally.retractions += 1
        self._admission.add(sequence)

    def _leave(self, sequence: Sequence, keep: bool) -> Lease | None:
        self._admission.dismiss(sequence)
        if keep:  # tokens may have been taken back since the last step
            end = min(sequence.computed, len(sequence.tokens))
            self._ledger.publish(sequence, end)
            self._ledger.publish_tail(sequence, end)
        self._slots.leave(sequence)
        self._room.full = False
        return self._ledger.leave(sequence)

    # ---------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Assert every invariant of the scheduler, the tree and the pool; for tests and idle moments."""
        self._slots.check()
        self._admission.check()
        self._ledger.check(self._slots.running)
