"""Who goes first: pure functions over plain data, chosen by name.

Whatever the policy, higher priorities go first, and a sequence that has waited past its turn by ``PATIENCE``
admissions goes next: that is the bound on starvation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglite.errors import ConfigError

PATIENCE = 256
"""How many admissions a waiting sequence may be passed over beyond all those that waited when it was first planned, and
those of the plan in which it becomes overdue."""

QUANTUM = 2048
"""Tokens after which a program first counts as a long one; each next level is twice as long."""

Rank = tuple[int, ...]
"""A place in line: the least goes first, and the last is the first to give way. The scheduler adds the arrival."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a rank is made of. A request without a program is one of its own.

    ``arrival`` is the program's, ``attained`` how many tokens were computed for it so far; ``resident`` says that it
    keeps a prefix in the cache; ``ahead`` how many calls it is known to make after this one.
    """

    priority: int
    resident: bool
    arrival: int
    attained: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence as ``Policy.reorder`` sees it: ``path`` names the tree nodes of its cached prefix, from the
    root on, which is ``cached`` positions long."""

    priority: int
    path: tuple[int, ...]
    cached: int


Order = Callable[[Sequence[Candidate]], list[int]]
"""From the front of the queue to the same sequences' indices in the order in which they should go."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``rank`` is taken at submission. Among equal ranks the order is that of arrival, or with ``by_prefix`` that of a
    walk through the tree of all prompts: next is who shares most with the last that went.

    ``reorder`` looks at the front of the queue again at each admission. With ``by_program`` a program's calls are one,
    and its prefixes are kept while it is between two of them. With ``preempts`` a running sequence gives up its place
    to a waiting one of higher priority.
    """

    rank: Callable[[Standing], Rank]
    reorder: Order | None = None
    by_prefix: bool = False
    by_program: bool = False
    preempts: bool = False


def by_arrival(standing: Standing) -> Rank:
    return (-standing.priority,)


def least_attained(standing: Standing) -> Rank:
    """Programs with a prefix to lose first, so that they end and make room; then those that had little so far, as they
    are likely short; of about equal residents those that are known to have least ahead, then the oldest. Newcomers that
    had nothing yet are all equal."""
    level = (standing.attained // QUANTUM).bit_length()
    arrival = standing.arrival if standing.resident or standing.attained else 0
    ahead = standing.ahead if standing.resident else 0
    return (-standing.priority, int(not standing.resident), level, ahead, arrival)


def longest_prefix(front: Sequence[Candidate]) -> list[int]:
    """Those that find most in the cache."""
    return sorted(range(len(front)), key=lambda i: (-front[i].priority, -front[i].cached))


def dfs_weight(front: Sequence[Candidate]) -> list[int]:
    """A depth-first walk through the tree that takes the branch first on which most of them hang."""
    weights = Counter((one.priority, one.path[:n]) for one in front for n in range(len(one.path) + 1))

    def way(i: int) -> tuple[tuple[int, int], ...]:
        one = front[i]
        steps = [one.path[:n] for n in range(1, len(one.path) + 1)]
        return tuple((-weights[one.priority, step], step[-1]) for step in steps)

    return sorted(range(len(front)), key=lambda i: (-front[i].priority, way(i) or ((1, 0),), i))


POLICIES = {
    "fcfs": Policy(by_arrival),
    "longest-prefix": Policy(by_arrival, reorder=longest_prefix),
    "dfs-weight": Policy(by_arrival, reorder=dfs_weight),
    "priority": Policy(by_arrival, preempts=True),
    "program": Policy(least_attained, by_prefix=True, by_program=True, preempts=True),
}


def policy_named(name: str) -> Policy:
    """Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known are {', '.join(POLICIES)}")
    return POLICIES[name]
