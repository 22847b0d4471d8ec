"""Programs that branch: tree of thought, skeleton of thought, and a judge that branches, solves and merges."""

from __future__ import annotations

import sglite as sgl
from workloads.base import Count, Inputs, Workload, Writer, free

WIDTH = 2
POINTS = 4
RESPECTS = ("clarity", "originality", "evidence", "organization", "style")
GRADES = ["1", "2", "3", "4", "5"]


def deepen(states, depth, ask):
    """The next level: every state branches ``WIDTH`` times."""
    branches = [branch for state in states for branch in state.fork(WIDTH)]
    for i, branch in enumerate(branches):
        branch += sgl.user(f"{ask} Variant {i % WIDTH + 1}.")
        branch += sgl.assistant(free(f"thought{depth}", 32))
    return branches


@sgl.function
def tree_of_thought(s, question):
    s += sgl.system("You solve problems step by step.")
    s += sgl.user(question) + sgl.assistant("Let us think about it.")
    plans = deepen([s], 0, "Make a plan.")
    attempts = deepen(plans, 1, "Carry out the plan.")
    leaves = deepen(attempts, 2, "Check the solution.")
    for leaf in leaves:
        leaf += sgl.user("Give the final answer.") + sgl.assistant(free("answer", 12))
    return [leaf["answer"] for leaf in leaves]


def questions(writer: Writer, number: int) -> Inputs:
    return [{"question": writer.text(100)} for _ in range(number)]


@sgl.function
def skeleton_of_thought(s, question):
    s += sgl.system("You answer with short points first.")
    s += sgl.user(f"{question} Give {POINTS} points.") + sgl.assistant(free("skeleton", 40))
    points = s.fork(POINTS)
    points += lambda i: sgl.user(f"Expand point {i + 1}.") + sgl.assistant(free("point", 64))
    points.join()
    return s["point"]


@sgl.function
def judge(s, essay):
    s += sgl.system("You judge essays.")
    s += sgl.user(f"Please judge this essay.\n\n{essay}") + sgl.assistant("I have read it.")
    branches = s.fork(len(RESPECTS))
    branches += lambda i: sgl.user(f"What about its {RESPECTS[i]}?") + sgl.assistant(free("comment", 48))
    branches += lambda i: sgl.user("Grade from 1 to 5:") + sgl.assistant("Grade: " + sgl.select("grade", GRADES))
    branches.join()
    merged = "\n".join(f"{name}: {text}" for name, text in zip(RESPECTS, s["comment"], strict=True))
    s += sgl.user(f"{merged}\nGrades: {', '.join(s['grade'])}. Summarise.") + sgl.assistant(free("summary", 48))
    return s["summary"]


def essays(writer: Writer, number: int) -> Inputs:
    return [{"essay": writer.text(400)} for _ in range(number)]


WORKLOADS = (
    Workload("tot", "tree of thought: depth 3, width 2, 8 answers", tree_of_thought, questions, Count(4, 1)),
    Workload("sot", "skeleton of thought: 4 points at once", skeleton_of_thought, questions, Count(8, 1)),
    Workload("judge", "branch, solve, merge: 5 respects of an essay", judge, essays, Count(6, 1)),
)
