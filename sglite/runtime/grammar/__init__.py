"""Structured generation: constraints compiled to matchers that mask, check and finish a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglite.errors import ConfigError

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
