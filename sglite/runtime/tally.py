"""What the scheduler counts, and what it tells of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the start."""

    steps: int = 0
    admissions: int = 0
    retractions: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """``running`` and ``waiting`` are now, the others count since the start. ``hit_tokens`` of ``prompt_tokens`` were
    found in the cache at first admission; ``held`` counts waits for a prefix that another sequence was computing.

    Pages now: ``pages_free`` hold nothing, ``pages_cached`` are held by the prefix cache alone and may be evicted,
    ``pages_protected`` are the cache's and leased, by running sequences, programs between calls or pins. ``depth`` is
    how many tree nodes the path of a lease has on average.
    """

    running: int
    waiting: int
    steps: int
    admissions: int
    retractions: int
    preemptions: int
    held: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_protected: int
    evicted_pages: int
    tree_nodes: int
    depth: float
    programs: int
    pinned_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that was found in the cache."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
