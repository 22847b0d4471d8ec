"""llguidance behind the grammar seam: the default engine for masks.

llguidance raises nothing: after every call that can fail ``is_error`` is asked, and because a wrong token leaves a
matcher broken for good, tokens are validated before they are consumed. EOS never reaches it; the wrapper keeps that
bit itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import llguidance
import numpy as np

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.base import MaskBatch, MaskRow
from sglite.runtime.grammar.llguidance_bytes import LLGuidanceBytes, byte_tokenizer
from sglite.runtime.grammar.llguidance_text import grammar_error, grammar_text
from sglite.runtime.grammar.mask_memory import NUMBERS, Key, MaskMemory, Trail, places_of
from sglite.runtime.grammar.places import Places
from sglite.runtime.grammar.tokens import TokenTable
from sglite.runtime.grammar.vocabulary import Vocabulary

VERSION = llguidance._lib.get_version()
MAX_SECONDS = 0.5
"""Of CPU time for one compilation. Real schemas of 55 KB take a tenth of it."""
MEMORY = 64 << 20
"""Bytes of masks of all grammars: 10,000 for a vocabulary of 49,152."""
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}


class LLGuidanceBackend:
    name = "llguidance"
    kinds: frozenset[str] = frozenset({"json_schema", "json_object", "regex", "choices", "ebnf", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary, memory: int = MEMORY) -> None:
        """Masks that may come again are kept in ``memory`` bytes."""
        self.vocabulary = vocabulary
        self.memory = MaskMemory(memory)
        self._tokenizer = _tokenizer(vocabulary)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self.tokens = token_table(vocabulary, self._tokenizer)

    def compile(self, constraint: Constraint) -> LLGuidanceGrammar:
        """Takes milliseconds, within llguidance's own limits on time and memory, and ours on time."""
        begun = time.thread_time()
        source = grammar_text(constraint)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise grammar_error(matcher.get_error(), constraint.kind)
        if time.thread_time() - begun > MAX_SECONDS:  # its other masks would cost as much, on the engine's thread
            message = f"{constraint.kind} takes too long to compile; make it smaller"
            raise GrammarError(message, kind="limit", param=constraint.kind)
        return LLGuidanceGrammar(matcher, self, constraint, source)


class LLGuidanceGrammar:
    """A compiled grammar: a matcher at the start, to be copied, and its mask: an empty language shows in that."""

    def __init__(self, root: Any, backend: LLGuidanceBackend, constraint: Constraint, source: str) -> None:
        self._root = root
        self._source = source
        self._constraint = constraint
        self.nbytes = 64 * 1024 + 50 * len(constraint.source)
        self.backend = backend
        self.kind = constraint.kind
        self.number = next(NUMBERS)
        self._first: MaskRow | None = None
        first = np.zeros(backend.vocabulary.words, np.int32)
        self.matcher().fill(first)
        self._first = first

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._root.deep_copy(), self, Trail(self), first=self._first)

    @cached_property
    def places(self) -> Places:
        return places_of(self._constraint, self.backend.tokens.longest)

    def after(self, ids: Sequence[int]) -> Any:
        """llguidance's matcher after ``ids``. Its own rollback is not used: it keeps the last mask that was computed,
        and shows it again at another place that has as many rows."""
        matcher = self._root.deep_copy()
        fine = matcher.consume_tokens(list(ids))
        assert fine, f"tokens were accepted before: {matcher.get_error()}"
        return matcher

    def byte_matcher(self) -> LLGuidanceBytes:
        return LLGuidanceBytes(self._byte_root.deep_copy())

    @cached_property
    def _byte_root(self) -> Any:
        limits = llguidance.LLParserLimits(**LIMITS)
        return llguidance.LLMatcher(byte_tokenizer(), self._source, log_level=0, limits=limits)


class LLGuidanceMatcher:
    """One place in the grammar. ``accept`` takes 1 us a token, ``clone`` 1 us and a copy of the ids, ``fill`` 5 to
    500 us, or 3 where the mask is known; ``rollback`` as long as accepting all that stays."""

    __slots__ = ("_ended", "_grammar", "_ll", "_trail", "_vocabulary", "first")

    def __init__(
        self, ll: Any, grammar: LLGuidanceGrammar, trail: Trail, ended: bool = False, first: MaskRow | None = None
    ) -> None:
        self._ll = ll
        self._grammar = grammar
        self._vocabulary = grammar.backend.vocabulary
        self._trail = trail
        self._ended = ended
        self.first = first
        """The mask of this place, where it is known: at the start."""

    @property
    def accepting(self) -> bool:
        return bool(self._ll.is_accepting())

    @property
    def terminated(self) -> bool:
        return self._ended or bool(self._ll.is_stopped())

    def fill(self, row: MaskRow) -> None:
        assert row.shape == (self._vocabulary.words,) and row.flags["C_CONTIGUOUS"]
        if not self.recall(row):
            self._ll.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self.mark_end(row)
            self.check_row(row, int(np.count_nonzero(row)))
            self.remember(row)

    def recall(self, row: MaskRow) -> bool:
        """Write the mask where it is known."""
        known = self.first
        if known is None and (key := self._key) is not None:
            known = self._grammar.backend.memory.get(key)
        if known is not None:
            row[:] = known
        return known is not None

    def remember(self, row: MaskRow) -> None:
        """Where bytes are forced the mask is their canonical tokenisation, which depends on the tokens before."""
        key = self._key
        if key is not None and not self._ll.compute_ff_bytes():
            self._grammar.backend.memory.put(key, row)

    @property
    def _key(self) -> Key | None:
        return None if self._ended else self._trail.key()

    def mark_end(self, row: MaskRow) -> None:
        """In a row that llguidance wrote: EOS only where the text may end."""
        if self._ended:
            row.fill(0)
        (allow if self.accepting else forbid)(row, self._vocabulary.eos_ids)

    def check_row(self, row: MaskRow, words: int) -> None:
        """Never nothing at all; ``words`` of the row are not 0."""
        if self._ll.is_error() and "NoExtension" not in self._ll.get_error():
            raise grammar_error(self._ll.get_error(), self._grammar.kind)
        if words < 2 and not self._can_go_on(row):
            raise GrammarError(
                "nothing the model's tokens can spell satisfies the constraint",
                kind="unsatisfiable",
                param=self._grammar.kind,
            )

    def _can_go_on(self, row: MaskRow) -> bool:
        """Some token is allowed. A single one is tried: llguidance tokenises forced bytes, and a tokenizer without
        a token for one of them drops it."""
        words = np.flatnonzero(row)
        if len(words) != 1:
            return len(words) > 1
        bits = int(row.view(np.uint32)[words[0]])
        token = int(words[0]) * 32 + bits.bit_length() - 1
        return bits.bit_count() > 1 or token in self._vocabulary.eos_ids or self._accepts([token])

    def accept(self, ids: Sequence[int]) -> bool:
        body, end = (ids[:-1], True) if ids and ids[-1] in self._vocabulary.eos_ids else (ids, False)
        if not self._accepts(body):
            return False
        self.first = None
        self._ll.consume_tokens(list(body))
        self._trail.extend(body)
        if end and not self.accepting:
            self.rollback(len(body))
            return False
        self._ended = end
        return True

    def _accepts(self, ids: Sequence[int]) -> bool:
        width, eos = self._vocabulary.width, self._vocabulary.eos_ids
        if self._ended or not all(0 <= id < width and id not in eos for id in ids):
            return not ids and not self._ended
        return bool(self._ll.validate_tokens(list(ids)) == len(ids))

    def rollback(self, n: int) -> None:
        if n and self._ended:
            self._ended = False
            n -= 1
        if n:
            self._trail.rollback(n)
            self._ll = self._grammar.after(self._trail.ids)

    def forced(self) -> list[int]:
        return [] if self.terminated else list(self._ll.compute_ff_tokens())

    def clone(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._ll.deep_copy(), self._grammar, self._trail.clone(), self._ended, self.first)


def token_table(vocabulary: Vocabulary, tokenizer: Any | None = None) -> TokenTable:
    """The bytes of every token, as llguidance reads the tokenizer; none for special and unused ids."""
    tokenizer = tokenizer or _tokenizer(vocabulary)
    silent = {*vocabulary.eos_ids, *(id for id in range(vocabulary.width) if tokenizer.is_special_token(id))}
    return TokenTable([b"" if id in silent else tokenizer.decode_bytes([id]) for id in range(vocabulary.width)])


def _tokenizer(vocabulary: Vocabulary) -> Any:
    return llguidance.LLTokenizer(
        vocabulary.tokenizer_json, n_vocab=vocabulary.width, eos_token=list(vocabulary.eos_ids)
    )


def fill_rows(matchers: Sequence[tuple[int, LLGuidanceMatcher]], mask: MaskBatch) -> dict[int, GrammarError]:
    """Fill row ``i`` of ``mask`` for each (i, matcher), on threads and without the GIL; other rows are untouched.

    Returns the rows that failed with their errors; what is in those rows means nothing.
    """
    assert mask.dtype == np.int32 and mask.ndim == 2 and mask.flags["C_CONTIGUOUS"]
    fresh = [(row, matcher) for row, matcher in matchers if not matcher.recall(mask[row])]
    if not fresh:
        return {}
    work = [(matcher._ll, row) for row, matcher in fresh]
    _executor().unsafe_compute_mask_ptr(work, mask.ctypes.data, mask.shape[1] * 4, mask.shape[0])
    _mark_ends(fresh, mask)
    failed = _failures(fresh, mask)
    for row, matcher in fresh:
        if row not in failed:
            matcher.remember(mask[row])
    return failed


def _mark_ends(matchers: Sequence[tuple[int, LLGuidanceMatcher]], mask: MaskBatch) -> None:
    """As ``mark_end``, for all of them: nearly none may end."""
    rows = np.array([row for row, _ in matchers])
    for id in matchers[0][1]._vocabulary.eos_ids:
        mask[rows, id // 32] &= ~_BITS[id % 32]
    for row, matcher in matchers:
        if matcher._ended or matcher.accepting:
            matcher.mark_end(mask[row])


def _failures(matchers: Sequence[tuple[int, LLGuidanceMatcher]], mask: MaskBatch) -> dict[int, GrammarError]:
    """Only what allows little is looked at closely: a matcher that fails allows no more than EOS."""
    halves = np.array_split(mask[[row for row, _ in matchers]], 2, axis=1)
    plenty = np.logical_and(*(np.bitwise_or.reduce(half, axis=1) != 0 for half in halves)).tolist()
    failed = {}
    for (row, matcher), enough in zip(matchers, plenty, strict=True):
        if not enough:
            try:
                matcher.check_row(mask[row], int(np.count_nonzero(mask[row])))
            except GrammarError as error:
                failed[row] = error
    return failed


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def allow(row: MaskRow, ids: Sequence[int]) -> None:
    """Set the bits of ``ids``."""
    for id in ids:
        row[id // 32] |= _BITS[id % 32]


def forbid(row: MaskRow, ids: Sequence[int]) -> None:
    """Clear the bits of ``ids``."""
    for id in ids:
        row[id // 32] &= ~_BITS[id % 32]


@cache
def _executor() -> Any:
    return llguidance.LLExecutor()
