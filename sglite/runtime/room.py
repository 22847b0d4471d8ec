"""Who gives way when pages run out, and whether a sequence has room to start.

In this order: what only the cache holds (eviction, in the ledger), prefixes that programs keep between calls, running
sequences (the scheduler's business), and pins, for a sequence that is alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglite.errors import CapacityError
from sglite.runtime.ledger import PageLedger
from sglite.runtime.pins import Pins
from sglite.runtime.policy import Rank
from sglite.runtime.programs import Programs
from sglite.runtime.sequence import Sequence
from sglite.runtime.tree import Lease, Namespace

ANYONE: Rank = ()
"""Every program is behind it."""


class OutputShare:
    """The share of their allowed output that sequences use, learned from those that ended.

    Admission reserves it for everyone, so that few sequences are retracted and the pool is still full.
    """

    def __init__(self) -> None:
        self.value = 0.1

    def ended(self, share: float) -> None:
        self.value += 0.05 * (share - self.value)

    def retracted(self) -> None:
        """The reserve was too small."""
        self.value += 0.1 * (1.0 - self.value)


class Room:
    def __init__(self, ledger: PageLedger, programs: Programs, pins: Pins) -> None:
        self._ledger = ledger
        self._programs = programs
        self._pins = pins
        self.share = OutputShare()
        self.full = False
        """The pool was found too full to admit anyone, and nothing has changed since."""

    def let_go(self, leases: Iterable[Lease]) -> bool:
        """Release leases; whether there were any."""
        any_lease = False
        for lease in leases:
            self._ledger.release(lease)
            self.full, any_lease = False, True
        return any_lease

    def expire(self, now: float) -> None:
        self.let_go(self._programs.expire(now))
        self.let_go(self._pins.expire(now))

    def yield_kept(self, behind: Rank, now: float) -> bool:
        """Have a program that is between calls, and behind the given rank, give up a prefix it keeps."""
        return self.let_go(self._programs.yield_last(behind, now))

    def break_pins(self, needed: int) -> None:
        """For a sequence that is alone."""
        while needed > self._ledger.available:
            assert self._pins, "alone it fits"
            self.let_go(self._pins.take())

    def pin(self, namespace: Namespace, tokens: list[int], until: float) -> int:
        """See ``Scheduler.pin``."""
        lease = self._ledger.match_prefix(namespace, tokens)
        if lease is None:
            return 0
        half = self._ledger.total * self._ledger.page_size // 2
        if self._pins.positions + lease.length > half:
            self._ledger.release(lease)
            raise CapacityError(f"at most half of the KV pool, {half} tokens, can be pinned", param="pin")
        self._pins.add(lease, until)
        return lease.length

    def fits(
        self, sequence: Sequence, lease: Lease | None, running: Collection[Sequence], behind: Rank, now: float
    ) -> bool:
        """Whether there is room, which programs behind that rank must make. Alone, anything fits."""
        while self._reserved(sequence, lease, running) > self._ledger.available:
            if not self.yield_kept(behind, now):
                return not running and self._fits_alone(sequence, lease)
        return True

    def learn(self, sequence: Sequence) -> None:
        """A sequence has ended: how much of its allowed output did it need?"""
        allowed = sequence.limit - sequence.prompt_length
        if allowed > 0:
            self.share.ended(sequence.output_length / allowed)

    def _fits_alone(self, sequence: Sequence, lease: Lease | None) -> bool:
        self.break_pins(self._ledger.pages_for(len(sequence.tokens)) - self._cached(lease))
        return True

    def _reserved(self, sequence: Sequence, lease: Lease | None, running: Iterable[Sequence]) -> int:
        """Pages that the running sequences and this one are expected to need beyond those they have."""
        expected = sum([max(0, self._expected_pages(other) - len(other.pages)) for other in running])
        return self._expected_pages(sequence) - self._cached(lease) + expected

    def _cached(self, lease: Lease | None) -> int:
        return lease.length // self._ledger.page_size if lease else 0

    def _expected_pages(self, sequence: Sequence) -> int:
        length = len(sequence.tokens)
        return self._ledger.pages_for(length + int(self.share.value * (sequence.limit - length)))
