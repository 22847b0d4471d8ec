"""What becomes of a sequence's logits: one Track per Sequence, driven by the engine core.

A track says which tokens' logprobs it wants at which positions, whether it takes a new token at its end, and turns
both into Chunks. Only the engine thread touches one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sglite.errors import RequestError
from sglite.protocol import Chunk, Constraint, Finish, GenerateRequest, TokenLogprob, Usage
from sglite.runtime.chunks import text_chunk
from sglite.runtime.grammar.base import Grammar, Matcher
from sglite.runtime.output import Emission, OutputStream
from sglite.runtime.sampler import Choice, SampleRow
from sglite.runtime.sequence import Sequence as TokenSequence


def is_whole(constraint: Constraint | None) -> bool:
    """Whether an answer ends where its constraint says only: a stop inside of it would leave half of a value."""
    return constraint is not None and constraint.kind in ("json_schema", "json_object", "choices")


class Sink(Protocol):
    """Where a request's answer goes. Called on the engine thread, must not block."""

    def chunk(self, chunk: Chunk) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    """A request after the door: tokenised, checked against the model, its grammar compiled.

    ``max_new_tokens`` is the request's, cut to what the context leaves. ``candidate_ids`` are the complete
    tokenisations of prompt + candidate.
    """

    request: GenerateRequest
    prompt_ids: list[int]
    max_new_tokens: int
    sink: Sink
    submitted: float
    grammar: Grammar | None = None
    candidate_ids: tuple[tuple[int, ...], ...] = ()
    tracks: list[Track] = field(default_factory=list)
    """The unfinished ones."""


@dataclass(slots=True)
class Clock:
    """Seconds at which things happened to a track; 0.0 means not yet."""

    submitted: float
    planned: float = 0.0
    first_token: float = 0.0

    def times(self, now: float) -> tuple[float, float, float]:
        """(queue, prefill, decode) so far."""
        planned = self.planned or now
        first = self.first_token or now
        return planned - self.submitted, max(0.0, first - planned), max(0.0, now - first)


class Track(Protocol):
    job: Job
    sequence: TokenSequence
    clock: Clock
    matcher: Matcher | None
    scoring: bool
    """Whether ``targets`` ever names any: most tracks never do, and decode steps are many."""

    @property
    def finished(self) -> bool: ...

    def targets(self, position: int) -> Sequence[int]:
        """Ids whose logprob given ``tokens[:position + 1]`` is wanted."""
        ...

    def scored(self, position: int, choices: Sequence[Choice]) -> None: ...

    def sample_row(self) -> SampleRow | None:
        """How to choose the next token; None when this track takes none and is done at its end."""
        ...

    def take(self, choice: Choice) -> None:
        """The chosen next token: extends the sequence, or finishes the track."""
        ...

    def end_without_token(self) -> None:
        """The sequence is computed to its end and ``sample_row`` said None."""
        ...

    def publish(self, now: float) -> Chunk | None:
        """What happened since the last call, if there is anything to tell; the last chunk carries ``finish``."""
        ...


@dataclass(frozen=True, slots=True)
class Rules:
    """The model's part in when an output ends and how it is shown."""

    eos_ids: frozenset[int]
    jump_forward: bool
    seed: int
    token_text: Callable[[int], str]


class GenerateTrack:
    """One sample of a request: samples until a stop rule ends it, and scores the prompt where that is asked."""

    def __init__(self, job: Job, sequence: TokenSequence, stream: OutputStream, rules: Rules) -> None:
        self.job = job
        self.sequence = sequence
        self.clock = Clock(job.submitted)
        self.matcher: Matcher | None = None if job.grammar is None else job.grammar.matcher(job.max_new_tokens)
        self._stream = stream
        self._rules = rules
        self._sampling = job.request.sampling
        self._logprobs = job.request.logprobs
        self.scoring = self._logprobs is not None and self._logprobs.prompt_start is not None
        self._given = self._logprobs.ids if self._logprobs is not None else ()
        self._top = self._logprobs.top if self._logprobs is not None and self._logprobs.output else None
        self._constrained = self._logprobs is not None and self._logprobs.constrained
        self._seed = rules.seed if self._sampling.seed is None else self._sampling.seed
        self._counting = bool(self._sampling.frequency_penalty or self._sampling.presence_penalty)
        self._counts: Counter[int] = Counter()
        self._prompt_logprobs: dict[int, TokenLogprob] = {}
        self._fresh: list[tuple[int, TokenLogprob | None]] = []
        self._finish: Finish | None = None
        self._forced = 0
        self._retreats = 0
        self._silent = True  # nothing was published yet
        self._unlisted = 0  # sampled tokens that end the output and are not part of it
        ends = set() if is_whole(job.request.constraint) else set(self._sampling.stop_token_ids)
        self._end_ids = ends if self._sampling.ignore_eos else ends | rules.eos_ids
        self._settle()

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def targets(self, position: int) -> Sequence[int]:
        inside = self.scoring and position + 1 < self.sequence.prompt_length
        return (self.sequence.tokens[position + 1], *self._given) if inside else ()

    def scored(self, position: int, choices: Sequence[Choice]) -> None:
        own, *given = choices
        pairs = tuple((choice.id, choice.logprob) for choice in given if choice.logprob is not None)
        self._prompt_logprobs[position + 1] = self._named(own._replace(given=pairs))

    def sample_row(self) -> SampleRow | None:
        if self.job.max_new_tokens == 0:
            return None
        sequence, params = self.sequence, self._sampling
        early = (
            params.min_new_tokens
            and sequence.output_length < params.min_new_tokens
            and not (self.matcher and self.matcher.terminated)
        )
        return SampleRow(
            params,
            self._seed,
            sequence.index,
            len(sequence.tokens),
            self._counts,
            sequence.tokens if params.repetition_penalty != 1.0 else (),
            tuple(self._end_ids | self._rules.eos_ids) if early else (),
            self._top,
            self._given,
            self._constrained,
        )

    def take(self, choice: Choice) -> None:
        if choice.id in self._end_ids or (self.matcher is not None and choice.id in self._rules.eos_ids):
            self._unlisted = 1
            short = self.matcher is not None and self.matcher.shortened
            self._finish = Finish("length") if short else Finish("stop", matched=choice.id)
            return
        self._append(choice.id, self._named(choice) if choice.logprob is not None else None)
        if self.matcher is not None and not self.matcher.accept((choice.id,)):
            raise RequestError("the grammar refused a token its own mask allowed", request_id=self.job.request.id)
        self._settle()

    def end_without_token(self) -> None:
        self._finish = Finish("length")

    def publish(self, now: float) -> Chunk | None:
        if not self._silent and self._finish is None and self.matcher is None and len(self._fresh) == 1:
            token, logprob = self._fresh[0]
            text = self._stream.passed(token) if logprob is None else None
            if text:
                self._fresh.clear()
                return text_chunk(text, token, self.sequence.index)
        return self._publish(now)

    def _publish(self, now: float) -> Chunk | None:
        if self._fresh and not self.clock.first_token:
            self.clock.first_token = now
        emission = self._emit_fresh()
        finish = self._finish
        if finish is None and not (emission.text or emission.ids):
            return None
        usage = self._usage(now) if self._silent or finish else None
        self._silent = False
        return self._chunk(emission, finish, usage)

    @property
    def _budget(self) -> int:
        return self.job.max_new_tokens - self.sequence.output_length

    def _settle(self) -> None:
        """After tokens were added: take back what breaks the grammar, take what it forces, end where it ends."""
        if self.matcher is not None and not self._retreat(self.matcher):
            self._jump(self.matcher)
            if self.matcher.terminated:
                self._finish = self._end_of_grammar(self.matcher)
        if self._finish is None and self.sequence.output_length and self._budget == 0:
            self._finish = Finish("length")

    def _retreat(self, matcher: Matcher) -> bool:
        n = matcher.retreat()
        if n:
            if self._counting:
                self._counts -= Counter(token for token, _ in self._fresh[-n:])  # a token that is gone has no entry
            del self._fresh[-n:]
            del self.sequence.tokens[-n:]
            self._retreats += 1
        return n > 0

    def _jump(self, matcher: Matcher) -> None:
        if not self._rules.jump_forward or self._logprobs is not None:
            return  # a forced token's logprob is never computed, so whoever wants logprobs samples every token
        forced = matcher.forced()[: self._budget]
        if forced and matcher.accept(forced):
            self._forced += len(forced)
            for token in forced:
                self._append(token, None)
            self._retreat(matcher)

    def _end_of_grammar(self, matcher: Matcher) -> Finish:
        return Finish("length") if matcher.shortened else Finish("stop", matched=min(self._rules.eos_ids, default=None))

    def _append(self, token: int, logprob: TokenLogprob | None) -> None:
        self.sequence.tokens.append(token)
        if self._counting:
            self._counts[token] += 1
        self._fresh.append((token, logprob))

    def _emit_fresh(self) -> Emission:
        """Text of the settled tokens; the rest may still be taken back."""
        parts: list[Emission] = []
        for token, logprob in self._settled():
            parts.append(self._stream.push(token, logprob))
            if parts[-1].stopped is not None:
                self._finish = Finish("stop", matched=parts[-1].stopped)
                return _join(parts)
        if self._finish is not None:
            parts.append(self._stream.close())
        return _join(parts)

    def _settled(self) -> list[tuple[int, TokenLogprob | None]]:
        if self.matcher is None or self._finish is not None:
            settled, self._fresh = self._fresh, []
            return settled
        open_tokens = self.sequence.output_length - self.matcher.settled
        settled = self._fresh[: len(self._fresh) - open_tokens]
        del self._fresh[: len(settled)]
        return settled

    def _chunk(self, emission: Emission, finish: Finish | None = None, usage: Usage | None = None) -> Chunk:
        text, ids, logprobs, uncovered, _ = emission
        scores = self._prompt_scores() if finish else ()
        return Chunk(text, ids, self.sequence.index, logprobs, uncovered, finish, usage, scores)

    def _prompt_scores(self) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None or self._logprobs.prompt_start is None:
            return ()
        start, stop = self._logprobs.prompt_start, self.sequence.prompt_length
        unknown = TokenLogprob(self.sequence.tokens[0], None, self._rules.token_text(self.sequence.tokens[0]))
        return tuple(self._prompt_logprobs[p] if p else unknown for p in range(start, stop))

    def _usage(self, now: float) -> Usage:
        queue, prefill, decode = self.clock.times(now)
        return Usage(
            prompt_tokens=self.sequence.prompt_length,
            cached_tokens=min(self.sequence.cached, self.sequence.prompt_length),
            completion_tokens=self.sequence.output_length + self._unlisted,
            forced_tokens=self._forced,
            rollbacks=self._retreats,
            queue_time=queue,
            prefill_time=prefill,
            decode_time=decode,
            retractions=self.sequence.retractions,
        )

    def _named(self, choice: Choice) -> TokenLogprob:
        text = self._rules.token_text
        top, given = (tuple((i, value, text(i)) for i, value in pairs) for pairs in (choice.top, choice.given))
        return TokenLogprob(choice.id, choice.logprob, text(choice.id), top, given)


def _join(parts: Sequence[Emission]) -> Emission:
    if not parts:
        return Emission()
    if len(parts) == 1:
        return parts[0]
    return Emission(
        text="".join(p.text for p in parts),
        ids=tuple(i for p in parts for i in p.ids),
        logprobs=tuple(entry for p in parts for entry in p.logprobs),
        uncovered=parts[-1].uncovered,
    )
