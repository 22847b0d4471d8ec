"""The scheduler's world without a model: clients that come, leave and read slowly, faults, and a reference beside it.

The reference knows nothing of the radix tree's nodes, leases or evictions. It keeps, in plain dictionaries, which
page every row of a plan was given, and which prefixes were ever computed since the last flush; from these it says
how many pages must be free, which hits can be true, and what every finished answer must read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fake_engine import FakeEngine, answer

from sglite.errors import OverloadedError
from sglite.protocol import ProgramInfo
from sglite.runtime.plan import Plan
from sglite.runtime.sequence import Sequence

UNREAD = 12
"""Tokens that may wait for a slow reader before it is aborted."""
Prefix = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(eq=False)
class Client:
    """One request and whoever reads its answer: ``pace`` tokens a step."""

    sequence: Sequence
    pace: float
    read: float = 0.0

    @property
    def unread(self) -> float:
        return self.sequence.output_length - self.read


@dataclass
class Reference:
    """Plain dictionaries: ``tables`` from slots to pages, ``known`` all prefixes of whole pages computed so far."""

    page_size: int
    tables: dict[int, list[int]] = field(default_factory=dict)
    known: set[Prefix] = field(default_factory=set)

    def plan(self, plan: Plan, engine: FakeEngine) -> None:
        """What a row starts from must have been computed by somebody of its namespace since the last flush."""
        for row in plan.rows:
            sequence = engine.scheduler.sequence(row.slot)
            assert sequence is not None
            if row.reset:
                self.tables[row.slot] = []
                for end in range(self.page_size, row.start + 1, self.page_size):
                    prefix = (sequence.namespace, tuple(sequence.tokens[:end]))
                    assert prefix in self.known, "a hit on what was never computed"
            self.tables[row.slot] += row.new_pages

    def computed(self, plan: Plan, engine: FakeEngine) -> None:
        for row in plan.rows:
            sequence = engine.scheduler.sequence(row.slot)
            if sequence is not None:
                first = row.start // self.page_size * self.page_size + self.page_size
                for end in range(first, row.stop + 1, self.page_size):
                    self.known.add((sequence.namespace, tuple(sequence.tokens[:end])))

    def check(self, engine: FakeEngine) -> None:
        """``free + in tree + held == total``, with the held ones counted from the plans alone."""
        tree = set(engine.cache.check()) if engine.cache else set()
        held: set[int] = set()
        for sequence in engine.scheduler.running:
            told = bool(sequence.tabled)  # else its pages were exchanged for the tree's, and the next plan will tell
            table = self.tables[sequence.slot] if told else sequence.pages
            own = set(table[: len(sequence.pages)]) - tree
            assert not own & held, "a page with two owners"
            held |= own
        assert engine.book.available + len(tree) + len(held) == engine.book.total

    def flush(self, engine: FakeEngine) -> None:
        """Running sequences publish what they computed once more when they leave: those prefixes stay true."""
        live = {s.namespace: [] for s in engine.scheduler.running}  # type: ignore[var-annotated]
        for sequence in engine.scheduler.running:
            live[sequence.namespace].append(tuple(sequence.tokens[: sequence.computed]))
        self.known = {
            (namespace, prefix)
            for namespace, runs in live.items()
            for run in runs
            for end in range(self.page_size, len(run) + 1, self.page_size)
            for prefix in [run[:end]]
        }


class World:
    """``choose(n)`` gives a number below n: Hypothesis in the tests, a seeded generator in the long run."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.steps = self.finished = self.aborted = self.refused = self.kills = 0
        self.clients: list[Client] = []
        self.parents: list[list[int]] = [[1] * 8, [1] * 6 + [2] * 14, [3]]
        self.begin()

    def pick(self, *options: object) -> object:
        return options[self.choose(len(options))]

    def begin(self) -> None:
        """A fresh engine, as after a worker's death: nothing of the old one is left."""
        self.engine = FakeEngine(
            pages=self.pick(12, 30, 80),  # type: ignore[arg-type]
            page_size=self.pick(1, 4, 4, 16),  # type: ignore[arg-type]
            cached=self.choose(5) > 0,
            policy=self.pick("fcfs", "longest-prefix", "program"),
            max_running=self.pick(1, 3, 8),
            max_step_tokens=self.pick(5, 16, 64),
            max_queue=12,
        )
        self.pool = self.engine.book.total * self.engine.page_size
        self.reference = Reference(self.engine.page_size)

    # ---- what may happen ---------------------------------------------------------------------------------------

    def submit(self) -> None:
        prompt = [*self.parents[self.choose(len(self.parents))], *[self.choose(2)] * (1 + self.choose(12))]
        prompt = prompt[-(self.pool - 1) :]
        room = min(30, self.pool - len(prompt))
        pace = self.pick(9.0, 9.0, 9.0, 1.0, 0.2)
        assert isinstance(pace, float)
        try:
            sequence = self.engine.submit(
                prompt,
                self.choose(room + 1),
                namespace="" if self.choose(3) else "x",
                priority=int(self.choose(6) == 0),
                program=ProgramInfo("abcd"[self.choose(4)], "", self.choose(5) == 0) if self.choose(2) else None,
            )
        except OverloadedError:
            self.refused += 1
            return
        self.clients.append(Client(sequence, pace))

    def abort(self) -> None:
        if self.clients:
            self.leave(self.clients[self.choose(len(self.clients))])

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        self.engine.scheduler.release(client.sequence, keep=self.choose(4) > 0)
        self.aborted += 1

    def flush(self) -> None:
        self.engine.scheduler.flush()
        self.reference.flush(self.engine)

    def end_program(self) -> None:
        self.engine.scheduler.end_program("", "abcd"[self.choose(4)])

    def kill(self) -> None:
        """The process is gone, and with it every request: each client is told once, which is all that is left."""
        self.kills += 1
        self.aborted += len(self.clients)
        self.clients.clear()
        self.begin()

    def step(self) -> None:
        """One step of the engine: every tenth or so is hit by an abort or a failure between plan and commit."""
        scheduler, fate = self.engine.scheduler, self.choose(40)
        plan = scheduler.plan()
        self.reference.plan(plan, self.engine)
        if not plan.rows:
            assert scheduler.idle, "somebody waits, and nothing happens"
            return
        self.steps += 1
        self.engine.forward(plan)
        if fate in (1, 2):
            self.abort()
        if fate == 3:
            self.fail()
        else:
            self.reference.computed(plan, self.engine)
            scheduler.commit(plan)
            self.engine.sample(plan)
        self.read()
        scheduler.check()
        self.reference.check(self.engine)

    def fail(self) -> None:
        failed = set(self.engine.scheduler.fail())
        gone = [client for client in self.clients if client.sequence in failed]
        self.clients = [client for client in self.clients if client.sequence not in failed]
        self.aborted += len(gone)

    def read(self) -> None:
        """Readers take what they can; whoever is too far behind is aborted; finished answers are what they must be."""
        done = set(self.engine.finished)
        for client in list(self.clients):
            if client.sequence in done:
                self.finish(client)
                continue
            client.read = min(client.sequence.output_length, client.read + client.pace)
            if client.unread > UNREAD:
                self.leave(client)
        self.engine.finished.clear()

    def finish(self, client: Client) -> None:
        one = client.sequence
        assert one.tokens == answer(one.namespace, one.tokens[: one.prompt_length], one.output_length)
        self.clients.remove(client)
        self.finished += 1
        self.parents = [*self.parents[-5:], one.tokens[:60]]
        self.engine.logits.pop(one, None)

    def drain(self) -> None:
        """Everybody ends, and every page comes back."""
        for _ in range(5_000):
            if self.engine.scheduler.idle:
                break
            self.step()
        assert self.engine.scheduler.idle and not self.clients
        self.flush()
        assert self.engine.book.available == self.engine.book.total
