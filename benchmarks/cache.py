"""How much work does the prefix cache save, compared with what could be saved? Scripted traces, no model, no torch.

    python benchmarks/cache.py            # both tables, about three minutes on a quiet machine
    python benchmarks/cache.py shapes     # the first one; or: agents

First table: batches of programs with the sharing of the SGLang paper's workloads, 32 at once. The offline optimum takes
each position of the tree of all prompts once, to the token, as a depth-first order over an unlimited cache does.
Second table: 200 agents with tool gaps and a pool for 30% of what they would use at most. Bélády's optimum knows the
future: it sees the same calls in the same order, and evicts the page that is needed last. It finds whole pages, as a
page is what can be evicted, and so do we there.
Writes ``cache.json`` beside this file after each row.
"""

import argparse
import heapq
import json
import random
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from simulation import PAGE_SIZE, Simulation, sequence
from traces import SHAPES, agents

from sglite.protocol import ProgramInfo
from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.tails import shared_start

POOLS = (16_384, 65_536)
"""Tokens: what the paper's GPU had beside its model, and the default on a CPU."""
TRACES = ((1, 0.3), (1, 0.6), (2, 0.3), (2, 0.6))
"""Seeds, and arrivals a second."""

# --------------------------------------------------------------------------------------------------- offline optimum


class Pages:
    """Names for whole pages together with all that comes before them."""

    def __init__(self, page_size):
        self._page_size = page_size
        self._names = {}

    def of(self, tokens):
        size, name, names = self._page_size, 0, []
        for start in range(0, len(tokens) - len(tokens) % size, size):
            name = self._names.setdefault((name, tuple(tokens[start : start + size])), len(self._names) + 1)
            names.append(name)
        return names


class Batch:
    """Programs of a shape through the scheduler, all submitted at once."""

    def __init__(self, programs, policy, pool, page_size, running):
        self.page_size = page_size
        book = PageBook(pool // page_size)
        self.scheduler = Scheduler(
            book,
            PrefixCache(book, page_size, tails=True),
            page_size=page_size,
            policy=policy,
            max_running=running,
            max_step_tokens=2048,
            max_queue=10**6,
        )
        self.rng = random.Random(7)
        self.calls = {}
        self.order = []
        self.open = {}
        for i, program in enumerate(programs):
            self.open[str(i)] = 1
            self.call(program, [], str(i), "")

    def call(self, call, context, program, branch):
        last = not call.next
        asked = sequence([*context, *call.added], call.new, ProgramInfo(program, branch, last))
        self.calls[asked] = (call, program, branch)
        self.scheduler.submit(asked)

    def run(self):
        while not self.scheduler.idle:
            plan = self.scheduler.plan()
            self.scheduler.commit(plan)
            for row in plan.rows:
                one = self.scheduler.sequence(row.slot)
                if one.remaining == 0:
                    self.step(one)
        stats = self.scheduler.stats
        return stats.hit_tokens, stats.prompt_tokens

    def step(self, one):
        if len(one.tokens) < one.limit:
            one.tokens.append(self.rng.randrange(49_152))
        if len(one.tokens) == one.limit and (one.remaining == 0 or one.output_length):
            self.end(one)

    def end(self, one):
        call, program, branch = self.calls.pop(one)
        self.scheduler.release(one)
        self.order.append((list(one.tokens[: one.prompt_length]), list(one.tokens)))
        self.open[program] += len(call.next) - 1
        for i, child in enumerate(call.next):
            below = branch if len(call.next) == 1 else f"{branch}.{i}".strip(".")
            self.call(child, one.tokens, program, below)
        if not self.open[program]:
            self.scheduler.end_program("", program)

    def optimum(self):
        """Hits of the same calls with everything computed once; a call's parent ends before it in ``order``."""
        known, hits = Trie(), 0
        for prompt, whole in self.order:
            hits += known.shared(prompt[:-1])
            known.add(whole[:-1])
        return hits


class Trie:
    """All positions ever computed: how much of a prompt is among them, to the token. Runs of tokens, cut where others
    part from them."""

    def __init__(self):
        self._root = {}

    def _descend(self, tokens):
        """The children at the deepest point that is known, the run it lies in (None: at the end of one), how far into
        it, and how many tokens are known."""
        children, at = self._root, 0
        while at < len(tokens) and tokens[at] in children:
            run, below = children[tokens[at]]
            same = shared_start(run, tokens[at : at + len(run)])
            at += same
            if same < len(run):
                return children, run, same, at
            children = below
        return children, None, 0, at

    def shared(self, tokens):
        return self._descend(tokens)[3]

    def add(self, tokens):
        children, run, same, at = self._descend(tokens)
        if at == len(tokens):
            return
        if run is not None:
            below = children[run[0]][1]
            upper = {run[same]: (run[same:], below)}
            children[run[0]] = (run[:same], upper)
            children = upper
        children[tokens[at]] = (tokens[at:], {})


def hit_rates(name, policy="program", pool=POOLS[0], running=32, page_size=PAGE_SIZE):
    batch = Batch(SHAPES[name](random.Random(1)), policy, pool, page_size, running)
    hits, tokens = batch.run()
    best = batch.optimum()
    return {"hit rate": hits / tokens, "optimum": best / tokens, "of optimum": hits / best}


# --------------------------------------------------------------------------------------------------- Bélády's optimum


class Belady:
    """Prompt tokens that must be computed for a log of calls when evictions know the future. Pages that running
    sequences have are taken from the pool as they were in the run."""

    def __init__(self, log, total):
        self.total = total
        self.log = log
        self.pages = Pages(PAGE_SIZE)
        self.uses = {}
        for time, (kind, _, tokens, _) in enumerate(log):
            if kind == "enter":
                for page in self.pages.of(tokens[:-1]):
                    self.uses.setdefault(page, []).append(time)
        for times in self.uses.values():
            times.reverse()
        self.refs, self.idle, self.heap = {}, {}, []
        self.held, self.private, self.taken = {}, {}, 0

    def misses(self):
        computed = 0
        for time, (kind, one, tokens, _) in enumerate(self.log):
            if kind == "enter":
                computed += self.enter(one, tokens)
            elif kind == "size":
                self.resize(one, tokens)
            else:
                self.leave(one, tokens, time)
            self.evict()
        return computed

    def enter(self, one, tokens):
        pages = self.pages.of(tokens[:-1])
        hits = next((i for i, page in enumerate(pages) if page not in self.refs and page not in self.idle), len(pages))
        for page in pages:
            self.hold(page)
        self.held[one], self.private[one] = pages, 0
        return len(tokens) - hits * PAGE_SIZE

    def resize(self, one, size):
        self.taken -= self.private[one]
        self.private[one] = max(0, size - len(self.held[one]))
        self.taken += self.private[one]

    def leave(self, one, tokens, time):
        self.taken -= self.private.pop(one)
        pages, held = self.pages.of(tokens[:-1]), self.held.pop(one)
        for page in pages[len(held) :]:
            self.hold(page)
        for page in (*pages, *held[len(pages) :]):
            self.drop(page, time)

    def hold(self, page):
        self.idle.pop(page, None)
        self.refs[page] = self.refs.get(page, 0) + 1

    def drop(self, page, time):
        self.refs[page] -= 1
        if not self.refs[page]:
            del self.refs[page]
            self.idle[page] = self.next_use(page, time)
            heapq.heappush(self.heap, (-self.idle[page], -page))

    def next_use(self, page, time):
        times = self.uses.get(page, [])
        while times and times[-1] <= time:
            times.pop()
        return times[-1] if times else len(self.log)

    def evict(self):
        """The page needed last; of those needed together, the deepest."""
        while self.idle and self.taken + len(self.refs) + len(self.idle) > self.total:
            use, page = heapq.heappop(self.heap)
            if self.idle.get(-page) == -use:
                del self.idle[-page]


def under_pressure(seed, rate, share=0.3):
    trace = agents(seed, rate=rate)
    unlimited = Simulation(trace, 10**5, "fcfs").run()
    pages = int(share * unlimited.most_tokens) // PAGE_SIZE
    runs = {policy: Simulation(trace, pages, policy).run() for policy in ("fcfs", "program")}
    needed = Belady(runs["program"].log, 10**9).misses()
    best = {policy: Belady(run.log, pages).misses() - needed for policy, run in runs.items()}
    ours = {policy: run.prefilled - needed for policy, run in runs.items()}
    return {
        "needed": needed,
        "again": ours["program"],
        "again, Bélády in our order": best["program"],
        "again, fcfs and LRU": ours["fcfs"],
        "again, fcfs and Bélády": best["fcfs"],
        "of Bélády in our order": ours["program"] / best["program"],
        "all prefill of Bélády in our order": (ours["program"] + needed) / (best["program"] + needed),
        "of fcfs and Bélády": ours["program"] / best["fcfs"],
    }


KINDS = (("program", POOLS[1], 32), ("program", POOLS[0], 32), ("program", POOLS[0], 8), ("fcfs", POOLS[0], 32))
"""Policy, pool and how many run at once. 8 contexts of every shape fit the small pool: it shows what order alone is."""


def shapes(console, save):
    table = Table("hit rate", "optimum", *[f"of it: {policy}, {pool:,}, {running}" for policy, pool, running in KINDS])
    rows = {}
    for name in track(SHAPES, "shapes", console=console):
        rows[name] = {
            f"{policy}, {pool}, {running}": hit_rates(name, policy, pool, running) for policy, pool, running in KINDS
        }
        best = next(iter(rows[name].values()))["optimum"]
        table.add_row(name, f"{best:.1%}", *[f"{one['of optimum']:.1%}" for one in rows[name].values()])
        save("shapes", rows)
    console.print(table)


def pressure(console, save):
    table = Table("200 agents", "needed", "again", "of Bélády, our order", "all prefill of that", "of fcfs + Bélády")
    rows = {}
    for seed, rate in track(TRACES, "agents", console=console):
        one = rows[f"seed {seed}, {rate}/s"] = under_pressure(seed, rate)
        ratios = [f"{value:.2f}" for value in list(one.values())[-3:]]
        table.add_row(f"seed {seed}, {rate}/s", f"{one['needed']:,}", f"{one['again']:,}", *ratios)
        save("agents", rows)
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="*", choices=["shapes", "agents", []], help="default: both")
    wanted = parser.parse_args().table or ["shapes", "agents"]
    results = {}

    def save(name, rows):
        results[name] = rows
        Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")

    console = Console(width=None if sys.stdout.isatty() else 140)
    for name in wanted:
        {"shapes": shapes, "agents": pressure}[name](console, save)


if __name__ == "__main__":
    main()
