"""Who holds which page of the KV pool: a fixed number of pages, each free or handed out once."""

from __future__ import annotations

from collections.abc import Iterable


class PageBook:
    """Pages ``0 .. total - 1``. Handed out last-freed first, so a run of steps is reproducible."""

    def __init__(self, total: int) -> None:
        assert total >= 1, "a pool needs at least one page"
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._taken = bytearray(total)

    @property
    def available(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """``n`` free pages; whoever asks has made sure that there are as many."""
        assert 0 <= n <= len(self._free), f"{n} pages wanted, {len(self._free)} free"
        if n == 0:
            return []
        pages = self._free[-n:]
        del self._free[-n:]
        for page in pages:
            self._taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back. Their contents may still be read by steps planned before this call, and by none after."""
        for page in pages:
            assert self._taken[page], f"page {page} freed twice"
            self._taken[page] = 0
            self._free.append(page)

    def check(self, tree: Iterable[int], private: Iterable[int]) -> None:
        """Free, tree and private pages together are all pages, and none appears twice."""
        held = [*self._free, *tree, *private]
        assert len(held) == self.total, f"{len(held)} pages accounted for, {self.total} exist"
        assert len(set(held)) == self.total, "a page has two owners"
        assert self._taken.count(1) == self.total - len(self._free), "the free list and the taken marks disagree"
