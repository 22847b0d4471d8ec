"""Structured generation: constraints compiled to matchers that mask, check and finish a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sglite.errors import ConfigError, UnsupportedError
from sglite.protocol import Constraint
from sglite.runtime.grammar.base import FillMasks, Grammar, GrammarBackend, fill_one_by_one

if TYPE_CHECKING:
    from sglite.runtime.grammar.guard import GuardedBackend
    from sglite.runtime.grammar.vocabulary import Vocabulary


def guarded_backend(choice: str, vocabulary: Vocabulary) -> GuardedBackend:
    """What an engine (through a GrammarCache) compiles its constraints with; ``choice`` is EngineConfig.grammar."""
    from sglite.runtime.grammar.guard import GuardedBackend

    if choice == "llguidance":
        from sglite.runtime.grammar.llguidance_backend import LLGuidanceBackend

        return GuardedBackend(LLGuidanceBackend(vocabulary))
    if choice == "outlines":
        from sglite.runtime.grammar.outlines_backend import OutlinesBackend

        return GuardedBackend(OutlinesBackend(vocabulary))
    raise ConfigError(f"grammar={choice} is not known; use llguidance or outlines")


class MissingBackend:
    """Stands in where the library is not installed: the engine serves everything but constraints."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.name = name

    def compile(self, constraint: Constraint) -> Grammar:
        raise UnsupportedError(
            f"{constraint.kind} needs the package {self.name}, which is not installed here: pip install {self.name}",
            param=constraint.kind,
        )


def grammar_backend(choice: str, vocabulary: Vocabulary) -> tuple[GrammarBackend, FillMasks]:
    """The backend of that name and how to fill its masks; without its library, one that refuses every constraint."""
    try:
        backend = guarded_backend(choice, vocabulary)
    except ImportError:
        return MissingBackend({"llguidance": "llguidance", "outlines": "outlines-core"}[choice]), fill_one_by_one
    from sglite.runtime.grammar.guard import fill_batch

    return backend, cast(FillMasks, fill_batch)  # all matchers of this backend are of its own kind
