"""In which order waiting sequences are tried: the queue's, looked at again by policies that ask the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sglite.runtime.ledger import PageLedger
from sglite.runtime.policy import Candidate, Policy
from sglite.runtime.sequence import Sequence
from sglite.runtime.waiting import WaitingQueue


def in_order(queue: WaitingQueue, policy: Policy, ledger: PageLedger, admissions: int) -> Iterator[Sequence]:
    """The front of the queue: first those overdue, then the policy's order."""
    overdue = queue.overdue(admissions)
    yield from overdue
    yield from (sequence for sequence in _front(queue, policy, ledger) if sequence not in overdue)


def _front(queue: WaitingQueue, policy: Policy, ledger: PageLedger) -> Iterable[Sequence]:
    if policy.reorder is None:
        return queue.front()
    front = list(queue.front())
    return [front[i] for i in policy.reorder([_candidate(sequence, ledger) for sequence in front])]


def _candidate(sequence: Sequence, ledger: PageLedger) -> Candidate:
    return Candidate(sequence.request.priority, ledger.path(sequence), ledger.probe(sequence))
