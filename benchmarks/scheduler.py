"""What does the scheduler cost, and what does scheduling by program win? Scripted traces, no model, no torch.

    python benchmarks/scheduler.py            # both tables, about a minute on a quiet machine

First table: microseconds of ``plan`` + ``commit`` for a decode step of 32 rows, with an empty tree and with 100,000
nodes and 1,000 waiting. Second table: 200 agent programs (turns with tool gaps, heavy-tailed, seeded) on a simulated
device whose step takes 12 ms and 0.5 ms a token, with a KV pool for 30% of what they would use at most.
Writes ``scheduler.json`` beside this file.
"""

import heapq
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglite.protocol import GenerateRequest, ProgramInfo, Text
from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.sequence import Sequence

PAGE_SIZE = 16
STEP_SECONDS, TOKEN_SECONDS = 0.012, 0.0005
VOCABULARY = 49_152


def sequence(tokens, new, program=None):
    request = GenerateRequest("benchmark", (Text("-"),), program=program)
    return Sequence(request, list(tokens), len(tokens), len(tokens) + new)


def some_tokens(rng, n):
    return [rng.randrange(VOCABULARY) for _ in range(n)]


# ------------------------------------------------------------------------------------------------------- cost of a step


def decode_step_microseconds(nodes, waiting, steps=2000):
    """Median and 99th percentile of plan + commit, 32 rows decoding."""
    rng = random.Random(0)
    book = PageBook(500_000)
    cache = PrefixCache(book, PAGE_SIZE)
    scheduler = Scheduler(book, cache, page_size=PAGE_SIZE, policy="program", max_running=32, max_step_tokens=4096)
    while cache.stats.nodes < nodes:
        stem = some_tokens(rng, 3 * PAGE_SIZE)
        for leaf in range(8):
            cache.adopt(("", ""), [*stem, *[leaf] * PAGE_SIZE], book.allocate(4))
    scheduler.submit(*[sequence(some_tokens(rng, 500), 2 * steps) for _ in range(32)])
    while (plan := scheduler.plan()).rows:
        scheduler.commit(plan)
    scheduler.submit(*[sequence(some_tokens(rng, 100), 100) for _ in range(waiting)])
    return percentiles([timed_step(scheduler) for _ in range(steps)])


def timed_step(scheduler):
    for running in scheduler.running:
        running.tokens.append(7)
    began = time.perf_counter()
    scheduler.commit(scheduler.plan())
    return (time.perf_counter() - began) * 1e6


def percentiles(values):
    cuts = statistics.quantiles(values, n=100)
    return {"median": cuts[49], "p99": cuts[98]}


# --------------------------------------------------------------------------------------------------------- agent traces


@dataclass(frozen=True)
class Turn:
    added: list
    output: list
    gap: float


@dataclass
class Agent:
    """A program in the simulation: ``context`` is what it has said and heard so far."""

    name: str
    arrival: float
    turns: tuple
    context: list = field(default_factory=list)
    at: int = 0
    done: float = 0.0


def agents(seed, n=200, rate=0.3, mean_gap=6.0):
    """Programs of 3 to 20 turns, most of them few; one of four system prompts; results of tools in between."""
    rng, now, made = random.Random(seed), 0.0, []
    systems = [some_tokens(rng, 400) for _ in range(4)]
    for i in range(n):
        now += rng.expovariate(rate)
        turns = [a_turn(rng, mean_gap) for _ in range(min(20, 1 + int(rng.paretovariate(1.2) * 2)))]
        opening = rng.choice(systems) + some_tokens(rng, min(1100, int(rng.lognormvariate(6, 0.6))))
        turns[0] = Turn(opening, turns[0].output, turns[0].gap)
        made.append(Agent(str(i), now, tuple(turns)))
    return made


def a_turn(rng, mean_gap):
    added = some_tokens(rng, min(1500, int(rng.lognormvariate(5, 0.8))))
    output = some_tokens(rng, max(4, min(400, int(rng.lognormvariate(4, 0.7)))))
    return Turn(added, output, mean_gap * rng.lognormvariate(-0.5, 1))


class Simulation:
    def __init__(self, trace, pages, policy):
        book = PageBook(pages)
        cache = PrefixCache(book, PAGE_SIZE)
        self.scheduler = Scheduler(
            book, cache, page_size=PAGE_SIZE, policy=policy, max_running=32, max_step_tokens=1024, max_queue=10**6
        )
        self.agents = [Agent(agent.name, agent.arrival, agent.turns) for agent in trace]
        self.calls = [(agent.arrival, i, agent) for i, agent in enumerate(self.agents)]
        self.running = {}
        self.now = 0.0
        self.most_tokens = 0
        self.planning = 0.0

    def run(self):
        heapq.heapify(self.calls)
        while self.calls or not self.scheduler.idle:
            while self.calls and self.calls[0][0] <= self.now:
                self.call(heapq.heappop(self.calls)[2])
            began = time.perf_counter()
            plan = self.scheduler.plan()
            self.planning += time.perf_counter() - began
            if plan.rows:
                self.now += STEP_SECONDS + TOKEN_SECONDS * plan.tokens
                self.scheduler.commit(plan)
                self.finish(plan)
            else:
                self.now = self.calls[0][0]
        return self

    def call(self, agent):
        turn = agent.turns[agent.at]
        agent.context = agent.context + turn.added
        program = ProgramInfo(agent.name, last=agent.at == len(agent.turns) - 1)
        asked = sequence(agent.context, 3 * len(turn.output), program)
        self.running[asked] = agent
        self.scheduler.submit(asked)

    def finish(self, plan):
        for row in plan.rows:
            one = self.scheduler.sequence(row.slot)
            if one.remaining == 0:
                agent = self.running[one]
                output = agent.turns[agent.at].output
                one.tokens.append(output[one.output_length])
                if one.output_length == len(output):
                    self.answer(one, agent)

    def answer(self, one, agent):
        self.scheduler.release(one)
        del self.running[one]
        agent.context = list(one.tokens)
        self.most_tokens = max(self.most_tokens, sum(len(each.context) for each in self.agents))
        gap = agent.turns[agent.at].gap
        agent.at += 1
        if agent.at == len(agent.turns):
            agent.done, agent.context = self.now, []
        else:
            heapq.heappush(self.calls, (self.now + gap, len(self.agents) + self.scheduler.stats.admissions, agent))

    def result(self):
        stats = self.scheduler.stats
        times = sorted(agent.done - agent.arrival for agent in self.agents)
        return {
            "mean completion s": statistics.mean(times),
            "p95 completion s": times[int(0.95 * len(times))],
            "all done s": self.now,
            "computed tokens": stats.computed_tokens,
            "retractions": stats.retractions,
            "plan us": self.planning / stats.steps * 1e6,
        }


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
    costs = {
        f"{nodes:,} nodes, {w:,} waiting": decode_step_microseconds(nodes, w) for nodes, w in [(0, 0), (100_000, 1000)]
    }
    table = Table("plan + commit, 32 decoding", "median µs", "p99 µs")
    for name, cost in costs.items():
        table.add_row(name, f"{cost['median']:.0f}", f"{cost['p99']:.0f}")
    console.print(table)
    traces = {f"seed {seed}, {rate}/s": compare(seed, rate) for seed in (1, 2) for rate in (0.3, 0.6)}
    table = Table("200 agents", "policy", "mean s", "of fcfs", "p95 s", "end s", "tokens")
    for name, results in traces.items():
        for policy in ("unlimited pool", "fcfs", "longest-prefix", "program"):
            mean, p95, end, computed, *_ = results[policy].values()
            ratio = mean / results["fcfs"]["mean completion s"]
            row = [f"{mean:.1f}", f"{ratio:.2f}", f"{p95:.0f}", f"{end:.0f}", f"{computed:,}"]
            table.add_row(name if policy == "unlimited pool" else "", policy, *row)
    console.print(table)
    Path(__file__).with_suffix(".json").write_text(json.dumps({"step": costs, "agents": traces}, indent=1) + "\n")


if __name__ == "__main__":
    main()
