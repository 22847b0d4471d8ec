"""Few-shot classification: the label is chosen by probability, so it is always one of the labels, without parsing.

The examples stand in front and are the same for every text: they are computed once for the whole batch. Texts come from
a file (one a line, optionally "text<TAB>label", which is then checked), or from a small set of headlines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common import command_line, console, run, show_calls, start
from rich.table import Table

import sglite as sgl

LABELS = ("sports", "science", "business", "weather")
EXAMPLES = (
    ("The team won the final after extra time", "sports"),
    ("Astronomers find water on a distant planet", "science"),
    ("Shares of the car maker fell by ten percent", "business"),
    ("Heavy rain and wind are expected on the coast", "weather"),
    ("The goalkeeper saved two penalties", "sports"),
    ("A new vaccine protects mice against malaria", "science"),
    ("The bank will close forty branches this year", "business"),
    ("A cold front brings snow to the mountains", "weather"),
)
TEXTS = (
    ("The striker scored three goals on Sunday", "sports"),
    ("Physicists measure the mass of a new particle", "science"),
    ("The airline reports a record profit", "business"),
    ("Storm warnings for the weekend", "weather"),
    ("Her serve decided the tennis match", "sports"),
    ("Oil prices rise after the meeting", "business"),
)


@sgl.function
def classify(s: sgl.ProgramState, text: str) -> str:
    s += "Headlines and their topics.\n\n"
    s += "".join(f"Headline: {example}\nTopic: {label}\n\n" for example, label in EXAMPLES)
    s += f"Headline: {text}\nTopic: " + sgl.select("label", LABELS)
    return s["label"]


def certainty(state: sgl.ProgramState) -> str:
    """How far the best label is ahead of the second, where the backend tells."""
    scores = sorted(state.get_meta_info("label").get("scores", {}).values(), reverse=True)
    return f"{scores[0] - scores[1]:.1f}" if len(scores) > 1 else "-"


def read_texts(file: Path) -> list[tuple[str, str]]:
    lines = [line.partition("\t") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(text, label) for text, _, label in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--texts", type=Path, metavar="FILE", help="one text a line, optionally with a tab and a label")
    options = start(parser, arguments)
    texts = read_texts(options.texts) if options.texts else TEXTS
    states = classify.run_batch([{"text": text} for text, _ in texts], progress_bar=sys.stderr.isatty())
    table = Table("text", "label", "lead", "right")
    for (text, label), state in zip(texts, states, strict=True):
        table.add_row(text, state.ret_value, certainty(state), "" if not label else str(state.ret_value == label))
    console.print(table)
    known = [state.ret_value == label for (_, label), state in zip(texts, states, strict=True) if label]
    if known:
        console.print(f"{sum(known)} of {len(known)} right")
    show_calls(states)


if __name__ == "__main__":
    run(main)
