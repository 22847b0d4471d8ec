"""Agent programs on a simulated device: the real scheduler and cache, a virtual clock, no model.

A step takes ``STEP_SECONDS`` and ``TOKEN_SECONDS`` a token, so decisions count and the machine does not.
"""

import heapq
import statistics
import time

from traces import Agent

from sglite.protocol import GenerateRequest, ProgramInfo, Text
from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.sequence import Sequence

PAGE_SIZE = 16
STEP_SECONDS, TOKEN_SECONDS = 0.012, 0.0005


def sequence(tokens, new, program=None):
    request = GenerateRequest("benchmark", (Text("-"),), program=program)
    return Sequence(request, list(tokens), len(tokens), len(tokens) + new)


class Simulation:
    """``log``: what entered (with its tokens and how many of them were cached), grew to so many pages, and left."""

    def __init__(self, trace, pages, policy):
        book = PageBook(pages)
        cache = PrefixCache(book, PAGE_SIZE)
        self.scheduler = Scheduler(
            book,
            cache,
            page_size=PAGE_SIZE,
            policy=policy,
            max_running=32,
            max_step_tokens=1024,
            max_queue=10**6,
            clock=lambda: self.now,
            memory=60.0,
        )
        self.agents = [Agent(agent.name, agent.arrival, agent.turns) for agent in trace]
        self.calls = [(agent.arrival, i, agent) for i, agent in enumerate(self.agents)]
        self.running = {}
        self.sizes = {}
        self.log = []
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
            self.record()
            if plan.rows:
                self.now += STEP_SECONDS + TOKEN_SECONDS * plan.tokens
                self.scheduler.commit(plan)
                self.finish(plan)
            else:
                self.now = self.calls[0][0]
        return self

    @property
    def prefilled(self):
        """Prompt tokens that were computed, again ones included."""
        return sum(len(tokens) - cached for kind, _, tokens, cached in self.log if kind == "enter")

    def record(self):
        running = self.scheduler.running
        for one in [one for one in self.sizes if one.slot < 0]:
            self.left(one)
        for one in running:
            if one not in self.sizes:
                self.log.append(("enter", one, tuple(one.tokens), one.computed))
            if self.sizes.get(one) != len(one.pages):
                self.sizes[one] = len(one.pages)
                self.log.append(("size", one, len(one.pages), 0))

    def left(self, one):
        self.log.append(("leave", one, tuple(one.tokens), 0))
        del self.sizes[one]

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
        self.left(one)
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
