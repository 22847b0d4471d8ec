"""Generative agents: people with a memory who plan their day, meet, talk, and reflect on what they heard.

What an agent recalls is ranked by recency and by the words it shares with the occasion. Plans are typed: each step is
one of the places and deeds that there are. Agents plan and reflect side by side; worked examples are computed once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from common import command_line, console, run, show_calls, start
from pydantic import BaseModel

import sglite as sgl

RECENT = 0.9  # how much a memory weighs of what the next younger one weighs
Place = Literal["bakery", "library", "garden", "market"]
Deed = Literal["bake bread", "sell bread", "read a book", "repair an oven", "water the roses", "buy apples"]

OPINIONS = ("kind person", "funny person", "busy person", "good friend")

PLAN = """Cleo's plan. She loves roses and needs apples.
{"morning": {"place": "garden", "deed": "water the roses"}, "evening": {"place": "market", "deed": "buy apples"}}

"""
DIALOGUE = """Cleo and Dan meet. Dan has a good book about roses.
Cleo: Good morning, Dan! My roses are sick. Can you help me?
Dan: Yes, I can. I have a good book about roses.
Cleo: That is very kind. When can you bring it?
Dan: I can bring it this evening.

"""
THOUGHT = "Cleo remembers: Dan said that he brings me a book.\nCleo thinks: Dan is a kind person.\n\n"


class Step(BaseModel):
    place: Place
    deed: Deed


class Plan(BaseModel):
    morning: Step
    evening: Step


@dataclass
class Person:
    name: str
    memory: list[str]
    states: list[sgl.ProgramState] = field(default_factory=list)

    def recall(self, occasion: str, limit: int = 3) -> str:
        """The memories that fit best, oldest first."""
        wanted = words(occasion)
        scored = [(RECENT**age * (1 + len(wanted & words(m))), -age, m) for age, m in enumerate(reversed(self.memory))]
        best = sorted(scored, reverse=True)[:limit]
        return " ".join(memory for _, _, memory in sorted(best, key=lambda each: each[1]))


def words(text: str) -> set[str]:
    return set(re.findall(r"\w{4,}", text.lower()))


@sgl.function
def plan(s: sgl.ProgramState, person: Person, seed: int) -> Plan:
    s += PLAN + f"{person.name}'s plan. {person.recall('plan for today')}\n"
    s += sgl.gen("plan", schema=Plan, max_tokens=64, temperature=1.0, seed=seed)
    return s.value("plan")


@sgl.function
def say(s: sgl.ProgramState, speaker: Person, other: Person, talk: list[tuple[str, str]]) -> str:
    s += DIALOGUE + f"{other.name} and {speaker.name} meet. {speaker.recall(talk[-1][1])}\n"
    s += "".join(f"{name}: {line}\n" for name, line in talk) + f"{speaker.name}:"
    s += sgl.gen("line", max_tokens=32, temperature=0.5, seed=len(talk), stop=["\n"])
    return s["line"].strip()


@sgl.function
def reflect(s: sgl.ProgramState, person: Person, other: Person) -> str:
    s += THOUGHT + f"{person.name} remembers: {person.recall('today')}\n{person.name} thinks: {other.name} is a "
    s += sgl.select("opinion", list(OPINIONS)) + "."
    return s["opinion"]


def converse(a: Person, b: Person, opening: str, turns: int) -> list[tuple[str, str]]:
    talk = [(a.name, opening)]
    for turn in range(turns):
        speaker, other = (b, a) if turn % 2 == 0 else (a, b)
        speaker.memory.append(f'{other.name} said: "{talk[-1][1]}"')
        speaker.states.append(say.run(speaker, other, talk))
        talk.append((speaker.name, speaker.states[-1].ret_value))
    return talk


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="lines of the conversation (default: 3)")
    turns = start(parser, arguments).turns
    ada = Person("Ada", ["Ada bakes bread.", "Ada's oven is broken."])
    ben = Person("Ben", ["Ben repairs ovens and clocks.", "Ben loves fresh bread."])
    for person, state in zip((ada, ben), plan.run_batch([(ada, 3), (ben, 4)]), strict=True):
        person.states.append(state)
        console.print(f"{person.name}'s day: {state['plan']}", markup=False)
    for name, line in converse(ada, ben, "Good morning, Ben! My oven is broken. Can you help me?", turns):
        console.print(f"  {name}: {line}", markup=False)
    for person, state in zip((ada, ben), reflect.run_batch([(ada, ben), (ben, ada)]), strict=True):
        person.states.append(state)
        console.print(f"{person.name} thinks that the other is a {state.ret_value}", markup=False)
    show_calls([*ada.states, *ben.states])


if __name__ == "__main__":
    run(main)
