"""Typed facts out of three short notes: roles, fork, gen, select and a schema-constrained gen, streamed.

Run it as it is (`make demo`), on another model (`--model path/to/folder`), against a running server
(`--backend http://127.0.0.1:30000`), or with `sglite run`, which sets a backend for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

import sglite as sgl

NOTES = (
    "Maria from Lisbon ordered 3 blue lamps yesterday. She will pay by card.",
    "Tom wrote from Oslo: the 2 chairs he bought arrived broken and he is very angry.",
    "Aiko in Kyoto asks whether the 12 cups she wants can go into the dishwasher.",
)
MOODS = ["happy", "angry", "curious"]
FAIR = sgl.unconditional_likelihood_normalized  # a small model prefers common words: weigh that out


class Facts(BaseModel):
    customer: str = Field(max_length=20)
    city: str = Field(max_length=20)
    amount: int = Field(ge=0, le=100)


@sgl.function
def read_note(s: sgl.ProgramState, note: str, console: Console) -> Facts:
    s += sgl.system("You read notes of a shop and answer questions about them.")
    s += sgl.user(f"The note: {note}")
    s += sgl.assistant("I have read the note. What do you want to know?")
    mood, facts, wish = s.fork(3)  # three questions about one note: its tokens are computed once
    mood += sgl.user("How does the customer feel: happy, angry or curious?")
    mood += sgl.assistant("The customer is " + sgl.select("mood", MOODS, choices_method=FAIR))
    facts += sgl.user("Write the customer, the city and the amount as JSON.")
    facts += sgl.assistant(sgl.gen("facts", schema=Facts, temperature=0, max_tokens=64))
    wish += sgl.user("In one short sentence: what does the customer want?")
    wish += sgl.assistant(sgl.gen("wish", temperature=0, max_tokens=40, stop=[".", "\n"]))

    console.print(f"\n[bold]{note}[/bold]")
    console.print("  mood   " + mood["mood"])
    show(console, "  json   ", facts, "facts")
    show(console, "  wish   ", wish, "wish")
    return facts.value("facts")


def show(console: Console, label: str, s: sgl.ProgramState, name: str) -> None:
    """A variable's text while it is being generated."""
    console.print(label, end="")
    for piece in s.text_iter(name):
        console.print(piece, end="", markup=False, highlight=False)
    console.print()


def calls_table(states: Sequence[sgl.ProgramState]) -> Table:
    table = Table("note", "call", "prompt tokens", "cached", "new", "first token", "tokens/s", title="every call")
    for number, state in enumerate(states, 1):
        for call in state.trace():
            first = "-" if call.ttft is None else f"{call.ttft * 1000:.0f} ms"
            speed = f"{call.tokens_per_second:.0f}" if call.new_tokens else "-"
            counts = (str(n) for n in (call.prompt_tokens, call.cached_tokens, call.new_tokens))
            table.add_row(str(number), f"{call.kind} {call.name}", *counts, first, speed)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="registry name, folder or .gguf file (default: smollm2-135m)")
    parser.add_argument("--backend", help="URL of a running sglite server, instead of loading a model here")
    options = parser.parse_args(arguments)
    console = Console()
    if options.backend:
        sgl.set_default_backend(sgl.RuntimeEndpoint(options.backend))
    elif options.model or sgl.get_default_backend() is None:
        sgl.set_default_backend(sgl.Engine(model=options.model or "smollm2-135m"))
    states = [read_note.run(note, console) for note in NOTES]
    console.print("\n[bold]typed[/bold]", *[f"  {state.ret_value!r}" for state in states], sep="\n")
    console.print(calls_table(states))


if __name__ == "__main__":
    main()
