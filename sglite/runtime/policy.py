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

QUANTUM = 2048
"""Tokens after which a program first counts as a long one; each next level is twice as long."""

Rank = tuple[int, ...]
"""A place in line: the least goes first, and the last is the first to give way. The scheduler adds the arrival."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank is made of. A request without a program is one of its own.

    ``arrival`` is the program's, ``attained`` how many tokens were computed for it so far; ``resident`` says that it
    keeps a prefix in the cache.
    """

    priority: int
    resident: bool
    arrival: int
    attained: int


@dataclass(frozen=True, slots=True)
class Policy:
    """``rank`` is taken at submission.

    With ``cached_first`` those with most cached positions overtake others in the front of the queue. With
    ``by_program`` a program's calls are one, and its prefixes are kept while it is between two of them.
    """

    rank: Callable[[Standing], Rank]
    cached_first: bool = False
    by_program: bool = False


def by_arrival(standing: Standing) -> Rank:
    return (-standing.priority,)


def least_attained(standing: Standing) -> Rank:
    """Programs with a prefix to lose first, so that they end and make room; then those that had little so far, as they
    are likely short; of about equal ones the oldest."""
    level = (standing.attained // QUANTUM).bit_length()
    return (-standing.priority, int(not standing.resident), level, standing.arrival)


POLICIES = {
    "fcfs": Policy(by_arrival),
    "longest-prefix": Policy(by_arrival, cached_first=True),
    "program": Policy(least_attained, by_program=True),
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
