"""One sequence being computed: a sample of a request, as the scheduler and the engine see it.

Only the engine thread touches a Sequence. It "catches up": ``computed`` positions have their KV, ``len(tokens)`` is
the target, and whoever wants more work done appends tokens (a sampled one, forced ones, drafts).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from sglite.protocol import GenerateRequest

if TYPE_CHECKING:
    from sglite.runtime.radix import Lease


class Status(Enum):
    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """``tokens`` is prompt then output; ``limit`` the largest ``len(tokens)`` it may ever reach.

    ``score_from``: logits are wanted for every position >= it (None: only the last one, to sample from). Cached
    positions from there on are recomputed, since the cache holds no logits.
    """

    request: GenerateRequest
    tokens: list[int]
    prompt_length: int
    limit: int
    index: int = 0
    adapter: int = 0
    """Number of the request's adapter in the runner; 0: none."""
    score_from: int | None = None
    arrival: int = 0
    """Counts submissions; given by the scheduler, as is ``due``: the admission by which it should have started."""
    due: int = 0
    rank: tuple[int, ...] = ()
    """Place in line, by the scheduler's policy: the least goes first."""

    status: Status = Status.NEW
    slot: int = -1
    computed: int = 0
    cached: int = 0
    """Positions found in the prefix cache when first admitted."""
    scored: int = 0
    """Positions below it gave their wanted logits already, so a retraction does not ask for them again."""
    retractions: int = 0
    pages: list[int] = field(default_factory=list)
    """Pages in order of position; the first ``lease.length // page_size`` belong to the tree."""
    lease: Lease | None = None
    tabled: int = 0
    """Pages that the runner's page table of this slot has; 0: none, or others than ``pages``."""

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def namespace(self) -> tuple[str, str]:
        """Prefixes are shared only within it: caller's namespace and adapter."""
        return (self.request.namespace, self.request.adapter or "")
