"""Agents as the paper replays them: what tools and the world said is fixed, what the model says has a fixed length."""

from __future__ import annotations

import sglite as sgl
from workloads.base import Count, Inputs, Workload, Writer, free

STEPS = 4
PEOPLE = 8


@sgl.function
def react(s, examples, question, observations):
    s += examples + f"Question: {question}\n"
    for i, observation in enumerate(observations, 1):
        s += f"Thought {i}:"
        s += free(f"thought{i}", 32)
        s += f"\nAction {i}: Search["
        s += free(f"action{i}", 8)
        s += f"]\nObservation {i}: {observation}\n"
    s += "Answer:"
    s += free("answer", 8)


def react_inputs(writer: Writer, number: int) -> Inputs:
    """Three worked traces in front, then four steps with what a search found."""
    examples = "".join(_trace(writer) for _ in range(3))
    return [
        {"examples": examples, "question": writer.text(20), "observations": writer.texts(STEPS, 60)}
        for _ in range(number)
    ]


def _trace(writer: Writer) -> str:
    steps = [
        f"Thought {i}: {writer.text(25)}\nAction {i}: Search[{writer.text(4)}]\nObservation {i}: {writer.text(50)}\n"
        for i in range(1, 4)
    ]
    return f"Question: {writer.text(20)}\n{''.join(steps)}Answer: {writer.text(4)}\n\n"


@sgl.function
def agents(s, world, person, memories, events):
    """An hour of one agent: plan, then for each event perceive, react and converse, at the end reflect."""
    s += f"{world}\n\nAbout you: {person}\nYou remember: {memories}\n\nYour plan:"
    s += free("plan", 40)
    for i, event in enumerate(events):
        s += f"\nNow you see: {event}"
        react, talk = s.fork(2)
        react += "\nWhat do you do?"
        react += free(f"deed{i}", 16)
        talk += "\nWhat do you say?"
        talk += free(f"line{i}", 24)
        s += f"\nYou did: {react[f'deed{i}']}\nYou said: {talk[f'line{i}']}"
    s += "\nWhat have you learned?"
    s += free("insight", 24)


def agents_inputs(writer: Writer, number: int) -> Inputs:
    """Agents of one world; a person lives through several hours with other memories each."""
    world, people = writer.text(250), writer.texts(PEOPLE, 80)
    return [
        {"world": world, "person": people[i % PEOPLE], "memories": writer.text(80), "events": writer.texts(2, 30)}
        for i in range(number)
    ]


WORKLOADS = (
    Workload("react", "ReAct traces: 3 examples, 4 steps", react, react_inputs, Count(12, 2)),
    Workload("agents", "generative agents: plan, 2 events, reflect", agents, agents_inputs, Count(16, 2)),
)
