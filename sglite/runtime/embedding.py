"""A prompt as one vector: the final hidden state of its last token, scaled to length 1."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor

from sglite.protocol import Chunk, Finish, Usage
from sglite.runtime.grammar.base import Matcher
from sglite.runtime.sampler import Choice, SampleRow
from sglite.runtime.sequence import Sequence as TokenSequence
from sglite.runtime.tracks import Clock, Job

POOLING = "last"
Vector = tuple[float, ...]


class EmbedSink:
    """Resolves ``found`` on its own event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.found: asyncio.Future[Vector] = self._loop.create_future()
        self.vector: Vector = ()

    def chunk(self, chunk: Chunk) -> None:
        self._loop.call_soon_threadsafe(self._resolve, self.vector)

    def fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._resolve, error)

    def _resolve(self, outcome: Vector | Exception) -> None:
        if self.found.done():
            return
        if isinstance(outcome, Exception):
            self.found.set_exception(outcome)
        else:
            self.found.set_result(outcome)


class EmbedTrack:
    """Computes a prompt to its end and keeps the last position's state."""

    scoring = False

    def __init__(self, job: Job, sink: EmbedSink) -> None:
        length = len(job.prompt_ids)
        self.job = job
        self.sequence = TokenSequence(job.request, list(job.prompt_ids), length, length)
        self.clock = Clock(job.submitted)
        self.matcher: Matcher | None = None
        self._sink = sink
        self._done = False

    @property
    def finished(self) -> bool:
        return self._done

    def keep(self, states: Tensor) -> None:
        """``states`` [R, E] of the sequence's last positions."""
        last = states[-1].float()
        self._sink.vector = tuple((last / last.norm().clamp_min(1e-12)).tolist())

    def targets(self, position: int) -> Sequence[int]:
        return ()

    def scored(self, position: int, choices: Sequence[Choice]) -> None:
        raise AssertionError("an embedding scores nothing")

    def sample_row(self) -> SampleRow | None:
        return None

    def take(self, choice: Choice) -> None:
        raise AssertionError("an embedding takes no tokens")

    def end_without_token(self) -> None:
        self._done = True

    def publish(self, now: float) -> Chunk | None:
        return Chunk(finish=Finish("stop"), usage=Usage(prompt_tokens=len(self.job.prompt_ids))) if self._done else None
