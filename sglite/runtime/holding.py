"""Of several sequences that need one uncached prefix, one computes it and the others wait for its pages.

A running sequence *leads* while whole pages of its prompt are still to be computed: whoever would compute the same
tokens at the same place of the tree *follows* it, until the leader has put something into the tree or has left.
"""

from __future__ import annotations

from array import array

from sglite.runtime.sequence import Sequence
from sglite.runtime.tree import Lease, Node

WORTH_WAITING = 16
"""Tokens that two sequences must share for one to wait for the other."""

Run = tuple[Node, bytes]
"""A place in the tree and the tokens that are about to be inserted there."""


class Holding:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._length = page_size * -(-WORTH_WAITING // page_size)
        self._leaders: dict[Run, Sequence] = {}
        self._followers: dict[Sequence, list[Sequence]] = {}
        self.total = 0
        """How often a sequence was made to wait."""

    def __len__(self) -> int:
        """How many wait now."""
        return sum(map(len, self._followers.values()))

    @property
    def followers(self) -> list[Sequence]:
        return [follower for group in self._followers.values() for follower in group]

    @property
    def leaders(self) -> set[Sequence]:
        return {*self._leaders.values(), *self._followers}

    def leader(self, lease: Lease, tokens: list[int], limit: int) -> Sequence | None:
        """Who is computing the tokens that follow ``lease``; ``limit`` positions may come from the cache at all."""
        run = self._run(lease, tokens, limit)
        return self._leaders.get(run) if run else None

    def follow(self, follower: Sequence, leader: Sequence) -> None:
        self._followers.setdefault(leader, []).append(follower)
        self.total += 1

    def forget(self, follower: Sequence) -> None:
        next(group for group in self._followers.values() if follower in group).remove(follower)

    def lead(self, sequence: Sequence) -> None:
        """Call when a sequence has its lease, and after ``dismiss`` when the lease has grown."""
        if sequence.lease is not None:
            whole = sequence.prompt_length // self._page_size * self._page_size
            run = self._run(sequence.lease, sequence.tokens, whole)
            if run:
                self._leaders.setdefault(run, sequence)

    def dismiss(self, sequence: Sequence) -> list[Sequence]:
        """End a lead, before the lease changes. Returns those who waited for it: they may find more in the tree."""
        if sequence.lease is not None:
            run = self._run(sequence.lease, sequence.tokens, len(sequence.tokens))
            if run and self._leaders.get(run) is sequence:
                del self._leaders[run]
        return self._followers.pop(sequence, [])

    def _run(self, lease: Lease, tokens: list[int], limit: int) -> Run | None:
        if lease.node is None or lease.length + self._length > limit:
            return None
        return lease.node, array("i", tokens[lease.length : lease.length + self._length]).tobytes()
