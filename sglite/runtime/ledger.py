"""Which pages a sequence has: the first ones leased from the prefix cache, the rest its own.

With ``cache=None`` nothing is shared, and everything else works the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglite.errors import CapacityError
from sglite.runtime.pages import PageBook
from sglite.runtime.plan import Row
from sglite.runtime.radix import PrefixCache
from sglite.runtime.sequence import Sequence
from sglite.runtime.tree import CacheStats, Lease, Namespace

NO_CACHE = CacheStats(*[0] * len(CacheStats.__dataclass_fields__))


class PagesError(Exception):
    """A sequence could not be given its pages, though there are enough: the cause says why."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__("no pages for a sequence")
        self.sequence = sequence


class PageLedger:
    def __init__(self, book: PageBook, cache: PrefixCache | None, page_size: int) -> None:
        assert cache is None or cache.page_size == page_size
        self.page_size = page_size
        self._book = book
        self._cache = cache

    @property
    def total(self) -> int:
        return self._book.total

    @property
    def available(self) -> int:
        """Pages that ``grow`` can find, by eviction if it must."""
        return self._book.available + (self._cache.evictable if self._cache else 0)

    @property
    def free(self) -> int:
        return self._book.available

    @property
    def tree(self) -> CacheStats:
        return self._cache.stats if self._cache else NO_CACHE

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def refuse_too_long(self, sequence: Sequence) -> None:
        """Raises CapacityError for a sequence that could not be computed even if it were alone."""
        assert 0 < len(sequence.tokens) <= sequence.limit
        pool = self.total * self.page_size
        if len(sequence.tokens) > pool:
            raise CapacityError(f"the prompt has {len(sequence.tokens)} tokens, the KV pool {pool}", param="prompt")
        if sequence.limit > pool:
            raise CapacityError(
                f"prompt and output may reach {sequence.limit} tokens, the KV pool has {pool}; "
                f"ask for at most {pool - len(sequence.tokens)} new tokens",
                param="max_new_tokens",
            )

    def missing(self, sequence: Sequence, target: int) -> int:
        """Pages that a sequence lacks to compute up to ``target``."""
        return max(0, -(-target // self.page_size) - len(sequence.pages))

    def missing_for(self, work: Iterable[tuple[Sequence, int]]) -> int:
        """Pages that several lack; most steps cross no page's end."""
        size = self.page_size
        return sum([self.missing(one, target) for one, target in work if target > len(one.pages) * size])

    def shared(self, sequence: Sequence) -> int:
        """How many of its pages are the tree's."""
        return sequence.lease.length // self.page_size if sequence.lease else 0

    # ---------------------------------------------------------------------------------------------------- for waiting

    def probe(self, sequence: Sequence) -> int:
        """Positions that ``match`` would find."""
        return self._cache.probe(sequence.namespace, sequence.tokens, cacheable(sequence)) if self._cache else 0

    def path(self, sequence: Sequence) -> tuple[int, ...]:
        """Names of the tree's nodes on the way of ``match``."""
        return self._cache.path(sequence.namespace, sequence.tokens, cacheable(sequence)) if self._cache else ()

    def match(self, sequence: Sequence) -> Lease | None:
        """The cached part of a sequence; give it to ``enter`` or back to ``release``."""
        return self.match_prefix(sequence.namespace, sequence.tokens, cacheable(sequence))

    def match_prefix(self, namespace: Namespace, tokens: list[int], limit: int | None = None) -> Lease | None:
        return self._cache.match(namespace, tokens, limit) if self._cache else None

    def release(self, lease: Lease | None) -> None:
        if self._cache is not None and lease is not None:
            self._cache.release(lease)

    # ---------------------------------------------------------------------------------------------------- for running

    def enter(self, sequence: Sequence, lease: Lease | None) -> None:
        sequence.lease = lease
        if self._cache is not None and lease is not None:
            sequence.pages = self._cache.pages(lease)
            sequence.computed = lease.length
            if lease.begun is not None:
                sequence.copied, n = lease.begun
                sequence.computed += n

    def grow(self, sequences: Iterable[tuple[Sequence, int]]) -> None:
        """Give each sequence the pages up to its target. There must be as many ``available``.

        Raises PagesError for the first one whose pages cannot be had; those before it have theirs.
        """
        for sequence, target in sequences:
            n = self.missing(sequence, target)
            if n:
                try:
                    self._evict(n - self._book.available, sequence)
                    sequence.pages += self._book.allocate(n)
                except Exception as error:
                    raise PagesError(sequence) from error

    def row(self, sequence: Sequence, target: int) -> Row:
        """The step's work for a sequence that has its pages; they count as known to the runner from now on."""
        start, tabled, pages = sequence.computed, sequence.tabled, sequence.pages
        if target - start == 1 and tabled == len(pages) and sequence.copied < 0 and sequence.score_from is None:
            logits = int(target == len(sequence.tokens))  # as in most steps
            return Row(sequence.slot, start, (sequence.tokens[start],), (), False, logits, sequence.adapter)
        ids, news = tuple(sequence.tokens[start:target]), tuple[int, ...]()
        if tabled != len(pages):
            news, sequence.tabled = tuple(pages[tabled:]), len(pages)
        logits = 1 if sequence.score_from is None and target == len(sequence.tokens) else sequence.wanted_logits(target)
        copied, sequence.copied = sequence.copied, -1
        return Row(sequence.slot, start, ids, news, tabled == 0, logits, sequence.adapter, copied)

    def forget_copies(self, sequences: Iterable[Sequence]) -> None:
        """Pages that were to be copied may change before these sequences are planned again: they compute instead."""
        for sequence in sequences:
            if sequence.copied >= 0 and sequence.lease is not None:
                sequence.copied, sequence.computed = -1, sequence.lease.length

    def _evict(self, n: int, payer: Sequence) -> None:
        if n > 0 and self._cache is not None:
            self._cache.evict(n, payer.namespace)

    def publish(self, sequence: Sequence, upto: int) -> None:
        """Give the tree the whole pages below ``upto``, and take the tree's own where it had them already."""
        lease, size = sequence.lease, self.page_size
        if self._cache is None or lease is None or upto // size * size <= lease.length:
            return
        first, last = lease.length // size, upto // size
        mine = sequence.pages[first:last]
        kept = self._cache.insert(lease, sequence.tokens[first * size : last * size], mine)
        if kept != mine:
            sequence.pages[first:last] = kept
            sequence.tabled = 0

    def publish_tail(self, sequence: Sequence, upto: int) -> None:
        """After ``publish``, of one that leaves: the positions of its last page that is not full."""
        lease, tokens = sequence.lease, sequence.tokens
        if self._cache is None or lease is None or not self._cache.tails or sequence.copied >= 0:
            return
        first = self.shared(sequence)
        if lease.length < upto and self._cache.add_tail(lease, tokens[lease.length : upto], sequence.pages[first]):
            del sequence.pages[first]

    def leave(self, sequence: Sequence) -> Lease | None:
        """Free what is not in the tree. Returns the lease, for ``release``."""
        self._book.free(sequence.pages[self.shared(sequence) :])
        lease, sequence.lease = sequence.lease, None
        sequence.pages, sequence.tabled, sequence.copied = [], 0, -1
        return lease

    def adopt(self, namespace: Namespace, tokens: list[int], write: Callable[[int, list[int]], None]) -> int:
        """Have ``write(start, pages)`` fill pages with the KV of the whole pages of ``tokens`` that the tree lacks."""
        lease, whole = self.match_prefix(namespace, tokens), len(tokens) // self.page_size * self.page_size
        if self._cache is None or lease is None:
            return 0
        start, n = lease.length, (whole - lease.length) // self.page_size
        if 0 < n <= self.available:
            self._cache.evict(n - self._book.available, namespace)
            pages = self._book.allocate(n)
            write(start, pages)
            self._cache.insert(lease, tokens[start:whole], pages)
        news = lease.length - start
        self._cache.release(lease)
        return news

    def flush(self) -> None:
        if self._cache is not None:
            self._cache.flush()

    # --------------------------------------------------------------------------------------------------------- checks

    def check(self, running: Iterable[Sequence]) -> None:
        """Every page has one owner, and the running sequences' leased pages are the tree's."""
        private = []
        for sequence in running:
            private += sequence.pages[self.shared(sequence) :]
            self._check_sequence(sequence)
        self._book.check(self._cache.check() if self._cache else [], private)

    def _check_sequence(self, sequence: Sequence) -> None:
        assert sequence.computed <= len(sequence.pages) * self.page_size
        assert sequence.tabled <= len(sequence.pages)
        assert (sequence.lease is None) == (self._cache is None)
        if self._cache is not None and sequence.lease is not None:
            assert sequence.lease.length <= sequence.computed
            assert self._cache.pages(sequence.lease) == sequence.pages[: self.shared(sequence)]


def cacheable(sequence: Sequence) -> int:
    """Positions that may come from the cache: all but the last, and none whose logits are still wanted."""
    last = len(sequence.tokens) - 1
    return last if sequence.score_from is None else min(last, max(sequence.score_from, sequence.scored))
