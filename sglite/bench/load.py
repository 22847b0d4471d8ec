"""Load: jobs sent by a schedule or by a number of callers, and what was seen of each answer.

In an open loop jobs arrive by a Poisson process whatever the server does, and every time counts from a job's arrival,
so that a server which falls behind cannot hide it. In a closed loop a fixed number of callers wait for their answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from sglite.errors import SgliteError


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt as text and the most tokens of its answer."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What came at one moment. The counts are 0 until the answer's end tells them."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


class Target(Protocol):
    """Whatever answers jobs. Raises SgliteError where it does not."""

    def ask(self, job: Job) -> AsyncIterator[Piece]: ...


@dataclass(slots=True)
class Shot:
    """A job's answer. Times are seconds from the run's beginning; ``stamps`` are those of its pieces of text."""

    due: float
    stamps: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """To the first text."""
        return self.stamps[0] - self.due if self.stamps else None

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Per token after the first."""
        return (self.stamps[-1] - self.stamps[0]) / (self.tokens - 1) if self.stamps and self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between one piece of text and the next."""
        return [b - a for a, b in pairwise(self.stamps)]


Done = Callable[[Shot], object]


async def open_loop(target: Target, jobs: Sequence[Job], rate: float, seed: int, done: Done) -> list[Shot]:
    """``rate`` jobs arrive per second, on average."""
    dice, began = random.Random(seed), time.perf_counter()
    tasks, due = [], 0.0
    for job in jobs:
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        tasks.append(asyncio.create_task(_shoot(target, job, began, due, done)))
        due += dice.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def closed_loop(target: Target, jobs: Sequence[Job], callers: int, done: Done) -> list[Shot]:
    """``callers`` jobs are under way at any time, as long as there are any."""
    began, waiting = time.perf_counter(), iter(list(enumerate(jobs)))
    shots: dict[int, Shot] = {}

    async def call() -> None:
        for number, job in waiting:
            shots[number] = await _shoot(target, job, began, time.perf_counter() - began, done)

    await asyncio.gather(*(call() for _ in range(min(callers, len(jobs)))))
    return [shots[number] for number in range(len(jobs))]


async def _shoot(target: Target, job: Job, began: float, due: float, done: Done) -> Shot:
    shot = Shot(due)
    try:
        async with aclosing(target.ask(job)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                _note(shot, piece, time.perf_counter() - began)
    except SgliteError as error:
        shot.error = f"{type(error).__name__}: {error}"
    shot.end = time.perf_counter() - began
    done(shot)
    return shot


def _note(shot: Shot, piece: Piece, now: float) -> None:
    if piece.text:
        shot.stamps.append(now)
    shot.prompt_tokens = piece.prompt_tokens or shot.prompt_tokens
    shot.cached_tokens = piece.cached_tokens or shot.cached_tokens
    shot.tokens = piece.tokens or shot.tokens


# -------------------------------------------------------------------------------------------------------------- jobs

_TEXT = (
    "the river carried small boats past old houses while people on the bridge watched clouds and talked about bread "
    "music weather distant towns letters from friends and plans for spring when gardens would be green again"
)
_WORDS = _TEXT.split()


def made_jobs(number: int, prompt_tokens: int, max_tokens: int, *, shared_tokens: int = 0, seed: int = 0) -> list[Job]:
    """Prompts of about ``prompt_tokens`` words, of which the first ``shared_tokens`` are the same in all of them."""
    shared = _words(random.Random(f"{seed} shared"), shared_tokens)
    own = [_words(random.Random(f"{seed} {i}"), max(1, prompt_tokens - shared_tokens)) for i in range(number)]
    return [Job(" ".join([*shared, *words]), max_tokens) for words in own]


def _words(dice: random.Random, number: int) -> list[str]:
    return dice.choices(_WORDS, k=number)
