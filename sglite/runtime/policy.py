"""Who goes first: pure functions over plain data, chosen by name.

Whatever the policy, higher priorities go first, and a sequence that has waited past its turn by ``PATIENCE``
admissions goes next: that is the bound on starvation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglite.errors import ConfigError

PATIENCE = 128
"""How many admissions a waiting sequence may be passed over beyond its turn in order of arrival."""

Rank = tuple[int, ...]
"""A place in line; the least goes first. The last to arrive in line is also the first to give way."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank is made of. ``arrival`` counts sequences, ``program_arrival`` is that of the program's first one."""

    priority: int
    arrival: int
    program_arrival: int
    attained: int
    """Tokens computed for the program so far."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``rank`` is given at submission. With ``cached_first`` those with most cached positions overtake in the front of
    the queue. With ``retains`` a program's prefix is kept while it is between calls."""

    rank: Callable[[Standing], Rank]
    cached_first: bool = False
    retains: bool = False


def by_arrival(standing: Standing) -> Rank:
    return (-standing.priority, standing.arrival)


POLICIES = {
    "fcfs": Policy(by_arrival),
    "longest-prefix": Policy(by_arrival, cached_first=True),
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]


class OutputShare:
    """The share of their allowed output that sequences use, learned from those that ended.

    Admission reserves it for everyone, so that few sequences are retracted and the pool is still full.
    """

    def __init__(self) -> None:
        self.value = 0.1

    def ended(self, share: float) -> None:
        self.value += 0.05 * (share - self.value)

    def retracted(self) -> None:
        """The reserve was too small."""
        self.value += 0.1 * (1.0 - self.value)
