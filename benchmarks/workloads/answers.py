"""One or two calls per program after a long common beginning: MMLU, HellaSwag, retrieval, JSON, shared prefixes."""

from __future__ import annotations

import json
from itertools import accumulate

import sglite as sgl
from workloads.base import Count, Inputs, Workload, Writer, free

LETTERS = "ABCD"


@sgl.function
def mmlu(s, shots, question):
    s += shots + question + "\nAnswer:"
    s += free("answer", 1)


def mmlu_inputs(writer: Writer, number: int) -> Inputs:
    """Four subjects with five worked questions each."""
    subjects = ["".join(f"{_question(writer)}\nAnswer: {writer.pick(LETTERS)}\n\n" for _ in range(5)) for _ in range(4)]
    return [{"shots": subjects[i % 4], "question": _question(writer)} for i in range(number)]


def _question(writer: Writer) -> str:
    options = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, writer.texts(4, 8), strict=True))
    return f"Question: {writer.text(40)}{options}"


@sgl.function
def hellaswag(s, shots, context, endings):
    s += shots + context + " " + sgl.select("ending", endings)


def hellaswag_inputs(writer: Writer, number: int) -> Inputs:
    """Twenty finished stories, then one with four endings."""
    shots = "".join(f"{writer.text(60)} {writer.text(24)}\n\n" for _ in range(20))
    return [{"shots": shots, "context": writer.text(50), "endings": writer.texts(4, 24)} for _ in range(number)]


@sgl.function
def dspy_rag(s, shots, question, passages):
    s += shots + f"Question: {question}\nSearch query:"
    s += free("query", 16)
    s += "\nContext:\n" + "".join(f"[{i}] {text}\n" for i, text in enumerate(passages, 1)) + "Reasoning:"
    s += free("rationale", 40)
    s += "\nAnswer:"
    s += free("answer", 12)


def dspy_rag_inputs(writer: Writer, number: int) -> Inputs:
    """Four bootstrapped examples; three passages per question, from a corpus of a dozen."""
    corpus = writer.texts(12, 100)
    shots = "".join(
        f"Question: {writer.text(20)}\nReasoning: {writer.text(60)}\nAnswer: {writer.text(6)}\n\n" for _ in range(4)
    )
    found = (writer.random.sample(corpus, 3) for _ in range(number))
    return [{"shots": shots, "question": writer.text(20), "passages": passages} for passages in found]


CHARACTER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "house": {"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        "blood_status": {"enum": ["Pure-blood", "Half-blood", "Muggle-born"]},
        "occupation": {"enum": ["student", "teacher", "auror", "ministry official", "other"]},
        "wand": {
            "type": "object",
            "properties": {
                "wood": {"type": "string", "minLength": 1, "maxLength": 12},
                "core": {"enum": ["phoenix feather", "dragon heartstring", "unicorn hair"]},
                "length_in_inches": {"type": "integer", "minimum": 6, "maximum": 18},
            },
            "required": ["wood", "core", "length_in_inches"],
            "additionalProperties": False,
        },
        "alive": {"type": "boolean"},
        "patronus": {"type": "string", "minLength": 1, "maxLength": 16},
        "year_of_birth": {"type": "integer", "minimum": 1800, "maximum": 2020},
    },
    "required": ["name", "house", "blood_status", "occupation", "wand", "alive", "patronus", "year_of_birth"],
    "additionalProperties": False,
}


@sgl.function
def json_decoding(s, document):
    s += f"{document}\n\nPlease extract the character of the text above as JSON.\n"
    s += sgl.gen("character", json_schema=json.dumps(CHARACTER), max_tokens=256, temperature=0)


def json_inputs(writer: Writer, number: int) -> Inputs:
    return [{"document": writer.text(300)} for _ in range(number)]


@sgl.function
def shared_prefix(s, prefix, suffix):
    s += f"{prefix}\n\n{suffix}"
    s += free("answer", 16)


def shared_prefix_inputs(
    writer: Writer, number: int, *, groups: int = 8, prefix: int = 512, suffix: int = 64
) -> Inputs:
    """Prompts of ``groups`` groups; which one is drawn by Zipf's law, so some are asked often and some hardly ever."""
    prefixes = writer.texts(groups, prefix)
    weights = list(accumulate(1 / rank for rank in range(1, groups + 1)))
    drawn = writer.random.choices(prefixes, cum_weights=weights, k=number)
    return [{"prefix": text, "suffix": writer.text(suffix)} for text in drawn]


WORKLOADS = (
    Workload("mmlu", "5-shot MMLU: one token after 4 x 5 examples", mmlu, mmlu_inputs, Count(64, 8)),
    Workload("hellaswag", "20-shot HellaSwag: select 1 of 4 endings", hellaswag, hellaswag_inputs, Count(12, 4)),
    Workload("dspy-rag", "DSPy-style retrieval: query, passages, answer", dspy_rag, dspy_rag_inputs, Count(16, 2)),
    Workload(
        "json",
        "JSON decoding: a character of 10 fields",
        json_decoding,
        json_inputs,
        Count(8, 2),
        {"character": CHARACTER},
    ),
    Workload(
        "shared-prefix", "8 prefixes of 512, Zipf; 64 own, 16 out", shared_prefix, shared_prefix_inputs, Count(48, 8)
    ),
)
