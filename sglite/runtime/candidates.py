"""Scoring alternative continuations in one pass over the trie of their tokenisations.

The prompt and every prompt + candidate are encoded whole, so a token that spans the seam is scored as the model
would see it. What all of them share is the root, computed once. Below it every maximal path, without its last token, is
one sequence; the first of them also computes the root, and the others hit its pages. Where all tails are one token
long the root alone is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from sglite.errors import InvalidRequestError
from sglite.protocol import CandidateScore, Chunk, Finish, TokenLogprob, Usage
from sglite.runtime.grammar.base import Matcher
from sglite.runtime.sampler import Choice, SampleRow
from sglite.runtime.sequence import Sequence as TokenSequence
from sglite.runtime.tracks import Clock, Job

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trie:
    """``root``: ids shared by the prompt and all candidates. ``tails``: each candidate's ids below the root."""

    root: Path
    tails: tuple[Path, ...]

    def next_ids(self, path: Path) -> tuple[int, ...]:
        """Ids that follow ``path`` (below the root) in some candidate."""
        n = len(path)
        return tuple(dict.fromkeys(tail[n] for tail in self.tails if len(tail) > n and tail[:n] == path))

    def branches(self) -> tuple[Path, ...]:
        """The paths below the root whose last position must be computed, without those that lead to a longer one."""
        inner = sorted({tail[:-1] for tail in self.tails})
        return (*[a for a, b in pairwise(inner) if b[: len(a)] != a], inner[-1])


def build_trie(prompt_ids: Sequence[int], candidate_ids: Sequence[Path]) -> Trie:
    """Raises InvalidRequestError where a candidate has no first token of known probability."""
    shortest = min(len(ids) for ids in candidate_ids) - 1
    columns = zip(prompt_ids[:shortest], *candidate_ids, strict=False)
    root = tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
    if not root:
        raise InvalidRequestError("candidates need at least one token of prompt before them", param="candidates")
    return Trie(root, tuple(ids[len(root) :] for ids in candidate_ids))


@dataclass(slots=True, eq=False)
class CandidateGroup:
    """The tracks of one request share it: logprobs by path, and how many branches are still out.

    ``cached`` is what the branch that went first found of the root; what the others found, it computed.
    """

    trie: Trie
    texts: tuple[str, ...]
    token_text: Callable[[int], str]
    logprobs: dict[tuple[Path, int], Choice] = field(default_factory=dict)
    open_branches: int = 0
    cached: int | None = None

    def scores(self) -> tuple[CandidateScore, ...]:
        return tuple(
            CandidateScore(text, tuple(self._entry(tail, i) for i in range(len(tail))))
            for text, tail in zip(self.texts, self.trie.tails, strict=True)
        )

    def _entry(self, tail: Path, i: int) -> TokenLogprob:
        choice = self.logprobs[tail[:i], tail[i]]
        return TokenLogprob(choice.id, choice.logprob, self.token_text(choice.id))


class CandidateTrack:
    """One branch below the root. The last to end publishes the scores of all."""

    def __init__(self, job: Job, sequence: TokenSequence, group: CandidateGroup) -> None:
        self.job = job
        self.sequence = sequence
        self.clock = Clock(job.submitted)
        self.matcher: Matcher | None = None
        self.scoring = True
        self._group = group
        self._root_length = len(group.trie.root)
        self._done = False
        group.open_branches += 1

    @property
    def finished(self) -> bool:
        return self._done

    def targets(self, position: int) -> Sequence[int]:
        return self._group.trie.next_ids(self._path_at(position))

    def scored(self, position: int, choices: Sequence[Choice]) -> None:
        path = self._path_at(position)
        for choice in choices:
            self._group.logprobs[path, choice.id] = choice

    def sample_row(self) -> SampleRow | None:
        return None

    def take(self, choice: Choice) -> None:
        raise AssertionError("a candidate takes no tokens")

    def end_without_token(self) -> None:
        self._done = True
        self._group.open_branches -= 1
        found = min(self.sequence.cached, self._root_length)
        self._group.cached = found if self._group.cached is None else min(self._group.cached, found)

    def publish(self, now: float) -> Chunk | None:
        if not self._done or self._group.open_branches:
            return None
        queue, prefill, decode = self.clock.times(now)
        usage = Usage(
            prompt_tokens=len(self.job.prompt_ids),
            cached_tokens=self._group.cached or 0,
            queue_time=queue,
            prefill_time=prefill,
            decode_time=decode,
        )
        return Chunk(finish=Finish("stop"), usage=usage, scores=self._group.scores())

    def _path_at(self, position: int) -> Path:
        return tuple(self.sequence.tokens[self._root_length : position + 1])
