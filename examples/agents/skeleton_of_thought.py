"""Skeleton of thought: first the points of an answer, as a typed list, then every point at the same time.

The points are generated once; each branch expands one of them, so the whole takes little longer than one point.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from common import command_line, console, run, show_calls, start
from pydantic import Field

import sglite as sgl

QUESTION = "How do I sleep well?"
EXAMPLE = (
    sgl.system("You write short, useful advice.")
    + sgl.user("How do I grow tomatoes? Give 3 points.")
    + sgl.assistant('["Plenty of sun", "Regular water", "Good soil"]')
    + sgl.user("Explain the point: Plenty of sun")
    + sgl.assistant("Tomatoes need at least six hours of sunlight every day.")
)


def points_of(count: int) -> object:
    """The type of ``count`` short headings."""
    heading = Annotated[str, Field(min_length=4, max_length=30)]
    return Annotated[list[heading], Field(min_length=count, max_length=count)]


@sgl.function
def explain(s: sgl.ProgramState, question: str, count: int) -> list[tuple[str, str]]:
    """Heading and text of every point."""
    s += EXAMPLE
    s += sgl.user(f"{question} Give {count} points.")
    s += sgl.assistant(sgl.gen("points", schema=points_of(count), max_tokens=100, temperature=0))
    points = s.value("points")
    branches = s.fork(len(points))
    branches += lambda i: sgl.user(f"Explain the point: {points[i]}")
    branches += lambda i: sgl.assistant(sgl.gen("text", max_tokens=48, temperature=0, stop=["\n", "."]))
    branches.join()
    return list(zip(points, s["text"], strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION, help=f"default: {QUESTION}")
    parser.add_argument("--points", type=int, default=3, metavar="N", help="points of the answer (default: 3)")
    options = start(parser, arguments)
    began = time.perf_counter()
    state = explain.run(options.question, options.points)
    seconds = time.perf_counter() - began
    console.print(f"[bold]{options.question}[/bold]")
    for heading, text in state.ret_value:
        console.print(f"  [bold]{heading}[/bold]: {text.strip()}.")
    one_by_one = sum(call.wall for call in state.trace())
    console.print(f"\n{seconds:.2f} s; the same calls one after the other: about {one_by_one:.2f} s")
    show_calls([state])


if __name__ == "__main__":
    run(main)
