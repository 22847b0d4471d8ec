"""Tree of thought: branches propose ideas, each is judged by its probability, and only the best go on.

Every level forks the surviving states; a branch proposes an idea (drawn with its own seed), and the probability that
the model calls it practical is its score. The question and every surviving idea are computed once, however wide the
tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common import command_line, console, exact_if_possible, run, show_calls, start
from rich.tree import Tree

import sglite as sgl

QUESTION = "How can I learn a language faster?"
VERDICTS = ["practical", "silly"]
LEVELS = ("Suggest one idea in one short sentence.", "Why is that a good idea? Answer in one short sentence.")


@dataclass
class Thought:
    """``score`` is the probability of being practical; ``parent`` the number of the thought it goes on from."""

    text: str
    score: float
    parent: int | None = None
    kept: bool = False


def propose(s: sgl.ProgramState, ask: str, seed: int) -> None:
    s += sgl.user(ask)
    s += sgl.assistant(sgl.gen("idea", max_tokens=32, temperature=0.6, seed=seed, stop=["\n", "."]))


def judge(s: sgl.ProgramState) -> float:
    with s.copy() as aside:  # the verdict is not part of what the next level reads
        aside += sgl.user("Is that practical or silly?")
        aside += sgl.assistant("It is " + sgl.select("verdict", VERDICTS, choices_method=exact_if_possible()))
        meta = aside.get_meta_info("verdict")
    return float(meta["probabilities"][0]) if "probabilities" in meta else float(aside["verdict"] == VERDICTS[0])


@sgl.function
def think(s: sgl.ProgramState, question: str, width: int, beam: int) -> list[list[Thought]]:
    """All levels of the tree."""
    s += sgl.system("You give short, practical advice.")
    s += sgl.user(question) + sgl.assistant("Let me think about it.")
    alive: list[tuple[int | None, sgl.ProgramState]] = [(None, s)]
    levels: list[list[Thought]] = []
    for ask in LEVELS:
        branches = [(number, branch) for number, state in alive for branch in state.fork(width)]
        for seed, (_, branch) in enumerate(branches):
            propose(branch, ask, seed)
        level = [Thought(branch["idea"].strip(), judge(branch), number) for number, branch in branches]
        ranked = sorted(range(len(level)), key=lambda i: level[i].score, reverse=True)[:beam]
        for i in ranked:
            level[i].kept = True
        levels.append(level)
        alive = [(i, branches[i][1]) for i in ranked]
    return levels


def drawn(question: str, levels: list[list[Thought]]) -> Tree:
    root = Tree(f"[bold]{question}[/bold]")
    parents: dict[int | None, Tree] = {None: root}
    for level in levels:
        nodes: dict[int | None, Tree] = {}
        for i, thought in enumerate(level):
            label = f"{thought.score:.2f}  {thought.text}"
            nodes[i] = parents[thought.parent].add(label if thought.kept else f"[dim]{label}[/dim]")
        parents = nodes
    return root


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION, help=f"default: {QUESTION}")
    parser.add_argument("--width", type=int, default=3, metavar="N", help="ideas per thought (default: 3)")
    parser.add_argument("--beam", type=int, default=2, metavar="N", help="thoughts kept per level (default: 2)")
    options = start(parser, arguments)
    state = think.run(options.question, options.width, options.beam)
    console.print(drawn(options.question, state.ret_value))
    best = max(state.ret_value[-1], key=lambda thought: thought.score)
    console.print(f"\nbest: {state.ret_value[0][best.parent].text}. {best.text}.", markup=False)
    show_calls([state])


if __name__ == "__main__":
    run(main)
