"""Typed facts out of short notes: roles, fork, gen, select and a schema-constrained gen, streamed or as a batch.

Without a file, three notes are read aloud, piece by piece. With --notes FILE (one note a line) all are done at once and
come out as JSON lines, on standard output or in --out FILE; a note that fails says so on its own line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common import command_line, console, run, start
from pydantic import BaseModel, Field
from rich.table import Table

import sglite as sgl

NOTES = (
    "Maria from Lisbon ordered 3 blue lamps yesterday. She will pay by card.",
    "Tom wrote from Oslo: the 2 chairs he bought arrived broken and he is very angry.",
    "Aiko in Kyoto asks whether the 12 cups she wants can go into the dishwasher.",
)
ITEMS = ["lamps", "chairs", "cups", "plates"]


class Facts(BaseModel):
    customer: str = Field(max_length=20)
    city: str = Field(max_length=20)
    amount: int = Field(ge=0, le=100)


def begin(s: sgl.ProgramState, note: str) -> None:
    s += sgl.system("You read notes of a shop and answer questions about them.")
    s += sgl.user(f"The note: {note}")
    s += sgl.assistant("I have read the note. What do you want to know?")


def ask_facts(s: sgl.ProgramState) -> None:
    s += sgl.user("Write the customer, the city and the amount as JSON.")
    s += sgl.assistant(sgl.gen("facts", schema=Facts, temperature=0, max_tokens=64))


@sgl.function
def extract(s: sgl.ProgramState, note: str) -> Facts:
    begin(s, note)
    ask_facts(s)
    return s.value("facts")


@sgl.function
def read_note(s: sgl.ProgramState, note: str) -> Facts:
    begin(s, note)
    item, facts, advice = s.fork(3)  # three questions about one note: its tokens are computed once
    item += sgl.user("Which thing is the note about?")
    item += sgl.assistant("The note is about the " + sgl.select("item", ITEMS))
    ask_facts(facts)
    advice += sgl.user("What should the shop do? Answer in one short sentence.")
    advice += sgl.assistant("The shop should" + sgl.gen("advice", temperature=0, max_tokens=24, stop=[".", ",", "\n"]))

    console.print(f"\n[bold]{note}[/bold]")
    console.print("  item    " + item["item"])
    show("  json    ", facts, "facts")
    show("  advice  ", advice, "advice")
    return facts.value("facts")


def show(label: str, s: sgl.ProgramState, name: str) -> None:
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


def extract_all(notes: Sequence[str]) -> list[str]:
    """A JSON line per note."""
    states = extract.run_batch([{"note": note} for note in notes], progress_bar=sys.stderr.isatty())
    results = [{"error": str(s.error())} if s.error() else json.loads(s["facts"]) for s in states]
    return [json.dumps({"note": note, **result}) for note, result in zip(notes, results, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--notes", type=Path, metavar="FILE", help="a text file, one note a line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON lines go (default: standard output)")
    options = start(parser, arguments)
    if options.notes:
        notes = [line for line in options.notes.read_text(encoding="utf-8").splitlines() if line.strip()]
        text = "\n".join(extract_all(notes)) + "\n"
        _ = options.out.write_text(text, encoding="utf-8") if options.out else sys.stdout.write(text)
        return
    states = [read_note.run(note) for note in NOTES]
    console.print("\n[bold]typed[/bold]", *[f"  {state.ret_value!r}" for state in states], sep="\n")
    console.print(calls_table(states))


if __name__ == "__main__":
    run(main)
