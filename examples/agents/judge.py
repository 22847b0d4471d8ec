"""Branch, solve, merge: a text is judged in several respects at once, and the verdicts become one typed report.

The text stands once, in front of the branches. A grade is not generated but chosen: the mean of 1 to 5, weighted by
their probabilities, tells more than the likeliest digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from common import command_line, console, exact_if_possible, run, show_calls, start
from pydantic import BaseModel, Field
from rich.table import Table

import sglite as sgl

ESSAY = (
    "A park is the lung of a town. Trees clean the air, give shade in summer and a home to birds. People of all ages "
    "meet there, and children learn to climb. Our town should therefore turn the old car park into a park."
)
RESPECTS = {
    "clarity": "Is the text clear and easy to read?",
    "argument": "Does the text give good reasons for what it wants?",
    "style": "Is the text pleasant to read?",
}
GRADES = ["1", "2", "3", "4", "5"]


class Report(BaseModel):
    verdict: Literal["accept", "revise", "reject"]
    advice: str = Field(min_length=10, max_length=100)


def grade(s: sgl.ProgramState, name: str, question: str) -> None:
    s += sgl.user(f"{question} Answer in one short sentence.")
    s += sgl.assistant(sgl.gen(f"{name}_comment", max_tokens=40, temperature=0, stop=["\n", "."]))
    s += sgl.user(f"Give a grade for {name} from 1 (bad) to 5 (very good).")
    s += sgl.assistant("The grade is " + sgl.select(f"{name}_grade", GRADES, choices_method=exact_if_possible()))


def expected(s: sgl.ProgramState, name: str) -> float:
    """The mean grade under the model's probabilities; the chosen one where a backend does not tell them."""
    weights = s.get_meta_info(name).get("probabilities")
    return sum(w * int(g) for w, g in zip(weights, GRADES, strict=True)) if weights else float(s[name])


@sgl.function
def review(s: sgl.ProgramState, essay: str) -> tuple[dict[str, float], Report]:
    s += sgl.system("You are a kind and careful editor.")
    s += sgl.user(f"Please read this text.\n\n{essay}") + sgl.assistant("I have read it.")
    branches = dict(zip(RESPECTS, s.fork(len(RESPECTS)), strict=True))
    for name, question in RESPECTS.items():
        grade(branches[name], name, question)
    grades = {name: expected(branch, f"{name}_grade") for name, branch in branches.items()}
    for name, branch in branches.items():
        s.set_var(name, branch[f"{name}_comment"].strip())
        s += sgl.user(f"What do you say about its {name}?") + sgl.assistant(
            f"{s[name]}. Grade {grades[name]:.0f} of 5."
        )
    s += sgl.user("Write your verdict and one piece of advice for the author as JSON.")
    s += sgl.assistant(sgl.gen("report", schema=Report, max_tokens=64, temperature=0))
    return grades, s.value("report")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("text", nargs="?", default=ESSAY, help="the text to judge (default: a short essay)")
    options = start(parser, arguments)
    state = review.run(options.text)
    grades, report = state.ret_value
    table = Table("respect", "grade", "comment", title="review")
    for name, value in grades.items():
        table.add_row(name, f"{value:.1f}", state[name])
    console.print(table)
    console.print(f"[bold]{report.verdict}[/bold]: {report.advice}")
    show_calls([state])


if __name__ == "__main__":
    run(main)
