"""Who goes first: pure functions over plain data, chosen by name.

Whatever the policy, the scheduler serves higher priorities first, and a sequence that has waited past its turn by
``PATIENCE`` admissions goes next: that is the bound on starvation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglite.errors import ConfigError

PATIENCE = 128
"""How many admissions a waiting sequence may be passed over beyond its turn in order of arrival."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence as policies see it; ``cached`` of its ``tokens`` positions are in the prefix cache."""

    arrival: int
    tokens: int
    cached: int


Key = Callable[[Candidate], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Policy:
    """Of equal priorities the least ``key`` goes first; without a key, the order of arrival.

    ``reads_cache`` says that the key looks at ``cached``, which costs a look-up.
    """

    key: Key | None = None
    reads_cache: bool = False


def longest_prefix(candidate: Candidate) -> tuple[int, ...]:
    return (-candidate.cached, candidate.arrival)


POLICIES = {
    "fcfs": Policy(),
    "longest-prefix": Policy(longest_prefix, reads_cache=True),
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
