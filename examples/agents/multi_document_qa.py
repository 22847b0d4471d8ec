"""A question about several documents: each is read in a branch of its own, side by side, then all notes are joined.

The branches are the parallel part: every one encodes its document and notes what it says. join("concate_and_append")
appends their texts to the state, and the answer is generated from all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from common import command_line, console, run, show_calls, start
from pydantic import BaseModel, Field

import sglite as sgl

DOCUMENTS = {
    "Monday": "On Monday the baker sold 30 loaves of bread and 12 cakes. The weather was sunny.",
    "Tuesday": "On Tuesday it rained all day. The baker sold 18 loaves of bread and no cakes.",
    "Wednesday": "On Wednesday there was a market, and the baker sold 55 loaves of bread and 20 cakes.",
}
QUESTION = "How many loaves of bread did the baker sell?"


class Answer(BaseModel):
    document: str
    number: int = Field(ge=0, le=999)


@sgl.function
def ask(s: sgl.ProgramState, question: str, documents: dict[str, str]) -> list[Answer]:
    """The number that each document gives, highest last."""
    s += "You read documents and answer questions about them.\n"
    branches = s.fork(len(documents))
    for branch, (title, text) in zip(branches, documents.items(), strict=True):
        branch += f"\nDocument {title}: {text}\nQuestion: {question}\nNumber in {title}: "
        branch += sgl.gen(title, regex=r"[0-9]{1,3}\n", max_tokens=6, temperature=0)
    branches.join("concate_and_append")
    found = [
        Answer(document=title, number=int(branch[title])) for title, branch in zip(documents, branches, strict=True)
    ]
    best = max(found, key=lambda answer: answer.number)
    s += f"\nThe most was {best.number}, in the document" + sgl.select("best", list(documents))
    return sorted(found, key=lambda answer: answer.number)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("question", nargs="?", default=QUESTION, help=f"default: {QUESTION}")
    parser.add_argument("--documents", type=Path, metavar="FOLDER", help="a folder of .txt files to ask instead")
    options = start(parser, arguments)
    documents = DOCUMENTS
    if options.documents:
        documents = {path.stem: path.read_text(encoding="utf-8") for path in sorted(options.documents.glob("*.txt"))}
    began = time.perf_counter()
    state = ask.run(options.question, documents)
    console.print(f"[bold]{options.question}[/bold]", *[f"  {answer!r}" for answer in state.ret_value], sep="\n")
    console.print(f"  the model names: {state['best']} [dim]({time.perf_counter() - began:.2f} s)[/dim]")
    show_calls([state])


if __name__ == "__main__":
    run(main)
