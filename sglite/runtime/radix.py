"""The prefix cache: a radix tree over page-sized runs of token ids, one tree per namespace.

Every node holds a run of whole pages. A lease counts one reference on each node of its path, so a parent has at least
as many references as any child. Unreferenced nodes wait in line to be evicted (``runtime/idle.py``). With ``tails`` a
node also has pages that are not full (``runtime/tails.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sglite.runtime.idle import IdleNodes
from sglite.runtime.pages import PageBook
from sglite.runtime.tails import most_alike, superseded
from sglite.runtime.tree import CacheStats, Lease, Namespace, Node, Space, check_node, key, walk

STALE = 4
"""A namespace not looked up while so many times the pool's pages were inserted is no longer protected from others."""


class PrefixCache:
    """Pages come from ``book`` and return to it; a page given to the tree is the tree's to free.

    ``tails``: whether pages that are not full are kept and found; whoever matches must be able to copy pages.
    """

    def __init__(self, book: PageBook, page_size: int, *, tails: bool = False) -> None:
        assert page_size >= 1
        self.page_size = page_size
        self.tails = tails and page_size > 1
        self._book = book
        self._spaces: dict[Namespace, Space] = {}
        self._flushed: list[Space] = []
        self._idle = IdleNodes()
        self._leases = 0
        self._pages = 0
        self._nodes = 0
        self._inserted = 0
        self._duplicates = 0
        self._evicted = 0
        self._matches = 0
        self._steps = 0
        """Nodes on the paths of all leases that were given."""

    @property
    def evictable(self) -> int:
        """Pages that ``evict`` could free now."""
        return self._idle.pages

    @property
    def protected(self) -> int:
        """Pages that some lease keeps."""
        return self._pages - self.evictable

    @property
    def stats(self) -> CacheStats:
        return CacheStats(
            evictable=self.evictable,
            protected=self.protected,
            nodes=self._nodes,
            namespaces=len(self._spaces),
            leases=self._leases,
            inserted=self._inserted,
            duplicates=self._duplicates,
            evicted=self._evicted,
            depth=self._steps / self._matches if self._matches else 0.0,
        )

    # ------------------------------------------------------------------------------------------------------- reading

    def match(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> Lease:
        """Lease the longest cached prefix of ``tokens[:limit]`` in whole pages (perhaps none: length 0)."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = Space(namespace)
        space.used = self._inserted
        node, length, inside = self._descend(space.root, self._whole(tokens, limit))
        if inside:
            node = self._split(node, inside)
        self._matches += 1
        self._steps += self._hold(node, None) - 1
        self._leases += 1
        lease = Lease(node, length)
        if self.tails:
            end = min(self._end(tokens, limit), length + self.page_size)
            lease.begun = self._begun(node, tokens[length:end])
        return lease

    def probe(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> int:
        """How long a lease ``match`` would give, leaving everything as it is."""
        space = self._spaces.get(namespace)
        return self._descend(space.root, self._whole(tokens, limit))[1] if space else 0

    def path(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> tuple[int, ...]:
        """Names of the nodes that ``probe`` goes through, from the root on; they mean nothing after the next change."""
        space, names = self._spaces.get(namespace), list[int]()
        node = self._descend(space.root, self._whole(tokens, limit))[0] if space else None
        while node is not None and node.parent is not None:
            names.append(id(node))
            node = node.parent
        return tuple(reversed(names))

    def pages(self, lease: Lease, start: int = 0) -> list[int]:
        """The pages of positions ``[start, lease.length)``; ``start`` is a multiple of the page size."""
        node, end, parts = lease.node, lease.length, []
        while end > start:
            assert node is not None
            parts.append(node.pages)
            end -= len(node.tokens)
            node = node.parent
        pages = [page for part in reversed(parts) for page in part]
        return pages[(start - end) // self.page_size :]

    # ------------------------------------------------------------------------------------------------------- writing

    def insert(self, lease: Lease, tokens: Sequence[int], pages: list[int]) -> list[int]:
        """Give the tree the pages of the ``tokens`` that follow the lease, and grow the lease over them.

        Returns the pages that hold these tokens from now on. They differ from ``pages`` where the tree already had
        some of the tokens: the given duplicates are then free again.
        """
        start, run, new = lease.node, array("i", tokens), array("i", pages)
        assert start is not None, "the lease is released"
        assert len(run) == len(new) * self.page_size, "whole pages only"
        node, known, inside = self._descend(start, run)
        if inside:
            node = self._split(node, inside)
        self._hold(node, start)
        duplicates = new[: known // self.page_size]
        if known < len(run):
            node = self._append(node, run[known:], new[known // self.page_size :])
        lease.node = node
        lease.length += len(run)
        self._duplicates += len(duplicates)
        self._book.free(duplicates)
        return self.pages(lease, lease.length - len(run)) if duplicates else pages

    def add_tail(self, lease: Lease, tokens: Sequence[int], page: int) -> bool:
        """Give the tree a page that is not full, of the ``tokens`` that follow the lease.

        False, and the page stays the caller's, if it would add nothing.
        """
        node, run = lease.node, array("i", tokens)
        assert node is not None and self.tails and 0 < len(run) < self.page_size
        known = self._begun(node, tokens)
        if not node.space.alive or (known is not None and known[1] == len(run)):
            return False
        for old in superseded(node, run):
            self._trim(old, 1)
        tail = Node(node.space, node, run, array("i", [page]), 0)
        node.tails[run.tobytes()] = tail
        self._count(node.space, 1)
        self._nodes += 1
        self._retire(tail)
        return True

    def release(self, lease: Lease) -> None:
        """End a lease. What nobody else leases becomes evictable, or free at once if it was flushed meanwhile."""
        last = lease.node
        assert last is not None, "a lease is released once"
        start = None if lease.spent is None or not last.space.alive else lease.spent - lease.spent % self.page_size
        if start is not None:
            self._cut(last, lease.length, start)
        lease.node = None
        self._leases -= 1
        self._let_go(last)
        exposed = 0 if start is None else self._expose(last, lease.length, start)
        self._forget_if_empty(last.space)
        if lease.dropped:
            self.evict(exposed)

    def adopt(self, namespace: Namespace, tokens: Sequence[int], pages: list[int]) -> int:
        """Take in KV computed elsewhere: ``pages`` hold all of ``tokens``. Returns how many pages were news."""
        lease = self.match(namespace, tokens)
        known = lease.length // self.page_size
        self._book.free(pages[:known])
        self.insert(lease, tokens[lease.length :], pages[known:])
        self.release(lease)
        return len(pages) - known

    def evict(self, n: int, payer: Namespace | None = None) -> int:
        """Free up to ``n`` pages, least recently released first and from the tail on; how many it were.

        If the ``payer`` has more than its share of the tree, its own go before those of others, as long as the others
        still use theirs.
        """
        freed, space = 0, self._spaces.get(payer) if payer is not None else None
        while freed < n and self._idle:
            freed += self._trim(self._victim(space), n - freed)
        self._evicted += freed
        return freed

    def _victim(self, payer: Space | None) -> Node:
        oldest = self._idle.first
        if payer is None or not payer.idle or payer.pages * len(self._spaces) <= self._pages:
            return oldest
        stale = oldest.space.used + STALE * self._book.total < self._inserted
        return oldest if stale else next(iter(payer.idle))

    def flush(self) -> None:
        """Forget everything. Leases stay valid, but nothing of theirs is found again or kept after their release."""
        self.evict(self.evictable)
        for space in self._spaces.values():
            space.alive = False
        self._flushed += self._spaces.values()
        self._spaces = {}

    # ------------------------------------------------------------------------------------------------------ the tree

    def _end(self, tokens: Sequence[int], limit: int | None) -> int:
        return len(tokens) if limit is None else max(0, min(limit, len(tokens)))

    def _whole(self, tokens: Sequence[int], limit: int | None) -> array[int]:
        length = self._end(tokens, limit)
        return array("i", tokens[: length - length % self.page_size])

    def _descend(self, node: Node, run: array[int]) -> tuple[Node, int, int]:
        """Follow ``run`` down from ``node``: where it ends, the tokens matched, and how many of the last node's
        tokens they include if not all (else 0)."""
        size, matched = self.page_size, 0
        while child := node.children.get(run[matched : matched + size].tobytes()):
            shared = self._shared(child.tokens, run, matched)
            node, matched = child, matched + shared
            if shared < len(child.tokens):
                return node, matched, shared
        return node, matched, 0

    def _shared(self, tokens: array[int], run: array[int], at: int) -> int:
        """Length of the common prefix of ``tokens`` and ``run[at:]`` in whole pages; their first page is equal."""
        size = self.page_size
        length = min(len(tokens), len(run) - at)
        if tokens[:length] == run[at : at + length]:
            return length
        equal, unequal = size, length
        while unequal - equal > size:
            middle = equal + (unequal - equal) // (2 * size) * size
            if tokens[equal:middle] == run[at + equal : at + middle]:
                equal = middle
            else:
                unequal = middle
        return equal

    def _begun(self, node: Node, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The page below ``node`` that begins most like ``tokens``, and for how long."""
        best, longest = most_alike(node, tokens)
        if best is None:
            return None
        if len(best.tokens) < self.page_size:
            self._idle.touch(best)
        return best.pages[0], longest

    def _count(self, space: Space, pages: int) -> None:
        space.pages += pages
        self._pages += pages
        self._inserted += pages

    def _split(self, node: Node, inside: int) -> Node:
        """Cut a node after ``inside`` tokens; the new upper part is returned.

        The lower part keeps its identity, since leases point at the end of a run.
        """
        parent, cut = node.parent, inside // self.page_size
        assert parent is not None
        upper = Node(node.space, parent, node.tokens[:inside], node.pages[:cut], node.refs)
        node.tokens, node.pages, node.parent = node.tokens[inside:], node.pages[cut:], upper
        parent.children[key(upper, self.page_size)] = upper
        upper.children[key(node, self.page_size)] = node
        if upper.refs == 0:
            self._idle.cut(upper)
        self._nodes += 1
        return upper

    def _append(self, node: Node, tokens: array[int], pages: array[int]) -> Node:
        """New content below ``node`` for the one lease that ends there."""
        self._count(node.space, len(pages))
        if node.refs == 1 and not node.children and not node.tails and node.parent is not None:
            node.tokens.extend(tokens)
            node.pages.extend(pages)
            return node
        child = Node(node.space, node, tokens, pages, 1)
        node.children[key(child, self.page_size)] = child
        self._nodes += 1
        return child

    def _hold(self, node: Node, above: Node | None) -> int:
        """Count one more lease on the path from ``node`` up to, and without, ``above``; how many nodes these are."""
        step: Node | None = node
        count = 0
        while step is not above:
            assert step is not None
            if step.refs == 0 and step.parent is not None:
                self._idle.remove(step)
            step.refs += 1
            step = step.parent
            count += 1
        return count

    def _retire(self, node: Node) -> None:
        self._idle.add(node)
        if not node.space.alive:
            self._trim(node, len(node.pages))

    def _let_go(self, node: Node) -> None:
        """Count one lease less on the path up from ``node``."""
        while node.parent is not None:
            parent = node.parent
            node.refs -= 1
            if node.refs == 0:
                self._retire(node)
            node = parent
        node.refs -= 1

    def _cut(self, node: Node, end: int, at: int) -> None:
        """Have a node of its own begin at a position of the path that ends at another, if only one lease is on it."""
        while node.parent is not None and end - len(node.tokens) > at:
            end -= len(node.tokens)
            node = node.parent
        inside = at - (end - len(node.tokens))
        if node.refs == 1 and 0 < inside < len(node.tokens):
            self._split(node, inside)

    def _expose(self, node: Node, end: int, start: int) -> int:
        """Put the idle path up from a leaf that ends at one position to another, as far as nothing else hangs on it,
        first in line for eviction. Returns how many pages these are."""
        tail: list[Node] = []
        while node.parent is not None and node.refs == 0 and len(node.children) == (1 if tail else 0):
            end -= len(node.tokens)
            if end < start:
                break
            tail.append(node)
            node = node.parent
        first = [each for node in reversed(tail) for each in (node, *node.tails.values())]
        self._idle.prefer(first)
        return sum([len(each.pages) for each in first])

    def _trim(self, node: Node, n: int) -> int:
        """Free up to ``n`` pages from the end of an idle leaf; with the last one the leaf goes."""
        assert not node.children and not node.tails, "an idle node is preceded by its descendants"
        n = min(n, len(node.pages))
        self._pages -= n
        node.space.pages -= n
        self._book.free(node.pages[-n:])
        if n == len(node.pages):
            self._unlink(node)
        else:
            self._idle.pages -= n
            del node.pages[-n:]
            del node.tokens[-n * self.page_size :]
        return n

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        self._idle.remove(node)
        siblings = node.parent.tails if len(node.tokens) < self.page_size else node.parent.children
        del siblings[key(node, self.page_size)]
        self._nodes -= 1
        self._forget_if_empty(node.space)

    def _forget_if_empty(self, space: Space) -> None:
        if space.root.refs or space.root.children or space.root.tails:
            return
        if space.alive:
            del self._spaces[space.name]
        else:
            self._flushed.remove(space)

    # -------------------------------------------------------------------------------------------------------- checks

    def check(self) -> list[int]:
        """Assert every invariant, in time of the tree's size. Returns the tree's pages, for ``PageBook.check``."""
        nodes = list(walk([*self._spaces.values(), *self._flushed]))
        for node in nodes:
            check_node(node, self.page_size)
        inner = [node for node in nodes if node.parent is not None]
        pages = [page for node in inner for page in node.pages]
        idle = [node for node in inner if node.refs == 0]
        assert set(idle) == set(self._idle), "idle is exactly the unreferenced nodes"
        for space in self._spaces.values():
            assert list(space.idle) == [node for node in self._idle if node.space is space], "and in the same order"
            assert space.pages == sum(len(node.pages) for node in inner if node.space is space)
        assert self.evictable == sum(len(node.pages) for node in idle)
        assert (self._pages, self._nodes) == (len(pages), len(inner))
        assert self._leases == sum(node.refs for node in nodes if node.parent is None)
        return pages
