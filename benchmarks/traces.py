"""Seeded workloads for the scheduler's benchmarks: the shapes that programs of a language model have.

``agents``: programs of several turns with tools' pauses between them. ``SHAPES``: batches of programs, all there at
once, that share their prompts as the workloads do in the paper on SGLang (Zheng et al., 2024, section 6).
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise

VOCABULARY = 49_152


def some_tokens(rng, n):
    return [rng.randrange(VOCABULARY) for _ in range(n)]


# ----------------------------------------------------------------------------------------------------- programs in time


@dataclass(frozen=True)
class Turn:
    """``added`` to the context before the call, ``output`` of the call, ``gap`` in seconds until the next one."""

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


# ---------------------------------------------------------------------------------------------------- batches, by shape


@dataclass
class Call:
    """A call whose prompt is its parent's prompt and answer, then ``added``; ``next`` can begin when it has ended."""

    added: list
    new: int
    next: list = field(default_factory=list)


def chain(*calls):
    """The first of calls of which each follows the one before."""
    for one, other in pairwise(calls):
        one.next.append(other)
    return calls[0]


def mmlu(rng):
    """Five-shot questions of 57 subjects, shuffled: one token each."""
    shots = [some_tokens(rng, rng.randint(350, 1200)) for _ in range(57)]
    return [Call(rng.choice(shots) + some_tokens(rng, rng.randint(40, 160)), 1) for _ in range(600)]


def hellaswag(rng):
    """A long few-shot prompt for all, then a context, then four endings of it, each scored."""
    shots = some_tokens(rng, 1600)
    return [
        Call(shots + some_tokens(rng, rng.randint(40, 90)), 0, [Call(some_tokens(rng, 20), 1) for _ in range(4)])
        for _ in range(200)
    ]


def react(rng):
    """Agents with one few-shot prompt: thought, action, observation, over again."""
    shots = some_tokens(rng, 1400)
    steps = [[Call(some_tokens(rng, rng.randint(40, 150)), rng.randint(30, 80)) for _ in range(6)] for _ in range(80)]
    return [chain(Call(shots + some_tokens(rng, 40), 50), *more[: rng.randint(2, 6)]) for more in steps]


def generative_agents(rng):
    """Short single calls from a few templates."""
    templates = [some_tokens(rng, rng.randint(150, 400)) for _ in range(8)]
    return [
        Call(rng.choice(templates) + some_tokens(rng, rng.randint(60, 200)), rng.randint(5, 40)) for _ in range(400)
    ]


def tree_of_thought(rng):
    """Two ways on from every thought, four levels deep."""
    shots = some_tokens(rng, 800)

    def grow(depth):
        return [Call(some_tokens(rng, 15), 40, grow(depth - 1)) for _ in range(2)] if depth else []

    return [Call(shots + some_tokens(rng, 60), 40, grow(3)) for _ in range(40)]


def skeleton_of_thought(rng):
    """An outline, and all its points at once."""
    head = some_tokens(rng, 300)
    return [
        Call(head + some_tokens(rng, 40), 60, [Call(some_tokens(rng, 40), 80) for _ in range(rng.randint(3, 8))])
        for _ in range(60)
    ]


def judge(rng):
    """An essay judged in six dimensions, and the sum of it."""
    head = some_tokens(rng, 200)
    return [
        Call(
            head + some_tokens(rng, rng.randint(400, 900)),
            0,
            [chain(Call(some_tokens(rng, 60), 60), Call(some_tokens(rng, 12), 4)) for _ in range(6)],
        )
        for _ in range(50)
    ]


def json_extraction(rng):
    """One template, many documents."""
    template = some_tokens(rng, 350)
    return [Call(template + some_tokens(rng, rng.randint(100, 500)), rng.randint(40, 120)) for _ in range(200)]


def rag(rng):
    """Few-shot examples, popular passages in front of a question, then two calls on from the answer."""
    shots, passages = some_tokens(rng, 700), [some_tokens(rng, 250) for _ in range(30)]
    return [
        chain(
            Call(shots + rng.choice(passages) + rng.choice(passages) + some_tokens(rng, 30), 40),
            Call(some_tokens(rng, 20), 40),
            Call(some_tokens(rng, 20), 10),
        )
        for _ in range(150)
    ]


def chat(rng):
    """Four turns of conversations that share nothing but a short system prompt."""
    system = some_tokens(rng, 60)
    turns = [[Call(some_tokens(rng, rng.randint(30, 300)), rng.randint(30, 200)) for _ in range(4)] for _ in range(60)]
    for conversation in turns:
        conversation[0].added = system + conversation[0].added
    return [chain(*conversation) for conversation in turns]


SHAPES = {
    "MMLU": mmlu,
    "HellaSwag": hellaswag,
    "ReAct agents": react,
    "generative agents": generative_agents,
    "tree of thought": tree_of_thought,
    "skeleton of thought": skeleton_of_thought,
    "LLM judge": judge,
    "JSON extraction": json_extraction,
    "RAG pipeline": rag,
    "multi-turn chat": chat,
}
