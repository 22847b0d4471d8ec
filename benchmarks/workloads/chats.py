"""Conversations of four turns: long questions with short or long answers."""

from __future__ import annotations

import sglite as sgl
from workloads.base import Count, Inputs, Workload, Writer, free

TURNS = 4


@sgl.function
def chat(s, turns):
    s += sgl.system("You are a helpful assistant.")
    for i, (question, tokens) in enumerate(turns):
        s += sgl.user(question)
        s += sgl.assistant(free(f"answer{i}", tokens))
    return s[f"answer{len(turns) - 1}"]


def short_inputs(writer: Writer, number: int) -> Inputs:
    """Questions of 256-512 tokens, answers of 4-8."""
    return [{"turns": _turns(writer, 4, 8)} for _ in range(number)]


def long_inputs(writer: Writer, number: int) -> Inputs:
    """Questions of 256-512 tokens, answers of 256-512."""
    return [{"turns": _turns(writer, 256, 512)} for _ in range(number)]


def _turns(writer: Writer, low: int, high: int) -> list[tuple[str, int]]:
    return [(writer.text(writer.between(256, 512)), writer.between(low, high)) for _ in range(TURNS)]


WORKLOADS = (
    Workload("chat-short", "chat, 4 turns, 256-512 in, 4-8 out", chat, short_inputs, Count(6, 1)),
    Workload("chat-long", "chat, 4 turns, 256-512 in, 256-512 out", chat, long_inputs, Count(3, 0, 1)),
)
