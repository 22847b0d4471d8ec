"""One sequence being computed: a sample of a request, as the scheduler and the engine see it.

Only the engine thread touches a Sequence. It "catches up": ``computed`` positions have their KV, ``len(tokens)`` is
the target, and whoever wants more work done appends tokens (a sampled one, forced ones, drafts).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from sglite.protocol import GenerateRequest

if TYPE_CHECKING:
    from sglite.runtime.tree import Lease


PREFIX = 8192
"""Tokens by which waiting sequences are told apart: more are not worth their memory."""


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
    due: int | None = None
    rank: tuple[int, ...] = ()
    """Place in line, by the scheduler's policy: the last is the first to give way."""
    place: tuple[tuple[int, ...], bytes, int] = ((), b"", 0)
    """Place in the queue: see ``waiting.Place``."""
    late: bool = False
    """It started because it had waited too long; nobody may take its place."""

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
    copied: int = -1
    """A page to be copied, in the next step, to where ``computed`` is: it has what was computed of that page."""
    tabled: int = 0
    """Pages that the runner's page table of this slot has; 0: none, or others than ``pages``."""

    def overdue(self, admissions: int) -> bool:
        """Whether it should have started by so many admissions."""
        return self.due is not None and self.due <= admissions

    def prefix(self) -> bytes:
        """Its tokens in a form whose order brings common prefixes together."""
        return b"\0".join([*[part.encode() for part in self.namespace], array("i", self.tokens[:PREFIX]).tobytes()])

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

    def wanted_logits(self, stop: int) -> int:
        """How many of the last positions have their logits wanted when it is computed up to ``stop``."""
        at_end = int(stop == len(self.tokens))
        if self.score_from is None:
            return at_end
        return max(at_end, stop - max(self.computed, self.score_from, self.scored))
