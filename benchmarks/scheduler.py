"""What does scheduling cost, and what does scheduling by program win? Scripted traces, no model, no torch.

    python benchmarks/scheduler.py            # about a minute and a half on a quiet machine

First table: microseconds of a decode step of 32 rows in the scheduler and the tree (``plan`` + ``commit`` + what the
tree keeps), with an empty tree and with 100,000 nodes and 1,000 waiting, and with sequences that end and begin. Second:
what must hold whatever the time. Third: 200 agent programs (turns with tool gaps, heavy-tailed, seeded) on a simulated
device whose step takes 12 ms and 0.5 ms a token, with a KV pool for 30% of what they would use at most.
Writes ``scheduler.json`` beside this file.
"""

import json
import random
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from simulation import PAGE_SIZE, Simulation, sequence
from traces import agents, some_tokens

from sglite.runtime.pages import PageBook
from sglite.runtime.policy import PATIENCE
from sglite.runtime.radix import PrefixCache
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.sequence import Status

# ------------------------------------------------------------------------------------------------------- cost of a step


def scheduler_with(nodes, *, cached=True, policy="program", pages=500_000):
    book = PageBook(pages)
    cache = PrefixCache(book, PAGE_SIZE) if cached else None
    scheduler = Scheduler(book, cache, page_size=PAGE_SIZE, policy=policy, max_running=32, max_step_tokens=4096)
    rng = random.Random(0)
    while cached and cache.stats.nodes < nodes:
        stem = some_tokens(rng, 3 * PAGE_SIZE)
        for leaf in range(8):
            cache.adopt(("", ""), [*stem, *[leaf] * PAGE_SIZE], book.allocate(4))
    return scheduler


def decode_step(nodes, waiting, steps=2000):
    """Microseconds of plan + commit, 32 rows decoding."""
    rng, scheduler = random.Random(0), scheduler_with(nodes)
    scheduler.submit(*[sequence(some_tokens(rng, 500), 2 * steps) for _ in range(32)])
    while (plan := scheduler.plan()).rows:
        scheduler.commit(plan)
    scheduler.submit(*[sequence(some_tokens(rng, 100), 100) for _ in range(waiting)])
    return percentiles([timed_step(scheduler) for _ in range(steps)])


def step_with_turnover(nodes, waiting, steps=2000, new=64):
    """Microseconds of plan + commit + release where each sequence ends after 64 tokens and another takes its place."""
    rng, scheduler = random.Random(0), scheduler_with(nodes)
    head = some_tokens(rng, 200)
    times = []
    for _ in range(steps):
        while scheduler.waiting < max(waiting, 32):
            scheduler.submit(sequence([*head, *some_tokens(rng, 100)], rng.randint(new // 2, new * 3 // 2)))
        times.append(timed_step(scheduler))
    return percentiles(times)


def timed_step(scheduler):
    for running in scheduler.running:
        if running.remaining == 0:
            running.tokens.append(7)
    began = time.perf_counter()
    for running in scheduler.running:
        if len(running.tokens) == running.limit:
            scheduler.release(running)
    if (plan := scheduler.plan()).rows:
        scheduler.commit(plan)
    return (time.perf_counter() - began) * 1e6


def percentiles(values):
    cuts = statistics.quantiles(values, n=100)
    return {"median": cuts[49], "p99": cuts[98]}


# ------------------------------------------------------------------------------------------------- what must hold


def no_reuse_seconds(cached, requests=300):
    """Scheduling time of requests that share nothing: 500 tokens of prompt, 64 of output, 32 at once."""
    rng, scheduler = random.Random(3), scheduler_with(0, cached=cached, pages=4096)
    pending = [sequence(some_tokens(rng, 500), 64) for _ in range(requests)]
    scheduler.submit(*pending)
    spent, steps = 0.0, 0
    while not scheduler.idle:
        spent += timed_step(scheduler)
        steps += 1
    return spent / 1e6, steps


def shared_prefix(requests=32, shared=1024, own=32):
    """Positions computed of a prefix that so many cold requests share, in multiples of it."""
    rng, scheduler = random.Random(4), scheduler_with(0)
    head = some_tokens(rng, shared)
    sequences = [sequence([*head, *some_tokens(rng, own)], 1) for _ in range(requests)]
    scheduler.submit(*sequences)
    while any(one.remaining for one in sequences):
        scheduler.commit(scheduler.plan())
    return (scheduler.stats.computed_tokens - requests * own) / shared


def worst_wait(policy):
    """Admissions of others before a cold request starts while 64 hot ones always wait."""
    scheduler = scheduler_with(0, policy=policy)
    hot, cold = [1] * 320, sequence([2] * 320, 2)
    scheduler.submit(*[sequence(hot, 2) for _ in range(64)])
    scheduler.submit(cold)
    while cold.status is Status.WAITING:
        while scheduler.waiting < 64:
            scheduler.submit(sequence(hot, 2))
        timed_step(scheduler)
    return scheduler.stats.admissions, PATIENCE + 65 + 32


# --------------------------------------------------------------------------------------------------------- agent traces


def compare(seed, rate, share=0.3):
    trace = agents(seed, rate=rate)
    unlimited = Simulation(trace, 10**5, "fcfs").run()
    pages = int(share * unlimited.most_tokens) // PAGE_SIZE
    results = {"pool": pages * PAGE_SIZE, "unlimited pool": unlimited.result()}
    for policy in ("fcfs", "longest-prefix", "program"):
        results[policy] = Simulation(trace, pages, policy).run().result()
    return results


def main():
    console = Console()
    costs = {}
    for nodes, waiting in track([(0, 0), (100_000, 1000)], "steps", console=console):
        where = f"{nodes:,} nodes, {waiting:,} waiting"
        costs[f"decode, {where}"] = decode_step(nodes, waiting)
        costs[f"turnover, {where}"] = step_with_turnover(nodes, waiting)
    table = Table("32 running", "median µs", "p99 µs")
    for name, cost in costs.items():
        table.add_row(name, f"{cost['median']:.0f}", f"{cost['p99']:.0f}")
    console.print(table)
    facts = holds()
    table = Table("what must hold", "measured", "bound")
    for name, (value, bound) in facts.items():
        table.add_row(name, f"{value:.4g}", f"{bound:.4g}")
    console.print(table)
    runs = [(1, 0.3), (2, 0.6)]
    traces = {f"seed {seed}, {rate}/s": compare(seed, rate) for seed, rate in track(runs, "agents", console=console)}
    table = Table("200 agents", "policy", "mean s", "of fcfs", "p95 s", "end s", "tokens")
    for name, results in traces.items():
        for policy in ("unlimited pool", "fcfs", "longest-prefix", "program"):
            mean, p95, end, computed, *_ = results[policy].values()
            ratio = mean / results["fcfs"]["mean completion s"]
            row = [f"{mean:.1f}", f"{ratio:.2f}", f"{p95:.0f}", f"{end:.0f}", f"{computed:,}"]
            table.add_row(name if policy == "unlimited pool" else "", policy, *row)
    console.print(table)
    results = {"step": costs, "holds": facts, "agents": traces}
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def holds():
    """Measured and bound, by what is measured."""
    without, steps = min(no_reuse_seconds(cached=False) for _ in range(3))
    with_tree, _ = min(no_reuse_seconds(cached=True) for _ in range(3))
    return {
        "µs a step that the tree adds where nothing is reused": ((with_tree - without) / steps * 1e6, 300),
        "times a prefix shared by 32 cold requests is computed": (shared_prefix(), 1),
        "admissions before a cold request, longest-prefix": worst_wait("longest-prefix"),
        "admissions before a cold request, program": worst_wait("program"),
    }


if __name__ == "__main__":
    main()
