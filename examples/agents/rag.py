"""Questions about a folder of text files: full-text search finds the passages, the answer names its source.

The index is SQLite's (FTS5, ranked by BM25), in memory. Passages stand in the prompt before the question and in a fixed
order, so questions that need the same passages share them: they are computed once. The citation is typed: it can only
be the name of a passage that was in the prompt.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from common import command_line, console, run, show_calls, start
from pydantic import BaseModel, Field, create_model

import sglite as sgl

DOCUMENTS = Path(__file__).parent / "documents"
QUESTIONS = (
    "In which year was the lighthouse built?",
    "How many steps lead to the top of the lighthouse?",
    "Which animals live in the harbour?",
    "At what time does the ferry leave?",
)
EXAMPLE = (
    sgl.user("[bakery-1] The bakery opens at 6 in the morning.\n[bakery-2] Its rye bread costs 4 coins.")
    + sgl.assistant("I have read the passages.")
    + sgl.user("How much is the rye bread?")
    + sgl.assistant('{"answer": "It costs 4 coins.", "source": "bakery-2"}')
    + sgl.user("And when does the bakery open?")
    + sgl.assistant('{"answer": "At 6 in the morning.", "source": "bakery-1"}')
)


class Index:
    """Passages of all ``.txt`` files below a folder, one per paragraph."""

    def __init__(self, folder: Path) -> None:
        self._rows = sqlite3.connect(":memory:")
        self._rows.execute("create virtual table passages using fts5(name, text, tokenize='porter')")
        for path in sorted(folder.rglob("*.txt")):
            paragraphs = re.split(r"\n\s*\n", path.read_text(encoding="utf-8").strip())
            rows = [(f"{path.stem}-{number}", text) for number, text in enumerate(paragraphs, 1)]
            self._rows.executemany("insert into passages values (?, ?)", rows)

    def search(self, question: str, limit: int) -> dict[str, str]:
        """The best passages by BM25, by name; in the order of their names, so that prompts begin alike."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w{3,}", question))
        if not words:
            return {}
        found = self._rows.execute("select name, text from passages(?) order by rank limit ?", (words, limit))
        return dict(sorted(found.fetchall()))


def cited(names: Sequence[str]) -> type[BaseModel]:
    """An answer whose source is one of ``names``."""
    source: Any = Literal[tuple(names)]
    return create_model("Cited", answer=(str, Field(min_length=1, max_length=120)), source=(source, ...))


@sgl.function
def answer(s: sgl.ProgramState, question: str, passages: dict[str, str]) -> BaseModel:
    s += sgl.system("You answer questions from the given passages only.") + EXAMPLE
    s += sgl.user("\n".join(f"[{name}] {text}" for name, text in passages.items()))
    s += sgl.assistant("I have read the passages.") + sgl.user(question)
    s += sgl.assistant(sgl.gen("cited", schema=cited(list(passages)), temperature=0, max_tokens=80))
    return s.value("cited")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("question", nargs="*", help="questions, each in quotes (default: four about a small town)")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS, metavar="FOLDER", help="a folder of .txt files")
    parser.add_argument("--passages", type=int, default=2, metavar="N", help="passages per question (default: 2)")
    options = start(parser, arguments)
    index = Index(options.documents)
    found = {question: index.search(question, options.passages) for question in options.question or QUESTIONS}
    for question in [question for question, passages in found.items() if not passages]:
        console.print(f"[bold]{question}[/bold]\n  no passage speaks of this")
    batch = [{"question": question, "passages": passages} for question, passages in found.items() if passages]
    states = answer.run_batch(batch)
    for call, state in zip(batch, states, strict=True):
        console.print(f"[bold]{call['question']}[/bold]")
        reply = state.ret_value
        console.print(f"  {reply.answer}  [dim]({reply.source})[/dim]" if reply else f"  failed: {state.error()}")
    show_calls(states)


if __name__ == "__main__":
    run(main)
