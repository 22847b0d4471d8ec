"""llguidance behind the grammar seam: the default engine for masks.

llguidance raises nothing: after every call that can fail ``is_error`` is asked, and because a wrong token leaves a
matcher broken for good, tokens are validated before they are consumed. EOS never reaches it (it would not count for
its rollback); the wrapper keeps that bit itself.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

import llguidance
import numpy as np

from sglite.errors import GrammarError
from sglite.protocol import Constraint, ConstraintKind, Whitespace
from sglite.runtime.grammar.base import MaskBatch, MaskRow
from sglite.runtime.grammar.gbnf import is_gbnf, lark_of
from sglite.runtime.grammar.tokens import TokenTable
from sglite.runtime.grammar.vocabulary import Vocabulary

VERSION = llguidance._lib.get_version()
SEPARATORS: dict[str, Any] = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""At most one space, and only where json.dumps would put one: models loop in free whitespace, and fixed
whitespace is what makes keys forced."""

_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": True,
}
_WHITESPACE: dict[Whitespace, dict[str, Any]] = {
    "spaced": SEPARATORS,
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "pretty": {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": True,
        "whitespace_pattern": "\\n {0,16}| ",
    },
}
_OPTIONS = {name: json.dumps(_JSON_OPTIONS | spaces) for name, spaces in _WHITESPACE.items()}
MAX_SECONDS = 0.5
"""Of CPU time for one compilation. Real schemas of 55 KB take a tenth of it."""
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}


class LLGuidanceBackend:
    name = "llguidance"
    kinds: frozenset[str] = frozenset({"json_schema", "json_object", "regex", "choices", "ebnf", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = _tokenizer(vocabulary)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self.tokens = token_table(vocabulary, self._tokenizer)

    def compile(self, constraint: Constraint) -> LLGuidanceGrammar:
        """Takes milliseconds, within llguidance's own limits on time and memory, and ours on time."""
        begun = time.thread_time()
        source = _grammar(constraint)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise grammar_error(matcher.get_error(), constraint.kind)
        if time.thread_time() - begun > MAX_SECONDS:  # its other masks would cost as much, on the engine's thread
            message = f"{constraint.kind} takes too long to compile; make it smaller"
            raise GrammarError(message, kind="limit", param=constraint.kind)
        return LLGuidanceGrammar(matcher, self.vocabulary, constraint, source)


class LLGuidanceGrammar:
    """A compiled grammar: a matcher at the start, to be copied, and its mask: an empty language shows in that."""

    def __init__(self, root: Any, vocabulary: Vocabulary, constraint: Constraint, source: str) -> None:
        self._root = root
        self._vocabulary = vocabulary
        self._source = source
        self.kind = constraint.kind
        self.nbytes = 64 * 1024 + 50 * len(constraint.source)
        self._first = np.zeros(vocabulary.words, np.int32)
        LLGuidanceMatcher(root.deep_copy(), vocabulary, self.kind).fill(self._first)

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._root.deep_copy(), self._vocabulary, self.kind, first=self._first)

    def byte_matcher(self) -> LLGuidanceBytes:
        return LLGuidanceBytes(self._byte_root.deep_copy())

    @cached_property
    def _byte_root(self) -> Any:
        limits = llguidance.LLParserLimits(**LIMITS)
        return llguidance.LLMatcher(_byte_tokenizer(), self._source, log_level=0, limits=limits)


class LLGuidanceBytes:
    """See way_out.ByteMatcher."""

    __slots__ = ("_ll",)

    def __init__(self, ll: Any) -> None:
        self._ll = ll

    @property
    def accepting(self) -> bool:
        return bool(self._ll.is_accepting()) and not self._ll.is_error()

    def accept(self, data: bytes) -> bool:
        return bool(self._ll.consume_tokens(list(data)))

    def allowed(self) -> bytes:
        if self._ll.is_stopped():
            return b""
        bits = self._ll.compute_bitmask()[: EOS_BYTE // 8]
        return b"".join(map(tuple.__getitem__, _BYTES_OF, bits))

    def forced(self) -> bytes:
        return b"" if self._ll.is_stopped() else bytes(self._ll.compute_ff_bytes())

    def rollback(self, n: int) -> None:
        fine = n == 0 or self._ll.rollback(n)
        assert fine, f"rollback of {n} bytes: {self._ll.get_error()}"

    def clone(self) -> LLGuidanceBytes:
        return LLGuidanceBytes(self._ll.deep_copy())


EOS_BYTE = 256
_BYTES_OF = tuple(
    tuple(bytes(8 * i + bit for bit in range(8) if bits >> bit & 1) for bits in range(256))
    for i in range(EOS_BYTE // 8)
)
"""The bytes that the i-th byte of a mask allows."""


class _Bytes:
    """A tokenizer in which every byte is a token, as llguidance's TokenizerWrapper wants it."""

    eos_token_id = EOS_BYTE
    bos_token_id = None
    special_token_ids: ClassVar[list[int]] = [EOS_BYTE]
    tokens: ClassVar[list[bytes]] = [*(bytes([byte]) for byte in range(256)), b"<eos>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _byte_tokenizer() -> Any:
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Bytes()), n_vocab=EOS_BYTE + 1, eos_token=EOS_BYTE, slices=[]
    )


class LLGuidanceMatcher:
    """One place in the grammar. ``accept`` takes 1 us a token, ``fill`` 5 to 500 us, ``clone`` 1 us."""

    __slots__ = ("_ended", "_kind", "_ll", "_vocabulary", "first")

    def __init__(
        self, ll: Any, vocabulary: Vocabulary, kind: str, ended: bool = False, first: MaskRow | None = None
    ) -> None:
        self._ll = ll
        self._vocabulary = vocabulary
        self._kind = kind
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
        if self.first is not None:
            row[:] = self.first
            return
        self._ll.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.mark_end(row)
        self.check_row(row, int(np.count_nonzero(row)))

    def mark_end(self, row: MaskRow) -> None:
        """In a row that llguidance wrote: EOS only where the text may end."""
        if self._ended:
            row.fill(0)
        (allow if self.accepting else forbid)(row, self._vocabulary.eos_ids)

    def check_row(self, row: MaskRow, words: int) -> None:
        """Never nothing at all; ``words`` of the row are not 0."""
        if self._ll.is_error() and "NoExtension" not in self._ll.get_error():
            raise grammar_error(self._ll.get_error(), self._kind)
        if words < 2 and not self._can_go_on(row):
            raise GrammarError(
                "nothing the model's tokens can spell satisfies the constraint",
                kind="unsatisfiable",
                param=self._kind,
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
        if end and not self.accepting:
            self._ll.rollback(len(body))
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
            fine = self._ll.rollback(n)
            assert fine, f"rollback of {n} tokens: {self._ll.get_error()}"

    def forced(self) -> list[int]:
        return [] if self.terminated else list(self._ll.compute_ff_tokens())

    def clone(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._ll.deep_copy(), self._vocabulary, self._kind, self._ended, self.first)


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
    fresh = [(row, matcher) for row, matcher in matchers if matcher.first is None]
    for row, matcher in matchers:
        if matcher.first is not None:
            mask[row] = matcher.first
    if fresh:
        work = [(matcher._ll, row) for row, matcher in fresh]
        _executor().unsafe_compute_mask_ptr(work, mask.ctypes.data, mask.shape[1] * 4, mask.shape[0])
        _mark_ends(fresh, mask)
    return _failures(matchers, mask)


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
    halves = np.array_split(mask, 2, axis=1)
    plenty = np.logical_and(*(np.bitwise_or.reduce(half, axis=1) != 0 for half in halves)).tolist()
    failed = {}
    for row, matcher in matchers:
        if not plenty[row]:
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


# ------------------------------------------------------------------------------------------------ grammars as text


def _grammar(constraint: Constraint) -> str:
    if constraint.kind == "json_object":
        return _json('{"type": "object"}', constraint.whitespace)
    if constraint.kind == "json_schema":
        return _json(constraint.source, constraint.whitespace)
    return _SOURCES[constraint.kind](constraint.source)


def _json(schema: str, whitespace: Whitespace) -> str:
    """As LLMatcher.grammar_from_json_schema, which reads and writes the schema once more to put options into it."""
    comma = "" if schema == "{}" else ", "
    return f'{{"grammars": [{{"json_schema": {schema[:-1]}{comma}"x-guidance": {_OPTIONS[whitespace]}}}}}]}}'


def _regex(source: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(source))


def _choices(source: str) -> str:
    literals = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(source))
    return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(literals)))


def _structural_tag(source: str) -> str:
    """``source`` is a list of structures as tags.lowered_tags makes them."""
    tags = [
        llguidance.StructTag(
            trigger=item["trigger"],
            begin=item["begin"],
            grammar=item["schema"] | {"x-guidance": SEPARATORS},
            end=item["end"],
        )
        for item in json.loads(source)
    ]
    lark = llguidance.StructTag.to_grammar(tags, assume_special=False)
    return str(llguidance.LLMatcher.grammar_from_lark(lark))


def _ebnf(source: str) -> str:
    """Lark, or GBNF, known by its ``::=``."""
    return str(llguidance.LLMatcher.grammar_from_lark(lark_of(source) if is_gbnf(source) else source))


_SOURCES: dict[ConstraintKind, Callable[[str], str]] = {
    "regex": _regex,
    "choices": _choices,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}

# -------------------------------------------------------------------------------------------------------- messages

_KINDS = (
    ("limit", re.compile("too (complex|big|large|many|deep)|limit|fuel|exceed", re.IGNORECASE)),
    ("unsatisfiable", re.compile("unsatisfiable", re.IGNORECASE)),
    (
        "unsupported",
        re.compile("(?:not|only) supported|unsupported|unimplemented|unknown format|not disjoint", re.IGNORECASE),
    ),
)


def grammar_error(text: str, param: str) -> GrammarError:
    """llguidance's message as one line, sorted into our kinds, with the position of a fault in a regex."""
    kind = next((kind for kind, pattern in _KINDS if pattern.search(text)), "malformed")
    caret = re.search(r"^    ([^\n]*)\n    ( *)\^", text, re.MULTILINE)
    parsed = re.search(r"error: ([^\n]*)", text)
    message = parsed.group(1) if parsed and caret else text.split("\n", 1)[0]
    message = re.sub(r"\s+", " ", message).strip()[:300]
    pointer = str(len(caret.group(2))) if caret and param == "regex" else None
    where = f" at position {pointer}" if pointer else ""
    line = re.match(r"(?:at )?(\d+)\((\d+)\)", message) if param == "ebnf" and kind != "limit" else None
    pointer = f"{line.group(1)}:{line.group(2)}" if line else pointer
    return GrammarError(f"{param}: {message}{where}", kind=kind, param=param, pointer=pointer)
