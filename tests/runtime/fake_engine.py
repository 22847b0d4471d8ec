"""An engine without a model: its KV cells hold a digest of all tokens up to their position.

So a cell that was computed for another prefix, overwritten, or read through a stale page table is noticed at once, and
the token a row samples (a function of its last cell) is wrong if anything before it was.
"""

from __future__ import annotations

from itertools import accumulate

from sglite.protocol import GenerateRequest, ProgramInfo, Tokens
from sglite.runtime.pages import PageBook
from sglite.runtime.plan import Plan, Row
from sglite.runtime.radix import PrefixCache
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.sequence import Sequence

VOCABULARY = 5


def sequence(
    tokens: list[int],
    max_new: int = 8,
    *,
    namespace: str = "",
    priority: int = 0,
    score_from: int | None = None,
    program: ProgramInfo | None = None,
) -> Sequence:
    request = GenerateRequest("r", (Tokens(tuple(tokens)),), namespace=namespace, priority=priority, program=program)
    return Sequence(request, list(tokens), len(tokens), len(tokens) + max_new, score_from=score_from)


def digests(namespace: tuple[str, ...], tokens: list[int]) -> list[int]:
    """What the cells of a sequence must hold, position by position."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=hash(len(namespace[0]))))[1:]


def next_token(digest: int) -> int:
    return digest % VOCABULARY


def answer(namespace: tuple[str, ...], prompt: list[int], n: int) -> list[int]:
    """The prompt with what the fake model says to it."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(digests(namespace, tokens)[-1]))
    return tokens


class FakeEngine:
    """Scheduler, pool and page tables. ``step`` does what an engine does, and asserts what a model would need."""

    def __init__(
        self, *, pages: int = 64, page_size: int = 4, cached: bool = True, tails: bool = False, **options: object
    ) -> None:
        self.page_size = page_size
        self.book = PageBook(pages)
        self.cache = PrefixCache(self.book, page_size, tails=tails) if cached else None
        self.scheduler = Scheduler(self.book, self.cache, page_size=page_size, **options)  # type: ignore[arg-type]
        self.tables: dict[int, list[int]] = {}
        self.cells = [[0] * page_size for _ in range(pages)]
        self.logits: dict[Sequence, list[int]] = {}
        """Positions whose logits each sequence was given."""
        self.finished: list[Sequence] = []

    def submit(self, *args: object, **kwargs: object) -> Sequence:
        submitted = sequence(*args, **kwargs)  # type: ignore[arg-type]
        self.scheduler.submit(submitted)
        return submitted

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        if plan.rows:
            self.forward(plan)
            self.scheduler.commit(plan)
            self.sample(plan)
        return plan

    def run(self, most: int = 10_000) -> list[Plan]:
        """Steps until nobody is left."""
        plans = []
        while not self.scheduler.idle:
            plans.append(self.step())
            assert plans[-1].rows, "somebody waits, and nothing happens"
            assert len(plans) <= most, "too many steps"
        return plans

    def forward(self, plan: Plan) -> None:
        shared = set(self.cache.check()) if self.cache else set()
        written: set[tuple[int, int]] = set()
        copies = {row.slot: list(self.cells[row.copied]) for row in plan.rows if row.copied >= 0}
        for row in plan.rows:
            self.update_table(row)
            if row.copied >= 0:
                page, offset = self.cell(row.slot, row.start)
                assert page in row.new_pages and page not in shared and offset > 0
                self.cells[page] = copies[row.slot]
            cells = {self.cell(row.slot, position) for position in range(row.start, row.stop)}
            assert not cells & written, "two rows write one cell"
            assert not {page for page, _ in cells} & shared, "a row writes into the tree"
            written |= cells
            self.write(row)
        for row in plan.rows:
            self.assert_history(row)

    def update_table(self, row: Row) -> None:
        if row.reset:
            self.tables[row.slot] = []
        self.tables[row.slot] += row.new_pages

    def cell(self, slot: int, position: int) -> tuple[int, int]:
        return self.tables[slot][position // self.page_size], position % self.page_size

    def write(self, row: Row) -> None:
        sequence = self.scheduler.sequence(row.slot)
        assert sequence is not None
        assert row.start == sequence.computed
        assert list(row.ids) == sequence.tokens[row.start : row.stop]
        expected = digests(sequence.namespace, sequence.tokens)
        for position in range(row.start, row.stop):
            page, offset = self.cell(row.slot, position)
            self.cells[page][offset] = expected[position]

    def history(self, row: Row) -> list[int]:
        cells = [cell for page in self.tables[row.slot] for cell in self.cells[page]]
        return cells[: row.stop]

    def assert_history(self, row: Row) -> None:
        sequence = self.scheduler.sequence(row.slot)
        assert sequence is not None
        assert self.history(row) == digests(sequence.namespace, sequence.tokens)[: row.stop]

    def sample(self, plan: Plan) -> None:
        for row in plan.rows:
            sequence = self.scheduler.sequence(row.slot)
            if sequence is None:
                continue
            self.logits.setdefault(sequence, []).extend(range(row.stop - row.logits, row.stop))
            if row.stop < len(sequence.tokens):
                continue
            assert row.logits >= 1
            if len(sequence.tokens) < sequence.limit:
                sequence.tokens.append(next_token(self.history(row)[-1]))
            if len(sequence.tokens) == sequence.limit:
                self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence)
        self.finished.append(sequence)
