"""The works: what is asked of every contestant, how the answers are checked, and what is counted.

Prompts are token ids cut from prose, a function of seed, work and try alone: every contestant gets the same ones, and
no try repeats an earlier one's, so that every work begins cold, also where a cache cannot be flushed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jsonschema

Ids = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]

LABELS = (" World", " Sports", " Business", " Science")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["order", "complaint", "question"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Request:
    """Greedy; with neither ``choices`` nor ``schema`` the answer has exactly ``max_tokens`` tokens (EOS ignored)."""

    ids: Ids
    max_tokens: int
    choices: tuple[str, ...] = ()
    schema: dict[str, Any] | None = None

    @property
    def free(self) -> bool:
        return not self.choices and self.schema is None


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests sent at once. ``stream``: the time of the first token is wanted."""

    requests: tuple[Request, ...]
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds from sending a batch to the first token of its first request (where it was streamed) and to the end of
    all; tokens and text of each answer (an empty text: not looked at)."""

    wall: float
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    first: float = 0.0


class WrongAnswerError(Exception):
    """A contestant that did not do the work, so that its time means nothing."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    title: str
    unit: str
    more_is_better: bool


@dataclass(frozen=True, slots=True)
class Work:
    """``batches`` run one after the other; ``needs`` names the abilities without which a contestant sits it out;
    ``measure`` gives a value per metric."""

    name: str
    metrics: tuple[Metric, ...]
    batches: Callable[[Cutter], tuple[Batch, ...]]
    measure: Callable[[Sequence[Outcome]], tuple[float, ...]]
    needs: frozenset[str] = frozenset()


# --------------------------------------------------------------------------------------------------------- prompts


@dataclass
class Prose:
    """English prose that every Python carries, the language reference behind ``help()``, as token ids."""

    encode: Encode
    seed: int = 0
    characters: int = 250_000

    @cached_property
    def ids(self) -> Ids:
        from pydoc_data.topics import topics

        text = "\n".join(" ".join(topics[name].split()) for name in sorted(topics))
        return tuple(self.encode(text[: self.characters]))

    def cutter(self, *key: object) -> Cutter:
        return Cutter(self.ids, self.encode, random.Random(f"{self.seed} {key}"))


@dataclass
class Cutter:
    prose: Ids
    encode: Encode
    random: random.Random

    def cut(self, length: int) -> Ids:
        start = self.random.randrange(len(self.prose) - length)
        return self.prose[start : start + length]

    def text(self, value: str) -> Ids:
        return tuple(self.encode(value))


# ----------------------------------------------------------------------------------------------------------- works


def _one_stream(cutter: Cutter) -> tuple[Batch, ...]:
    return (Batch((Request(cutter.cut(128), 256),), stream=True),)


def _many_streams(cutter: Cutter) -> tuple[Batch, ...]:
    return (Batch(tuple(Request(cutter.cut(128), 128) for _ in range(32))),)


def _shared_prefix(cutter: Cutter) -> tuple[Batch, ...]:
    prefix = cutter.cut(1024)
    cold, warm = (Batch(tuple(Request(prefix + cutter.cut(32), 32) for _ in range(32))) for _ in range(2))
    return cold, warm


def _classify(cutter: Cutter) -> tuple[Batch, ...]:
    """16 examples, then 32 texts of 24 tokens to label."""
    prefix: Ids = ()
    for label in LABELS * 4:
        prefix += cutter.cut(24) + cutter.text(f"\nTopic:{label}\n\n")
    question = cutter.text("\nTopic:")
    return (Batch(tuple(Request(prefix + cutter.cut(24) + question, 8, choices=LABELS) for _ in range(32))),)


def _long_prompt(cutter: Cutter) -> tuple[Batch, ...]:
    return (Batch((Request(cutter.cut(2048), 1),)),)


def _extract(cutter: Cutter) -> tuple[Batch, ...]:
    question = cutter.text("\n\nThe customer's message as JSON with name, count and kind:\n")
    return (Batch(tuple(Request(cutter.cut(64) + question, 128, schema=SCHEMA) for _ in range(16))),)


def _first_and_rate(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    (one,) = outcomes
    return one.first * 1e3, (one.tokens[0] - 1) / (one.wall - one.first)


def _output_rate(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    return tuple(sum(one.tokens) / one.wall for one in outcomes)


def _walls(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    return tuple(one.wall for one in outcomes)


def _request_rate(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    return tuple(len(one.tokens) / one.wall for one in outcomes)


def _prompt_rate(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    return tuple(2048 / one.wall for one in outcomes)


WORKS = {
    work.name: work
    for work in (
        Work(
            "a",
            (
                Metric("a ttft", "1 stream, 128 in / 256 out: time to first token", "ms", False),
                Metric("a", "1 stream, 128 in / 256 out: decode", "tok/s", True),
            ),
            _one_stream,
            _first_and_rate,
        ),
        Work("b", (Metric("b", "32 streams, 128 in / 128 out: output", "tok/s", True),), _many_streams, _output_rate),
        Work(
            "c",
            (
                Metric("c", "32 x (1,024 shared + 32 own), 32 out, cold", "s", False),
                Metric("c warm", "the same prefix again, other suffixes", "s", False),
            ),
            _shared_prefix,
            _walls,
        ),
        Work(
            "d",
            (Metric("d", "32 x one of 4 labels after 16 examples", "req/s", True),),
            _classify,
            _request_rate,
            frozenset({"choices"}),
        ),
        Work("e", (Metric("e", "one prompt of 2,048 tokens, 1 out", "tok/s", True),), _long_prompt, _prompt_rate),
        Work(
            "f",
            (Metric("f", "16 x JSON schema: string, integer, enum", "s", False),),
            _extract,
            _walls,
            frozenset({"schema"}),
        ),
    )
}


def warm_up(cutter: Cutter, abilities: frozenset[str]) -> list[Batch]:
    """A little of everything a contestant can, so that nothing is compiled or allocated on the clock."""
    some = [Request(cutter.cut(128), 8) for _ in range(8)]
    batches = [Batch(tuple(some[:1]), stream=True), Batch(tuple(some)), Batch((Request(cutter.cut(1024), 1),))]
    able = [work for work in (WORKS["d"], WORKS["f"]) if work.needs <= abilities]
    return batches + [Batch(work.batches(cutter)[0].requests[:2]) for work in able]


# ---------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the answers that had to be of a certain form, how many were."""

    valid: int = 0
    checked: int = 0
    wrong: tuple[str, ...] = ()


def judge(batch: Batch, outcome: Outcome) -> Verdict:
    """Raises WrongAnswerError where free answers do not have the length that was asked for."""
    for request, tokens in zip(batch.requests, outcome.tokens, strict=True):
        if request.free and tokens != request.max_tokens:
            raise WrongAnswerError(f"gave {tokens} of {request.max_tokens} tokens")
    pairs = [(r, t) for r, t in zip(batch.requests, outcome.texts, strict=True) if not r.free]
    wrong = tuple(text for request, text in pairs if not _fits(request, text))
    return Verdict(len(pairs) - len(wrong), len(pairs), wrong)


def _fits(request: Request, text: str) -> bool:
    if request.choices:
        return text in request.choices
    try:
        jsonschema.validate(json.loads(text), request.schema or {})
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
