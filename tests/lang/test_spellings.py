"""The sum over spellings against brute force, on a model small enough to know everything about."""

from __future__ import annotations

import asyncio
import math
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglite as sgl
from sglite.lang.choices import Row
from sglite.lang.paths import NEGLIGIBLE, sum_over_spellings
from sglite.protocol import Prompt, Text, TokenLogprob, Tokens

VOCABULARY = ("a", "b", "c", "ab", "bc", "abc", "ca", "bca")


@cache
def logprob(history: tuple[str, ...], token: str) -> float:
    """Some distribution over the vocabulary after every history of tokens."""
    weights = {t: random.Random(repr((history, t))).random() for t in VOCABULARY}
    return math.log(weights[token] / sum(weights.values()))


def encode(text: str) -> list[str]:
    """The usual spelling: the longest token first."""
    tokens = []
    while text:
        token = max((t for t in VOCABULARY if text.startswith(t)), key=len)
        tokens.append(token)
        text = text[len(token) :]
    return tokens


def brute_force(text: str, history: tuple[str, ...] = ()) -> float:
    """The probability of the text, summed over every spelling."""
    if not text:
        return 1.0
    steps = [t for t in VOCABULARY if text.startswith(t)]
    return sum(math.exp(logprob(history, t)) * brute_force(text[len(t) :], (*history, t)) for t in steps)


def row(text: str, history: tuple[str, ...]) -> Row:
    tokens = encode(text)
    return tuple(
        TokenLogprob(VOCABULARY.index(t), logprob((*history, *tokens[:i]), t), t) for i, t in enumerate(tokens)
    )


async def score(prompt: Prompt, texts: tuple[str, ...]) -> dict[str, Row]:
    assert isinstance(prompt[0], Text)
    history = tuple(VOCABULARY[i] for s in prompt[1:] if isinstance(s, Tokens) for i in s.ids)
    return {text: row(text, history) for text in texts}


def usual(text: str) -> float:
    return math.fsum(token.logprob or 0.0 for token in row(text, ()))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
def test_the_sum_is_the_sum(texts) -> None:
    sums = asyncio.run(sum_over_spellings((Text("x"),), {text: usual(text) for text in texts}, score))
    for text in texts:
        truth = brute_force(text)
        assert truth * (1 - 100 * NEGLIGIBLE) <= math.exp(sums[text]) <= truth * (1 + 1e-9)
        assert sums[text] >= usual(text) - 1e-9


def test_a_text_that_is_too_long_keeps_its_usual_spelling() -> None:
    long = "abc" * 30
    assert asyncio.run(sum_over_spellings((Text("x"),), {long: -3.0}, score)) == {long: -3.0}


def test_exact_in_a_program(engine) -> None:
    """On bytes there is one spelling, so the sum is the plain probability, and one request per byte is enough."""

    @sgl.function
    def pick(s):
        s += "a:" + sgl.select("x", ["red", "green"], choices_method=sgl.exact)

    state = pick.run(backend=engine)
    assert state["x"] == "red"
    scores = state.get_meta_info("x")["scores"]
    assert scores["red"] == pytest.approx(0, abs=0.1)
