"""The step loop, on one thread: plan, forward, commit, sample, publish.

The core knows Jobs and Tracks, not sockets or event loops. Whoever owns it (the engine thread, a test) calls
``submit``, ``abort`` and ``step``. A failure inside one row ends that row's request and no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from sglite.errors import AbortedError, DeadlineError, SgliteError
from sglite.runtime.embedding import EmbedTrack
from sglite.runtime.ends import Draw, End, drop_promise, promise_token, stack_masks
from sglite.runtime.failures import no_memory, untold
from sglite.runtime.grammar.base import FillMasks, MaskRow
from sglite.runtime.ledger import PagesError
from sglite.runtime.plan import Plan, Row
from sglite.runtime.runner import DeviceMemoryError, Flight, StepRunner
from sglite.runtime.sampler import BadLogitsError, Choice, logprobs_of
from sglite.runtime.states import States
from sglite.runtime.tracks import Job, Track

if TYPE_CHECKING:
    from sglite.runtime.scheduler import Scheduler
    from sglite.runtime.sequence import Sequence as TokenSequence

log = logging.getLogger("sglite.engine")

SCORE_ROWS = 256
"""Positions whose full logits exist at once while scoring: bounds memory, not results."""


@dataclass(slots=True)
class StepTimes:
    """Seconds spent, summed over steps, by part of the loop."""

    steps: int = 0
    plan: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    publish: float = 0.0


class EngineCore:
    """Owned by one thread. ``step`` returns whether there was anything to compute."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        fill_masks: FillMasks,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.times = StepTimes()
        self._runner = runner
        self._fill_masks = fill_masks
        self._clock = clock
        self._tracks: dict[TokenSequence, Track] = {}
        self._deadlines: dict[Job, float] = {}
        self._ended: list[Track] = []
        """Tracks that reached their sequence's end and have not been published yet."""
        self._draws: list[Draw] = []
        self._shortened: list[Track] = []
        """Took tokens back; their sequences go back too when no plan with them is under way."""

    @property
    def busy(self) -> bool:
        return bool(self._tracks)

    def stats(self) -> dict[str, Any]:
        """Counters for people and metrics: the scheduler's, and seconds by part of the loop."""
        scheduled = self.scheduler.stats
        return {
            **asdict(scheduled),
            "hit_rate": scheduled.hit_rate,
            **{f"time_{k}": v for k, v in asdict(self.times).items()},
        }

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, job: Job, tracks: Sequence[Track]) -> None:
        """Start a job; what the scheduler refuses goes to the job's sink and leaves nothing behind."""
        try:
            self.scheduler.submit(*[track.sequence for track in tracks if not track.finished])
        except SgliteError as error:
            job.sink.fail(error)
            return
        job.tracks.extend(tracks)
        self._tracks.update((track.sequence, track) for track in tracks)
        if job.request.deadline is not None:
            self._deadlines[job] = job.submitted + job.request.deadline
        self._ended += [track for track in tracks if track.finished]

    def abort(self, job: Job) -> None:
        if job.tracks:
            self.fail(job, AbortedError("the request was aborted", request_id=job.request.id))

    def abort_id(self, request_id: str) -> None:
        for job in self._jobs():
            if job.request.id == request_id:
                self.abort(job)

    def fail(self, job: Job, error: Exception) -> None:
        """End every track of the job; its sink hears of it exactly once."""
        for track in list(job.tracks):
            self._release(track)
        job.sink.fail(error)

    def fail_all(self, error: Exception) -> None:
        """After a failure that belongs to no request, or at the end."""
        self.scheduler.fail()
        self._draws.clear()
        for job in self._jobs():
            self.fail(job, error)

    def _jobs(self) -> list[Job]:
        return list({track.job: None for track in self._tracks.values()})

    def _release(self, track: Track) -> None:
        self.scheduler.release(track.sequence)
        self._tracks.pop(track.sequence, None)
        track.job.tracks.remove(track)
        if not track.job.tracks:
            self._deadlines.pop(track.job, None)

    def _expire(self) -> None:
        if not self._deadlines:
            return
        now = self._clock()
        for job in [job for job, end in self._deadlines.items() if end <= now]:
            self.fail(job, DeadlineError("the request's deadline passed", request_id=job.request.id))

    # ---- the step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        self._expire()
        started = self._clock()
        plan = self._plan()
        if not plan.rows:
            return self._finish_up()
        rows = self._tracked(plan)
        self._mark_planned(rows, started)
        planned = self._clock()
        flight = self._runner.start(plan.rows)
        self._take_draws()  # the previous step's tokens and answers, while this one runs
        self._publish()
        ends = self._ends(rows)
        try:
            landed = self._land(flight, rows)
        except DeviceMemoryError as error:
            return self._shrink(rows, error)
        self.scheduler.commit(plan)
        self._rewind()
        computed = self._clock()
        for states in landed:
            self._score(states)
            self._sample([end for end in ends if end.track in states], states)
        sampled = self._clock()
        if not self._runner.overlaps:
            self._publish()
        self._account(started, planned, computed, sampled)
        return True

    def _finish_up(self) -> bool:
        """A step that computes nothing: what the last one left."""
        worked = bool(self._draws)
        self._take_draws()
        self._rewind()
        self._publish()
        return worked

    def _shrink(self, rows: Sequence[tuple[Row, Track]], error: DeviceMemoryError) -> bool:
        """The step did not fit the device: smaller ones from here on, or the end of the request that needs it."""
        if self.scheduler.shrink():
            log.warning("a step of %d rows found no memory on the device; steps are smaller from now on", len(rows))
        else:
            for _, track in rows:
                self._fail_row(track, no_memory(track, error))
            self.scheduler.fail()
        self._rewind()
        return True

    def _plan(self) -> Plan:
        """Who cannot be given pages ends alone; for the others the step is planned again."""
        while True:
            try:
                return self.scheduler.plan()
            except PagesError as error:
                self._fail_row(self._tracks[error.sequence], error)

    def _tracked(self, plan: Plan) -> list[tuple[Row, Track]]:
        tracks = self._tracks
        return [(row, tracks[one]) for row, one in zip(plan.rows, self.scheduler.planned(plan), strict=True)]

    def _mark_planned(self, rows: Iterable[tuple[Row, Track]], now: float) -> None:
        for track in [track for row, track in rows if row.reset and not track.clock.planned]:
            track.clock.planned = now

    def _ends(self, rows: Sequence[tuple[Row, Track]]) -> list[End]:
        """The rows that reach their sequence's end in this step, with all the sampler will need but the logits."""
        tracks = [t for row, t in rows if row.stop == len(t.sequence.tokens) and t.sequence in self._tracks]
        masks = self._masks([track for track in tracks if track.matcher is not None])
        return [End(t, t.sample_row(), masks.get(t)) for t in tracks if t.sequence in self._tracks]

    def _masks(self, tracks: Sequence[Track]) -> dict[Track, MaskRow]:
        """A row of allowed tokens for each; a request whose grammar fails here ends here."""
        if not tracks:
            return {}
        mask = np.zeros((len(tracks), -(-self._runner.model.vocab_size // 32)), dtype=np.int32)
        for i, error in self._fill_masks([t.matcher for t in tracks if t.matcher is not None], mask).items():
            self._fail_row(tracks[i], error)
        return dict(zip(tracks, mask, strict=True))

    def _land(self, flight: Flight, rows: Sequence[tuple[Row, Track]]) -> list[States]:
        """Hidden states of the wanted positions, of all rows together.

        When the step fails, every row runs alone; one whose own forward fails is missing: its request has ended.
        """
        try:
            return [States(flight.result(), rows)]
        except DeviceMemoryError:
            raise
        except Exception as error:
            log.warning("a step of %d rows failed, running them one by one: %r", len(rows), error)
            alone = [(self._forward_alone(row, track), row, track) for row, track in rows]
            return [States(hidden, [(row, track)]) for hidden, row, track in alone if hidden is not None]

    def _forward_alone(self, row: Row, track: Track) -> Tensor | None:
        try:
            return self._runner.forward((row,))
        except Exception as error:
            self._fail_row(track, error)
            return None

    def _score(self, states: States) -> None:
        for row, track in states.rows:
            if track.scoring and self._alive(track):
                self._contain(track, partial(self._score_row, row, track, states.of(track)))

    def _score_row(self, row: Row, track: Track, states: Tensor) -> None:
        first = row.stop - len(states)
        wanted = [(i, ids) for i in range(len(states)) if (ids := track.targets(first + i))]
        top = track.job.request.logprobs.top if track.job.request.logprobs else 0
        for start in range(0, len(wanted), SCORE_ROWS):
            part = wanted[start : start + SCORE_ROWS]
            logits = self._runner.logits(states[[i for i, _ in part]])
            for (i, _), choices in zip(part, logprobs_of(logits, [ids for _, ids in part], top), strict=True):
                track.scored(first + i, choices)

    def _sample(self, ends: Sequence[End], states: States) -> None:
        """The chosen tokens become part of their sequences, so the next plan already knows them.

        With a pipelined runner they are taken in the next step; until then a placeholder stands for each.
        """
        samplers = [end for end in ends if end.row is not None and end.track.sequence in self._tracks]
        for end in ends:
            if end.row is None and self._alive(end.track):
                self._end_without_token(end.track, states)
        if samplers:
            self._draw(samplers, states)
        if not self._runner.pipelined:
            self._take_draws()
            self._rewind()

    def _end_without_token(self, track: Track, states: States) -> None:
        if isinstance(track, EmbedTrack):
            self._contain(track, partial(track.keep, states.of(track)))
        track.end_without_token()
        self._ended.append(track)
        self._after(track)

    def _draw(self, ends: Sequence[End], states: States) -> None:
        """In halves where it cannot be done at once: for want of memory on the device, or because one row fails."""
        hidden = states.last([end.track for end in ends])
        slots = [end.track.sequence.slot for end in ends]
        try:
            mask = stack_masks(ends, self._runner.model.vocab_size)
            sampled = self._runner.sample(hidden, [end.row for end in ends if end.row], slots, mask)
        except Exception as error:
            half = len(ends) // 2
            if half == 0:
                track = ends[0].track
                self._fail_row(track, no_memory(track, error) if isinstance(error, DeviceMemoryError) else error)
                return
            self._draw(ends[:half], states)
            self._draw(ends[half:], states)
            return
        self._draws.append(Draw(ends, sampled))
        if self._runner.pipelined:
            for end, slot in zip(ends, slots, strict=True):
                promise_token(end.track.sequence, slot)

    def _take_draws(self) -> None:
        """Wait for the tokens that were asked for, and take them."""
        draws, self._draws = self._draws, []
        for draw in draws:
            for (track, _, _), choice in zip(draw.ends, draw.sampled.result(), strict=True):
                if track.sequence in self._tracks:
                    self._take(track, choice)

    def _take(self, track: Track, choice: Choice | BadLogitsError) -> None:
        drop_promise(track.sequence)
        try:
            if isinstance(choice, BadLogitsError):
                raise choice
            track.take(choice)
        except Exception as error:
            self._fail_row(track, error)
        self._ended.append(track)
        self._after(track)

    def _after(self, track: Track) -> None:
        """A finished sequence leaves at once, before its text is published."""
        if track.finished:
            self.scheduler.release(track.sequence)
        elif self._alive(track) and not track.sequence.remaining > 0:
            self._shortened.append(track)

    def _rewind(self) -> None:
        """Sequences that took tokens back go back to their new end."""
        shortened, self._shortened = self._shortened, []
        for track in shortened:
            if self._alive(track):
                self.scheduler.rewind(track.sequence)

    # ---- answers -----------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Chunks of the tracks that sampled or ended since the last call; finished ones are forgotten."""
        ended, self._ended = self._ended, []
        now = self._clock()
        for track in ended:
            if track.sequence not in self._tracks:
                continue
            try:
                chunk = track.publish(now)
                if chunk is not None:
                    track.job.sink.chunk(chunk)
                if track.finished:
                    self._release(track)
            except Exception as error:
                self._fail_row(track, error)

    def _alive(self, track: Track) -> bool:
        return track.sequence in self._tracks

    def _contain(self, track: Track, work: Callable[[], None]) -> None:
        """A failure in one row's work ends that row's request and nothing else."""
        try:
            work()
        except Exception as error:
            self._fail_row(track, error)

    def _fail_row(self, track: Track, error: Exception) -> None:
        if not isinstance(error, SgliteError):
            log.error("request %s failed", track.job.request.id, exc_info=error)
            error = untold("the request failed", error, track.job.request.id)
        if self._alive(track):
            self.fail(track.job, error)

    def _account(self, started: float, planned: float, computed: float, sampled: float) -> None:
        times = self.times
        times.steps += 1
        times.plan += planned - started
        times.forward += computed - planned
        times.sample += sampled - computed
        times.publish += self._clock() - sampled
