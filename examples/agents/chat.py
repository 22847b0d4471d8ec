"""A chat of several turns, streamed: every answer stays token for token the prefix of the next one.

Without a terminal or with --demo a short conversation is played. Type your own lines otherwise; an empty line ends it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from common import command_line, console, run, start

import sglite as sgl

DEMO = ("Which country is Cairo in?", "Name one sight to see there.", "Name one dish to try there.")


def typed_lines() -> Iterator[str]:
    """What is typed, until an empty line or the end of input."""
    while line := console.input("[bold]you[/bold]  ").strip():
        yield line


@sgl.function
def chat(s: sgl.ProgramState, questions: Iterable[str], system: str, max_tokens: int) -> int:
    """The number of turns."""
    s += sgl.system(system)
    turn = 0
    for turn, question in enumerate(questions, 1):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer{turn}", max_tokens=max_tokens, temperature=0))
        show(s, question, f"answer{turn}")
    return turn


def show(s: sgl.ProgramState, question: str, name: str) -> None:
    console.print(f"[bold]you[/bold]  {question}" if not sys.stdin.isatty() else "", end="\n")
    console.print("[bold]bot[/bold]  ", end="")
    for piece in s.text_iter(name):
        console.print(piece, end="", markup=False, highlight=False)
    meta = s.get_meta_info(name)
    cut = ", cut off" if meta["finish_reason"]["type"] == "length" else ""
    console.print(f"\n     [dim]{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached{cut}[/dim]")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--system", default="You are a travel guide.", metavar="TEXT")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="longest answer (default: 48)")
    parser.add_argument("--demo", action="store_true", help="play a conversation instead of asking for lines")
    options = start(parser, arguments)
    typing = sys.stdin.isatty() and not options.demo
    state = chat.run(typed_lines() if typing else DEMO, options.system, options.max_tokens)
    console.print(f"\n{state.ret_value} turns, {len(state.text())} characters")


if __name__ == "__main__":
    run(main)
