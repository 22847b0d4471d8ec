"""The page book and the prefix cache, against a dictionary that keeps every page of every prefix on its own."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest

from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from sglite.runtime.tree import Lease, Namespace

Key = tuple[Namespace, int, tuple[int, ...]]
"""Namespace, how many flushes it began after, and all tokens up to the end of the page."""


# ------------------------------------------------------------------------------------------------------------ pages


def test_pages_are_handed_out_once_and_come_back():
    book = PageBook(5)
    first, second = book.allocate(2), book.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert book.available == 0
    book.free(first)
    assert sorted(book.allocate(2)) == sorted(first)


def test_more_pages_than_free_is_our_bug():
    book = PageBook(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        book.allocate(3)


def test_a_double_free_is_our_bug():
    book = PageBook(2)
    pages = book.allocate(1)
    book.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        book.free(pages)


def test_the_book_finds_lost_and_doubled_pages():
    book = PageBook(4)
    a, b, c = book.allocate(3)
    book.check([a], [b, c])
    with pytest.raises(AssertionError, match="accounted for"):
        book.check([a], [b])
    with pytest.raises(AssertionError, match="two owners"):
        book.check([a, b], [b])


# --------------------------------------------------------------------------------------------------- the cache, plainly


@dataclass
class Pool:
    """A cache with its book, and the leases that stand for running sequences."""

    total: int = 64
    page_size: int = 4
    book: PageBook = field(init=False)
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.book = PageBook(self.total)
        self.cache = PrefixCache(self.book, self.page_size)

    def add(self, tokens: list[int], namespace: Namespace = ("a",)) -> list[int]:
        """Compute what is not cached, as a sequence would, and leave it in the tree."""
        lease = self.cache.match(namespace, tokens)
        whole = len(tokens) // self.page_size
        new = self.book.allocate(whole - lease.length // self.page_size)
        self.cache.insert(lease, tokens[lease.length : whole * self.page_size], new)
        pages = self.cache.pages(lease)
        self.cache.release(lease)
        return pages

    def check(self, private: list[int] | None = None) -> None:
        self.book.check(self.cache.check(), private or [])

    def cached(self, tokens: list[int], namespace: Namespace = ("a",)) -> int:
        return self.cache.probe(namespace, tokens)


def tokens(start: int, n: int) -> list[int]:
    return list(range(start, start + n))


def test_only_whole_pages_below_the_limit_match():
    pool = Pool()
    pages = pool.add(tokens(0, 10))
    assert len(pages) == 2
    lease = pool.cache.match(("a",), tokens(0, 10), limit=9)
    assert (lease.length, pool.cache.pages(lease)) == (8, pages)
    short = pool.cache.match(("a",), tokens(0, 10), limit=7)
    assert (short.length, pool.cache.pages(short)) == (4, pages[:1])
    assert pool.cache.pages(lease, 4) == pages[1:]
    pool.check()


def test_branches_share_their_prefix_and_differ_after():
    pool = Pool()
    a = pool.add(tokens(0, 16))
    b = pool.add([*tokens(0, 8), *tokens(50, 8)])
    assert a[:2] == b[:2] and not set(a[2:]) & set(b[2:])
    assert pool.cache.stats.nodes == 3


def test_namespaces_do_not_share_and_vanish_when_empty():
    pool = Pool()
    pool.add(tokens(0, 8), ("a",))
    assert pool.cached(tokens(0, 8), ("b",)) == 0
    pool.cache.release(pool.cache.match(("b",), tokens(0, 8)))
    assert pool.cache.stats.namespaces == 1
    pool.cache.evict(99)
    assert pool.cache.stats.namespaces == 0
    assert pool.book.available == pool.total


def test_the_second_to_insert_gets_the_first_ones_pages():
    pool = Pool()
    one, two = (pool.cache.match(("a",), tokens(0, 8)) for _ in range(2))
    first, second = pool.book.allocate(2), pool.book.allocate(3)
    assert pool.cache.insert(one, tokens(0, 8), first) == first
    assert pool.cache.insert(two, tokens(0, 12), second) == [*first, second[2]]
    pool.check()
    assert pool.cache.stats.duplicates == 2


def test_leased_pages_survive_eviction():
    pool = Pool(total=8)
    pool.add(tokens(0, 16))
    lease = pool.cache.match(("a",), tokens(0, 8))
    assert pool.cache.evict(8) == 2
    assert pool.cached(tokens(0, 16)) == 8
    assert (pool.cache.protected, pool.cache.evictable) == (2, 0)
    pool.cache.release(lease)
    assert pool.cache.evict(8) == 2


def test_eviction_takes_the_least_recently_used_from_its_tail():
    pool = Pool()
    old, new = tokens(0, 16), tokens(100, 16)
    pool.add(old)
    pool.add(new)
    pool.cache.evict(1)
    assert (pool.cached(old), pool.cached(new)) == (12, 16)
    pool.cache.release(pool.cache.match(("a",), old))  # a use makes it the newest
    pool.cache.evict(4)
    assert (pool.cached(old), pool.cached(new)) == (12, 0)


def flood(pool: Pool, namespace: Namespace, pages: int) -> None:
    """New content of one namespace, which pays for its own room."""
    for i in range(pages // 4):
        lease = pool.cache.match(namespace, [])
        pool.cache.evict(4 - pool.book.available, namespace)
        pool.cache.insert(lease, tokens(1000 * i, 16), pool.book.allocate(4))
        pool.cache.release(lease)
        pool.check()


def test_a_namespace_over_its_share_evicts_its_own_pages():
    pool = Pool(total=64)
    pool.add(tokens(0, 64), ("quiet",))
    flood(pool, ("loud",), 200)
    assert pool.cached(tokens(0, 64), ("quiet",)) == 64


def test_a_namespace_under_its_share_evicts_the_oldest_of_all():
    pool = Pool(total=64)
    pool.add(tokens(0, 64), ("old",))
    flood(pool, ("loud",), 48)
    pool.cache.evict(4, ("new",))
    assert pool.cached(tokens(0, 64), ("old",)) == 48


def test_a_share_that_nobody_uses_is_given_up():
    pool = Pool(total=64)
    pool.add(tokens(0, 64), ("gone",))
    flood(pool, ("loud",), 48 + 4 * 64 + 20)
    assert pool.cached(tokens(0, 64), ("gone",)) == 0


def test_a_probe_changes_nothing():
    pool = Pool()
    pool.add(tokens(0, 16))
    pool.add(tokens(100, 16))
    before = pool.cache.stats
    assert pool.cached(tokens(0, 9)) == 8
    assert pool.cached(tokens(0, 8), ("nobody",)) == 0
    assert pool.cache.stats == before
    pool.cache.evict(4)
    assert pool.cached(tokens(0, 16)) == 0


def test_after_a_flush_leases_stay_valid_and_nothing_is_found():
    pool = Pool()
    pool.add(tokens(0, 16))
    lease = pool.cache.match(("a",), tokens(0, 8))
    pages = pool.cache.pages(lease)
    pool.cache.flush()
    assert pool.cached(tokens(0, 16)) == 0
    assert pool.cache.pages(lease) == pages
    pool.cache.insert(lease, tokens(8, 4), pool.book.allocate(1))
    pool.check()
    pool.add(tokens(0, 8))
    assert pool.cached(tokens(0, 12)) == 8
    pool.cache.release(lease)
    pool.check()
    assert pool.book.available == pool.total - 2


def test_adopted_pages_are_ordinary_hits():
    pool = Pool()
    pool.add(tokens(0, 8))
    assert pool.cache.adopt(("a",), tokens(0, 16), pool.book.allocate(4)) == 2
    pool.check()
    assert pool.cached(tokens(0, 16)) == 16
    assert pool.cache.adopt(("a",), tokens(0, 16), pool.book.allocate(4)) == 0
    pool.check()


def test_a_lease_is_released_once():
    pool = Pool()
    lease = pool.cache.match(("a",), tokens(0, 8))
    pool.cache.release(lease)
    with pytest.raises(AssertionError, match="released once"):
        pool.cache.release(lease)


def test_very_deep_and_very_long_trees_need_no_recursion():
    pool = Pool(total=30_000, page_size=1)
    for depth in range(1, 1_500):
        pool.add([*([7] * depth), 8])
    assert pool.cache.stats.nodes > 2_500
    pool.check()
    assert pool.cached([7] * 4_000) == 1_499
    assert pool.cache.evict(30_000) == 2 * 1_499
    pool.check()


# --------------------------------------------------------------------------------------------------------- the model


class Dictionary:
    """Each page of each prefix as one entry: its page number, its lease count, and an order of release."""

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.page: dict[Key, int] = {}
        self.refs: dict[Key, int] = {}
        self.idle: OrderedDict[Key, None] = OrderedDict()
        self.flushes = 0

    def keys(self, namespace: Namespace, flushes: int, run: list[int]) -> list[Key]:
        ends = range(self.size, len(run) + 1, self.size)
        return [(namespace, flushes, tuple(run[:end])) for end in ends]

    def matched(self, namespace: Namespace, run: list[int]) -> list[Key]:
        return [key for key in self.keys(namespace, self.flushes, run) if key in self.page]

    def hold(self, keys: list[Key]) -> None:
        for key in keys:
            self.refs[key] = self.refs.get(key, 0) + 1
            self.idle.pop(key, None)

    def insert(self, keys: list[Key], pages: list[int]) -> list[int]:
        for key, page in zip(keys, pages, strict=True):
            self.page.setdefault(key, page)
        self.hold(keys)
        return [self.page[key] for key in keys]

    def release(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self.refs[key] -= 1
            if self.refs[key] == 0:
                self.idle[key] = None
                if key[1] != self.flushes:
                    self.drop(key)

    def drop(self, key: Key) -> None:
        del self.idle[key], self.page[key], self.refs[key]

    def evict(self, n: int) -> int:
        gone = list(self.idle)[:n]
        for key in gone:
            self.drop(key)
        return len(gone)

    def flush(self) -> None:
        self.evict(len(self.idle))
        self.flushes += 1


@dataclass
class Held:
    """A lease of the cache beside the same thing in the dictionary."""

    lease: Lease
    namespace: Namespace
    flushes: int
    run: list[int]
    keys: list[Key]


class Twins:
    """Does every operation on both sides and compares."""

    def __init__(self, seed: int, page_size: int, total: int) -> None:
        self.random = random.Random(seed)
        self.size = page_size
        self.book = PageBook(total)
        self.cache = PrefixCache(self.book, page_size)
        self.model = Dictionary(page_size)
        self.held: list[Held] = []

    def step(self) -> None:
        operations = [self.evict, self.adopt]
        if self.held:
            operations += [self.insert] * 4 + [self.release] * 3
        if len(self.held) < 8:
            operations += [self.match] * 3
        if self.random.random() < 0.02:
            operations = [self.flush]
        self.random.choice(operations)()

    def namespace(self) -> Namespace:
        return (self.random.choice("abc"), "")

    def run(self) -> list[int]:
        """Runs of whole pages that often share a beginning, and a ragged end."""
        page = self.random.choice
        pages = [[page([1, 2])] * self.size for _ in range(self.random.randrange(7))]
        return [token for tokens in pages for token in tokens] + [3] * self.random.randrange(self.size)

    def match(self) -> None:
        namespace, run = self.namespace(), self.run()
        limit = self.random.choice([None, self.random.randrange(len(run) + 1)])
        keys = self.model.matched(namespace, run[:limit])
        length = len(keys) * self.size
        assert self.cache.probe(namespace, run, limit) == length
        lease = self.cache.match(namespace, run, limit)
        self.model.hold(keys)
        assert lease.length == length
        self.held.append(Held(lease, namespace, self.model.flushes, run[:length], keys))

    def insert(self) -> None:
        held, run = self.random.choice(self.held), self.run()
        run = run[: len(run) // self.size * self.size]
        if len(held.run) + len(run) > 12 * self.size or len(run) // self.size > self.book.available:
            return
        pages = self.book.allocate(len(run) // self.size)
        held.run = held.run + run
        keys = self.model.keys(held.namespace, held.flushes, held.run)
        kept = self.model.insert(keys[len(held.keys) :], pages)
        held.keys = keys
        assert self.cache.insert(held.lease, run, pages) == kept

    def release(self) -> None:
        held = self.held.pop(self.random.randrange(len(self.held)))
        assert self.cache.pages(held.lease) == [self.model.page[key] for key in held.keys]
        self.cache.release(held.lease)
        self.model.release(held.keys)

    def evict(self) -> None:
        n = self.random.randrange(1, 6)
        assert self.cache.evict(n) == self.model.evict(n)

    def adopt(self) -> None:
        namespace, run = self.namespace(), self.run()
        run = run[: len(run) // self.size * self.size]
        if len(run) // self.size <= self.book.available:
            pages = self.book.allocate(len(run) // self.size)
            keys = self.model.keys(namespace, self.model.flushes, run)
            known = sum(key in self.model.page for key in keys)
            self.model.insert(keys, pages)
            self.model.release(keys)
            assert self.cache.adopt(namespace, run, pages) == len(pages) - known

    def flush(self) -> None:
        self.cache.flush()
        self.model.flush()

    def check(self) -> None:
        pages = self.cache.check()
        self.book.check(pages, [])
        assert sorted(pages) == sorted(self.model.page.values())
        assert self.cache.evictable == len(self.model.idle)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_cache_equals_a_dictionary_over_random_operations(page_size: int):
    for seed, total in enumerate((12, 24, 40)):
        twins = Twins(seed, page_size, total)
        for _ in range(12_000):
            twins.step()
            twins.check()
        while twins.held:
            twins.release()
        twins.cache.flush()
        assert twins.book.available == total
        assert twins.cache.stats.namespaces == 0
