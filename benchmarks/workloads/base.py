"""What a workload is, and the seeded text that all of them are made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jsonschema

import sglite as sgl

Inputs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Count:
    """Programs of a run: in the full form, in the quick one (0: left out of it), and of those that run alone."""

    full: int
    quick: int
    alone: int = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """``inputs(writer, n)`` are the arguments of ``n`` runs. ``schemas`` names the variables that must be valid JSON
    under a schema, ``choices`` those that must be one of some texts."""

    name: str
    title: str
    program: sgl.Program
    inputs: Callable[[Writer, int], Inputs]
    count: Count
    schemas: Mapping[str, Mapping[str, Any]] | None = None

    def valid(self, state: sgl.ProgramState) -> tuple[int, int]:
        """Of the answers that had to be JSON of some form, how many were, and how many there are."""
        wanted = (self.schemas or {}).items()
        return sum(_fits(state[name], schema) for name, schema in wanted), len(wanted)


def _fits(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def free(name: str, tokens: int) -> Any:
    """A gen of exactly ``tokens`` tokens, so that every contestant does the same work."""
    return sgl.gen(name, max_tokens=tokens, temperature=0, ignore_eos=True)


# -------------------------------------------------------------------------------------------------------------- text


@dataclass
class Prose:
    """English prose that every Python carries, the language reference behind ``help()``, word by word.

    ``count`` tells how many tokens a text has; words are counted once, each with the space before it.
    """

    count: Callable[[str], int]

    @cached_property
    def words(self) -> list[tuple[str, int]]:
        from pydoc_data.topics import topics

        words = [w for name in sorted(topics) for w in topics[name].split() if w.strip(".,;:").isalpha()]
        sizes = {word: self.count(" " + word) for word in set(words)}
        return [(word, sizes[word]) for word in words]


@dataclass
class Writer:
    """Texts of a wanted length in tokens. A function of the key alone: everybody gets the same, no key repeats one."""

    prose: Prose
    key: str

    def __post_init__(self) -> None:
        self.random = random.Random(self.key)

    def text(self, tokens: int) -> str:
        """About ``tokens`` tokens of consecutive words, beginning somewhere."""
        words = self.prose.words
        at, length, taken = self.random.randrange(len(words)), 0, []
        while length < tokens:
            word, size = words[at % len(words)]
            taken.append(word)
            length += size
            at += 1
        return " ".join(taken)

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def texts(self, number: int, tokens: int) -> list[str]:
        return [self.text(tokens) for _ in range(number)]

    def pick(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)
