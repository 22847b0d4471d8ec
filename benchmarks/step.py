"""Where does a decode step's time go? The real model, each part by name.

    python benchmarks/step.py                    # one minute on a quiet machine
    python benchmarks/step.py --weights int4

First table: decode steps of 1, 8 and 32 requests; microseconds of a step by part, a part's without the parts inside of
it. Kernels are the decoder stack, the head and the choice of tokens. The last column has 100,000 nodes in the tree and
1,000 requests waiting. Second: what the tree costs where nothing is reused (prompts of 200 tokens, 32 of output, 32 at
once), and what overlap wins; both against the same work without, in turns, the least of three.
Writes ``step.json`` beside this file.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from functools import wraps
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

import sglite as sgl
from sglite.protocol import GenerateRequest, SamplingParams, Tokens
from sglite.runtime import assembly
from sglite.runtime.config import config_from

KERNELS = ("decoder", "head", "choose")
SCHEDULING = ("plan", "commit", "release", "publish", "flush")
"""What the issue calls tree, scheduler and output."""


class Clock:
    """Seconds by part; a part within a part counts for itself alone."""

    def __init__(self):
        self.seconds, self.calls = Counter(), Counter()
        self._inside = [0.0]

    def timed(self, name, work):
        @wraps(work)
        def wrapped(*args, **kwargs):
            began, within = time.perf_counter(), len(self._inside)
            self._inside.append(0.0)
            try:
                return work(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.seconds[name] += spent - self._inside.pop()
                self._inside[within - 1] += spent
                self.calls[name] += 1

        return wrapped

    def clear(self):
        self.seconds.clear()
        self.calls.clear()


class Timed:
    """An engine whose parts are timed: ``with Timed(**options) as timed: timed.decode(...)``."""

    def __init__(self, **options):
        self.clock, self.ids = Clock(), count()
        parts = assembly.build(config_from(options))
        core, scheduler, run = parts.core, parts.core.scheduler, parts.core._runner
        model = run.model
        self._wrap(core, "step", "core")
        self._wrap(core, "_publish", "publish")
        for name in ("plan", "commit", "release"):
            self._wrap(scheduler, name, name)
        self._wrap(run, "forward", "forward")
        self._wrap(run, "sample", "sample")
        self._wrap(model, "_run", "decoder")
        self._wrap(model, "logits", "head")
        self._wrap(run, "_choose", "choose")
        self._wrap(run, "_batch", "batch")
        self.core, self.engine = core, sgl.Engine.of(parts)
        self._wrap(self.engine._thread.outbox, "flush", "flush")

    def _wrap(self, owner, attribute, name):
        setattr(owner, attribute, self.clock.timed(name, getattr(owner, attribute)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    async def one(self, prompt, new):
        params = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)
        async for _ in self.engine.generate(GenerateRequest(f"r{next(self.ids)}", (Tokens(prompt),), params)):
            pass

    def decode(self, batch, new, prompt=16):
        """Seconds of a step, and its parts', where so many requests decode."""
        return asyncio.run(self._decode(batch, new, prompt))

    async def _decode(self, batch, new, prompt):
        await self.engine.flush_cache()
        began, steps = self.start()
        await asyncio.gather(*[self.one(tokens(next(self.ids), prompt), new) for _ in range(batch)])
        return self.parts(began, steps)

    def crowded(self, nodes=100_000, waiting=1000, steps=100):
        """The same of 32 requests beside so many nodes and so many that wait."""
        self.grow_tree(nodes)
        return asyncio.run(self._crowded(waiting, steps))

    def grow_tree(self, nodes):
        """Nodes over pages that the pool does not have: nobody will ever look at their contents."""
        ledger, rng = self.core.scheduler._ledger, random.Random(0)
        book, cache = ledger._book, ledger._cache
        pool = book.total
        while cache.stats.nodes < nodes:
            stem = [rng.randrange(40_000) for _ in range(48)]
            for leaf in range(8):
                pages = list(range(book.total, book.total + 4))
                book.total += 4
                book._taken += bytes([1] * 4)
                cache.adopt(("", ""), [*stem, *[leaf] * 16], pages)
        book._free = [page for page in book._free if page < pool]

    async def _crowded(self, waiting, steps):
        most = self.engine.config.max_running
        calls = [asyncio.create_task(self.one(tokens(next(self.ids), 16), 2000)) for _ in range(most + waiting)]
        while self.core.scheduler.waiting < waiting:
            await asyncio.sleep(0.05)
        began, first = self.start()
        while self.core.times.steps < first + steps:
            await asyncio.sleep(0.05)
        parts = self.parts(began, first)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return parts

    def start(self):
        self.clock.clear()
        return time.perf_counter(), self.core.times.steps

    def parts(self, began, first):
        wall, steps = time.perf_counter() - began, self.core.times.steps - first
        parts = {name: seconds / steps for name, seconds in self.clock.seconds.items()}
        return {"step": wall / steps, **parts, "between steps": wall / steps - sum(parts.values())}


def tokens(i, n):
    return tuple((i * 7919 + k * 31) % 40_000 + 100 for k in range(n))


def share(parts, group):
    return sum(parts.get(part, 0.0) for part in group) / parts["step"]


def by_part(options):
    with Timed(**options, max_running=32) as timed:
        timed.decode(4, 32)
        columns = {
            f"batch {batch}": min((timed.decode(batch, new) for _ in range(3)), key=lambda parts: parts["step"])
            for batch, new in ((1, 128), (8, 64), (32, 64))
        }
        columns["32, crowded"] = timed.crowded()
    return columns


def in_turns(work, one, other, rounds=3):
    """The least step of either, with its parts."""
    tries = [(work(one), work(other)) for _ in range(rounds)]
    return [min(column, key=lambda parts: parts["step"]) for column in zip(*tries, strict=True)]


def alternatives(options):
    rows = {}
    with Timed(**options) as usual, Timed(**options, overlap=True) as overlapped:
        for batch, new in ((1, 128), (8, 64), (32, 64)):
            off, on = in_turns(lambda timed, b=batch, n=new: timed.decode(b, n), usual, overlapped)
            rows[f"overlap, batch {batch}"] = {"without": off["step"], "with": on["step"]}
    with Timed(**options, max_running=32) as tree, Timed(**options, max_running=32, prefix_cache=False) as bare:
        on, off = in_turns(lambda timed: timed.decode(64, 32, 200), tree, bare)
        rows["tree, nothing reused"] = {"without": off["step"], "with": on["step"]}
        spent = [share(parts, ("plan", "commit", "release")) * parts["step"] for parts in (on, off)]
        rows["of that in the scheduler"] = {"without": spent[1], "with": spent[0]}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="int8")
    options = vars(parser.parse_args())
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = by_part(options)
    table = Table("µs a step", *columns)
    for name in columns["batch 1"]:
        table.add_row(name, *[f"{parts.get(name, 0.0) * 1e6:,.0f}" for parts in columns.values()])
    for name, group in (("kernels", KERNELS), ("tree, scheduler, output", SCHEDULING)):
        shares = [share(parts, group) for parts in columns.values()]
        table.add_row(name, *[f"{each:.1%}" for each in shares], style="bold")
    spent = [share(parts, SCHEDULING) * parts["step"] * 1e6 for parts in columns.values()]
    table.add_row("µs of that", *[f"{each:,.0f}" for each in spent], style="bold")
    console.print(table)
    rows = alternatives(options)
    table = Table("µs a step", "without", "with", "ratio")
    for name, row in rows.items():
        ratio = row["with"] / row["without"]
        table.add_row(name, *[f"{row[how] * 1e6:,.0f}" for how in ("without", "with")], f"{ratio:.3f}")
    console.print(table)
    results = {**options, "parts": columns, "alternatives": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
