"""Tokens that a grammar takes back count for nothing that comes after them: penalties, logprobs, text, budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from sglite.protocol import Chunk, GenerateRequest, SamplingParams, Tokens
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.output import OutputStream
from sglite.runtime.sampler import Choice
from sglite.runtime.sequence import Sequence as TokenSequence
from sglite.runtime.tracks import GenerateTrack, Job, Rules

PROMPT = [200, 201]


@dataclass
class Retreating:
    """A matcher that allows everything and, after each accepted token, takes back what it was told to, and forces."""

    retreats: list[int]
    forced_ids: list[list[int]]
    accepted: list[int] = field(default_factory=list)
    settled: int = 0
    terminated: bool = False
    shortened: bool = False
    _open: bool = False

    def accept(self, ids: Sequence[int]) -> bool:
        self.accepted += ids
        self._open = True
        return True

    def retreat(self) -> int:
        asked = self.retreats.pop(0) if self._open and self.retreats else 0
        self._open = False
        n = min(asked, len(self.accepted) - self.settled)
        del self.accepted[len(self.accepted) - n :]
        self.settled = max(self.settled, len(self.accepted) - 3)
        return n

    def forced(self) -> list[int]:
        return self.forced_ids.pop(0) if self.forced_ids else []


class OneGrammar:
    nbytes, min_tokens = 0, None

    def __init__(self, matcher: Retreating) -> None:
        self._matcher = matcher

    def matcher(self, budget: int | None = None) -> Retreating:
        return self._matcher


class Silent:
    def chunk(self, chunk: Chunk) -> None: ...

    def fail(self, error: Exception) -> None: ...


def track_of(matcher: Retreating, **sampling: float) -> GenerateTrack:
    tokenizer = byte_tokenizer()
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, **sampling)
    request = GenerateRequest("r", (Tokens(tuple(PROMPT)),), params)
    job = Job(request, PROMPT, 100, Silent(), 0.0, grammar=OneGrammar(matcher))  # type: ignore[arg-type]
    sequence = TokenSequence(request, list(PROMPT), len(PROMPT), len(PROMPT) + 100)
    rules = Rules(frozenset(tokenizer.eos_ids), jump_forward=True, seed=0, token_text=tokenizer.token_text)
    return GenerateTrack(job, sequence, OutputStream(tokenizer.detokenizer()), rules)


LETTERS = st.integers(97, 99)


@given(
    st.lists(LETTERS, min_size=1, max_size=20),
    st.lists(st.integers(0, 4), max_size=40),
    st.lists(st.lists(LETTERS, max_size=3), max_size=10),
    st.booleans(),
)
def test_penalties_count_what_stands_and_nothing_else(
    choices: list[int], retreats: list[int], forced: list[list[int]], often: bool
) -> None:
    matcher = Retreating(retreats, forced)
    track = track_of(matcher, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    shown: list[int] = []
    for token in choices:
        track.take(Choice(token))
        output = track.sequence.tokens[len(PROMPT) :]
        row = track.sample_row()
        assert row is not None and output == matcher.accepted
        assert dict(row.output_counts) == dict(Counter(output)), "no entry for what is gone: presence would count it"
        assert list(row.context_ids) == [*PROMPT, *output]
        assert row.position == len(PROMPT) + len(output)
        if often and (chunk := track.publish(0.0)):
            shown += chunk.ids
        assert output[: len(shown)] == shown, "what was shown is never taken back"
    track.end_without_token()
    last = track.publish(0.0)
    assert last is not None and last.usage is not None
    assert [*shown, *last.ids] == matcher.accepted
    assert last.usage.completion_tokens == len(matcher.accepted)


def test_without_penalties_nothing_is_counted() -> None:
    track = track_of(Retreating([0, 1], []))
    track.take(Choice(97))
    track.take(Choice(98))
    row = track.sample_row()
    assert row is not None and not row.output_counts and not row.context_ids and track.sequence.tokens == [*PROMPT, 97]
