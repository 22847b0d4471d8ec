"""Structured generation: constraints compiled to matchers that mask, check and finish a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglite.runtime.grammar.cache import GrammarCache
    from sglite.runtime.grammar.vocabulary import Vocabulary


def grammar_cache(choice: str, vocabulary: Vocabulary) -> GrammarCache:
    """The cache an engine compiles its constraints with; ``choice`` is EngineConfig.grammar."""
    from sglite.runtime.grammar.cache import GrammarCache
    from sglite.runtime.grammar.guard import GuardedBackend
    from sglite.runtime.grammar.llguidance_backend import LLGuidanceBackend

    assert choice == "llguidance", choice
    return GrammarCache(GuardedBackend(LLGuidanceBackend(vocabulary)))
