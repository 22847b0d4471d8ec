"""Names for places in a grammar: where two texts have the same place, the same may follow, so one mask serves both.

The other way round is not promised: places that are different may allow the same. A place without a key is one of
which nothing is known. Wherever llguidance sees a choice that a text leaves open, the exact text is the name.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

LONGEST = 96
"""Bytes of exact text in a name; what is longer comes but once."""


class Places(Protocol):
    """The places of one grammar. A place is immutable; only these methods know what it is. None is an unknown place."""

    start: Any

    def after(self, place: Any, data: bytes) -> Any:
        """Where ``data`` leads, which the grammar allows there; from None, to None."""
        ...

    def key(self, place: Any) -> Hashable | None:
        """The name of the place; None where it has none."""
        ...


class TextPlaces:
    """For any grammar: a place is the text that led there."""

    start = b""

    def after(self, place: bytes | None, data: bytes) -> bytes | None:
        return None if place is None or len(place) + len(data) > LONGEST else place + data

    def key(self, place: bytes | None) -> bytes | None:
        return place
