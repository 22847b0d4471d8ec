"""Mask and sample in Triton: the fast form of ``kernels.sampling.choose``.

Without filters two launches do it: ``scan`` reads the logits once, split over the vocabulary, and ``finish`` merges the
splits. With top-k, top-p or min-p in the batch, ``scan`` also keeps the largest logit of each small group of tokens;
``bound`` picks a value that a few hundred of these maxima pass, ``gather`` collects the tokens that pass it, and
``narrow`` sorts those and cuts. Where they do not hold everything the filters keep (a flat distribution under top-p,
a top-k beyond a thousand, many equal logits), ``whole`` finds the exact cut by bisection over the row.

Every cut is made on (logit, id) as one integer, so ties are cut by id and nothing depends on the order of threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from sglite.kernels.sampling import COLDEST, NOT_FINITE, NOTHING_ALLOWED, OK, Chosen, Edits, SampleRows

CANDIDATES = 1024
"""Tokens of a row that are sorted."""
MAX_VOCABULARY = 1 << 20
"""So that an id fits the low bits of a key."""

_GROUP: tl.constexpr = tl.constexpr(32)
_ID_BITS: tl.constexpr = tl.constexpr(20)
_ID_MASK: tl.constexpr = tl.constexpr((1 << 20) - 1)
_LEAST_ORDER: tl.constexpr = tl.constexpr(-2139095040)
"""Of the least finite float."""
_COLDEST: tl.constexpr = tl.constexpr(COLDEST)
_OK: tl.constexpr = tl.constexpr(OK)
_NOT_FINITE: tl.constexpr = tl.constexpr(NOT_FINITE)
_NOTHING: tl.constexpr = tl.constexpr(NOTHING_ALLOWED)


# --------------------------------------------------------------------------------------------------------- functions


@triton.jit
def _finalise(h: tensor):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _log_exponential(key: tensor, token: tensor):
    """log of ``sampling.exponential``."""
    word = _finalise(token.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32))
    word = _finalise(word ^ (key >> 32).to(tl.uint32))
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.log(tl.where(v < 0.00390625, v * (1 + v * (0.5 + v * 0.3333333333)), -tl.log(1 - v)))


@triton.jit
def _masked(logits: tensor, words: tensor, token: tensor, vocabulary: int, MASKED: tl.constexpr):
    """One row's logits at some tokens; -inf where the mask or the vocabulary's end forbids them."""
    inside = token < vocabulary
    x = tl.load(logits + token, mask=inside, other=-float("inf"))
    if MASKED:
        word = tl.load(words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def _order_of(x: tensor):
    """The float as an integer of the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _logit_of(order: tensor):
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(x: tensor, token: tensor):
    """(logit descending, id ascending) as one integer: larger is earlier."""
    return (_order_of(x) << _ID_BITS) | (token ^ _ID_MASK).to(tl.int64)


@triton.jit
def _token_in(key: tensor):
    return ((key & _ID_MASK) ^ _ID_MASK).to(tl.int32)


@triton.jit
def _winner(score: tensor, token: tensor):
    """The best score, and the first token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)


@triton.jit
def _over(peak: tensor):
    """What to subtract before exp: the peak, or 0 where there is nothing but -inf."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _above(
    row_logits: tensor, row_words: tensor, vocabulary: int, cut: tensor, peak: tensor, cold: tensor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens of a row come before ``cut``, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _masked(row_logits, row_words, token, vocabulary, MASKED)
        before = (_key_of(x, token) > cut) & (x > -float("inf"))
        count += before.to(tl.int32)
        mass += tl.where(before, tl.exp((x - peak) * cold), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


# ----------------------------------------------------------------------------------------------------------- kernels

# What differs from step to step must not select another compilation: the number of rows, and where in the one array
# that holds a step's parameters each of them lies.
_ROWS = ["keys", "seeds", "temperatures", "top_ks", "top_ps", "min_ps", "words"]
_OUT = ["tokens", "statuses", "logprobs", "taken", "state"]


@triton.jit(do_not_specialize=["count", "where_stride", "how_stride"], do_not_specialize_on_alignment=["where", "how"])
def edit_kernel(
    logits: tensor,
    stride: int,
    where: tensor,
    how: tensor,
    count: int,
    where_stride: int,
    how_stride: int,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    at = logits + tl.load(where + i, mask=live, other=0).to(tl.int64) * stride
    at += tl.load(where + where_stride + i, mask=live, other=0)
    factor = tl.load(how + i, mask=live, other=1.0)
    x = tl.load(at, mask=live, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor) + tl.load(how + how_stride + i, mask=live, other=0.0)
    tl.store(at, x, mask=live)


@triton.jit(do_not_specialize_on_alignment=[*_ROWS[:1], *_ROWS[2:]])
def scan_kernel(
    logits: tensor, stride: int, words: tensor, words_stride: int, vocabulary: int,
    keys: tensor, temperatures: tensor, top_ks: tensor, top_ps: tensor, min_ps: tensor,
    own: tensor, own_stride: int, parts: tensor, marks: tensor, maxima: tensor, groups: int,
    MASKED: tl.constexpr, FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One split of one row: best score, peak and mass, and the maxima of its groups."""
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits += row.to(tl.int64) * stride
    words += row.to(tl.int64) * words_stride
    own += row.to(tl.int64) * own_stride
    key, temperature = tl.load(keys + row), tl.load(temperatures + row)
    greedy = (temperature < _COLDEST) | (tl.load(top_ks + row) == 1)
    cold = tl.where(greedy, 1.0, 1.0 / tl.maximum(temperature, _COLDEST))
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    token_of_best = split * SPLIT + tl.arange(0, BLOCK)
    peak, own_peak = best, best
    mass = tl.zeros([BLOCK], tl.float32)
    own_mass, broken = mass, tl.zeros([BLOCK], tl.int32)
    for start in range(0, SPLIT, BLOCK):
        token = split * SPLIT + start + tl.arange(0, BLOCK)
        x = _masked(logits, words, token, vocabulary, MASKED)
        broken |= (x != x).to(tl.int32)
        x = tl.where(x != x, -float("inf"), x)
        score = x * cold
        if not greedy:
            score -= _log_exponential(key, token)
        better = score > best
        best = tl.where(better, score, best)
        token_of_best = tl.where(better, token, token_of_best)
        higher = tl.maximum(peak, x)
        if FILTERED:
            over = _over(higher)
            mass = mass * tl.exp((peak - over) * cold) + tl.exp((x - over) * cold)
            group = tl.max(tl.reshape(x, [_GROUP, BLOCK // _GROUP]), 0)
            place = (split * SPLIT + start) // _GROUP + tl.arange(0, BLOCK // _GROUP)
            tl.store(maxima + row.to(tl.int64) * groups + place, group)
        peak = higher
        if LOGPROBS:
            y = tl.load(own + token, mask=token < vocabulary, other=-float("inf"))
            higher = tl.maximum(own_peak, y)
            over = _over(higher)
            own_mass = own_mass * tl.exp(own_peak - over) + tl.exp(y - over)
            own_peak = higher
    at = row * splits + split
    score, token = _winner(best, token_of_best)
    tl.store(marks + at * 2, token)
    tl.store(marks + at * 2 + 1, tl.max(broken, 0))
    top = tl.max(peak, 0)
    tl.store(parts + at * 5, score)
    tl.store(parts + at * 5 + 1, top)
    if FILTERED:
        tl.store(parts + at * 5 + 2, tl.sum(mass * tl.exp((peak - _over(top)) * cold), 0))
    if LOGPROBS:
        top = tl.max(own_peak, 0)
        tl.store(parts + at * 5 + 3, top)
        tl.store(parts + at * 5 + 4, tl.sum(own_mass * tl.exp(own_peak - _over(top)), 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["temperatures", *_OUT[:3], *_OUT[4:]])
def finish_kernel(
    parts: tensor, marks: tensor, temperatures: tensor, state: tensor,
    tokens: tensor, statuses: tensor, logprobs: tensor, splits: int, rows: int,
    FILTERED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge a row's splits: its token as if it had no filters, its peak and its mass."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    live, at = split < splits, row * splits + split
    score = tl.load(parts + at * 5, mask=live, other=-float("inf"))
    peaks = tl.load(parts + at * 5 + 1, mask=live, other=-float("inf"))
    token = tl.load(marks + at * 2, mask=live, other=0x7FFFFFFF)
    broken = tl.max(tl.load(marks + at * 2 + 1, mask=live, other=0), 0) != 0
    _, best = _winner(score, token)
    peak = tl.max(peaks, 0)
    fine = (peak > -float("inf")) & (peak < float("inf"))
    status = tl.where(broken, _NOT_FINITE, tl.where(fine, _OK, _NOTHING))
    tl.store(tokens + row, tl.where(status == _OK, best, 0))
    tl.store(statuses + row, status)
    tl.store(logprobs + row, 0.0)
    if FILTERED:
        cold = 1.0 / tl.maximum(tl.load(temperatures + row), _COLDEST)
        mass = tl.load(parts + at * 5 + 2, mask=live, other=0.0)
        mass = tl.where(peaks > -float("inf"), mass * tl.exp((peaks - peak) * cold), 0.0)
        tl.store(state + row, peak)
        tl.store(state + rows + row, tl.sum(mass, 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_ROWS[2:6], "statuses", *_OUT[3:]])
def bound_kernel(
    temperatures: tensor, top_ks: tensor, top_ps: tensor, min_ps: tensor, vocabulary: int, maxima: tensor, groups: int,
    state: tensor, taken: tensor, statuses: tensor, rows: int,
    CANDIDATES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A logit that the wanted number of group maxima reach: -inf for few tokens, inf where the row has no filter."""
    row = tl.program_id(0)
    k = tl.load(top_ks + row)
    drawn = (tl.load(temperatures + row) >= _COLDEST) & (k > 1) & (tl.load(statuses + row) == _OK)
    cut = (k < vocabulary) | (tl.load(top_ps + row) < 1.0) | (tl.load(min_ps + row) > 0.0)
    tl.store(taken + row, 0)
    tl.store(state + 2 * rows + row, float("inf"))
    if drawn & cut:
        group = tl.arange(0, GROUPS)
        x = tl.load(maxima + row.to(tl.int64) * groups + group, mask=group < groups, other=-float("inf"))
        wanted = tl.minimum(tl.minimum(k, CANDIDATES // 2), groups // 2)
        order = _order_of(x)
        low, high = tl.min(order, 0), tl.max(order, 0)
        while low < high:
            middle = low + (high - low + 1) // 2
            reached = tl.sum((order >= middle).to(tl.int32), 0) >= wanted
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
        all_of_them = vocabulary <= CANDIDATES
        tl.store(state + 2 * rows + row, tl.where(all_of_them, -float("inf"), _logit_of(low)))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["words", *_OUT[3:]])
def gather_kernel(
    logits: tensor, stride: int, words: tensor, words_stride: int, vocabulary: int,
    state: tensor, taken: tensor, keys: tensor, rows: int,
    MASKED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Collect the keys of a split's tokens that reach the bound; those beyond ``CANDIDATES`` are only counted."""
    row = tl.program_id(0)
    bound = tl.load(state + 2 * rows + row)
    if bound < float("inf"):
        logits += row.to(tl.int64) * stride
        words += row.to(tl.int64) * words_stride
        for start in range(0, SPLIT, BLOCK):
            token = tl.program_id(1) * SPLIT + start + tl.arange(0, BLOCK)
            x = _masked(logits, words, token, vocabulary, MASKED)
            passes = (x >= bound) & (x > -float("inf"))
            count = tl.sum(passes.to(tl.int32), 0)
            if count > 0:
                place = tl.atomic_add(taken + row, count) + tl.cumsum(passes.to(tl.int32), 0) - 1
                at = keys + row.to(tl.int64) * CANDIDATES + place
                tl.store(at, _key_of(x, token), mask=passes & (place < CANDIDATES))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_ROWS[1:6], "tokens", *_OUT[3:]])
def narrow_kernel(
    seeds: tensor, temperatures: tensor, top_ks: tensor, top_ps: tensor, min_ps: tensor, vocabulary: int,
    state: tensor, taken: tensor, keys: tensor, tokens: tensor, rows: int, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Sort a row's candidates, cut, and draw. Where they do not decide the cut, ``taken`` becomes -1."""
    row = tl.program_id(0)
    bound = tl.load(state + 2 * rows + row)
    if bound < float("inf"):
        count = tl.load(taken + row)
        peak, mass = tl.load(state + row), tl.load(state + rows + row)
        cold = 1.0 / tl.load(temperatures + row)
        k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        rank = tl.arange(0, CANDIDATES)
        key = tl.load(keys + row.to(tl.int64) * CANDIDATES + rank, mask=rank < count, other=-0x7FFFFFFFFFFFFFFF)
        key = tl.sort(key, descending=True)
        x, token = _logit_of(key >> _ID_BITS), _token_in(key)
        real = rank < tl.minimum(count, k)
        weight = tl.where(real, tl.exp((x - peak) * cold), 0.0)
        before = tl.cumsum(weight, 0) - weight
        found = tl.sum(weight, 0)
        limited, free = k < vocabulary, k >= vocabulary
        whole = tl.where(limited, found, mass)
        last = tl.min(tl.where(real, weight, 1.0), 0)
        ends = (min_p > 0.0) & (last < min_p)
        reaches = (limited & (count >= k)) | (free & (top_p < 1.0) & (found >= top_p * whole))
        stops = ends & ((top_p >= 1.0) | free)
        decided = (count <= CANDIDATES) & ((bound == -float("inf")) | reaches | stops)
        room = tl.where(top_p < 1.0, top_p * whole, float("inf"))
        kept = real & (weight >= min_p) & (before < room)
        score = tl.where(kept, x * cold - _log_exponential(tl.load(seeds + row), token), -float("inf"))
        _, best = _winner(score, token)
        if decided:
            tl.store(tokens + row, best)
        tl.store(taken + row, tl.where(decided, 0, -1))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_ROWS[1:], "tokens", *_OUT[3:]])
def whole_kernel(
    logits: tensor, stride: int, words: tensor, words_stride: int, vocabulary: int,
    seeds: tensor, temperatures: tensor, top_ks: tensor, top_ps: tensor, min_ps: tensor,
    state: tensor, taken: tensor, tokens: tensor, rows: int, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The exact cut of a row that ``narrow`` could not decide, by bisection over all keys, and the draw."""
    row = tl.program_id(0)
    if tl.load(taken + row) < 0:
        logits += row.to(tl.int64) * stride
        words += row.to(tl.int64) * words_stride
        peak, mass = tl.load(state + row), tl.load(state + rows + row)
        cold = 1.0 / tl.load(temperatures + row)
        k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        low = tl.full([], _LEAST_ORDER, tl.int64) << _ID_BITS
        first = (_order_of(peak) << _ID_BITS) | _ID_MASK
        if k < vocabulary:
            high = first
            while low < high:
                middle = low + (high - low) // 2
                count, _ = _above(logits, words, vocabulary, middle, peak, cold, MASKED, BLOCK)
                fits = count < k
                high = tl.where(fits, middle, high)
                low = tl.where(fits, low, middle + 1)
            _, mass = _above(logits, words, vocabulary, low - 1, peak, cold, MASKED, BLOCK)
        if top_p < 1.0:
            high = first
            while low < high:
                middle = low + (high - low) // 2
                _, before = _above(logits, words, vocabulary, middle, peak, cold, MASKED, BLOCK)
                fits = before < top_p * mass
                high = tl.where(fits, middle, high)
                low = tl.where(fits, low, middle + 1)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        token_of_best = tl.arange(0, BLOCK)
        seed = tl.load(seeds + row)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = _masked(logits, words, token, vocabulary, MASKED)
            kept = (_key_of(x, token) >= low) & (x > -float("inf")) & (tl.exp((x - peak) * cold) >= min_p)
            score = tl.where(kept, x * cold - _log_exponential(seed, token), -float("inf"))
            better = score > best
            best = tl.where(better, score, best)
            token_of_best = tl.where(better, token, token_of_best)
        _, token = _winner(best, token_of_best)
        tl.store(tokens + row, token)


@triton.jit(do_not_specialize_on_alignment=["tokens", "logprobs"])
def logprob_kernel(
    own: tensor,
    own_stride: int,
    parts: tensor,
    tokens: tensor,
    logprobs: tensor,
    splits: int,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    live, at = split < splits, row * splits + split
    peaks = tl.load(parts + at * 5 + 3, mask=live, other=-float("inf"))
    masses = tl.load(parts + at * 5 + 4, mask=live, other=0.0)
    peak = tl.max(peaks, 0)
    mass = tl.sum(masses * tl.exp(peaks - _over(peak)), 0)
    token = tl.load(tokens + row)
    x = tl.load(own + row.to(tl.int64) * own_stride + token)
    tl.store(logprobs + row, x - peak - tl.log(mass))


# ----------------------------------------------------------------------------------------------------------- launches


def choose(
    logits: Tensor,
    rows: SampleRows,
    mask: Tensor | None,
    edits: Edits | None,
    *,
    filtered: bool = True,
    logprobs: bool = False,
    own: Tensor | None = None,
    candidates: int = CANDIDATES,
) -> Chosen:
    """See ``sampling.choose``. ``filtered=False`` promises that no row has a filter: four launches fewer.

    ``candidates`` (a power of two) changes the speed, never the answer.
    """
    call = _Call(logits, rows, mask, candidates)
    if own is None:
        own = logits.clone() if logprobs and edits is not None else logits
    if edits is not None:
        _edit(logits, edits)
    call.scan(own, filtered, logprobs)
    if filtered:
        call.filter()
    if logprobs:
        call.measure(own)
    return call.chosen


def split_of(vocabulary: int) -> tuple[int, int]:
    """(tokens of a split, splits): enough programs to fill a GPU, and few enough splits to merge in one program.

    The same for any number of rows, so that sums are added in the same order and a row's cut is the same in any batch.
    """
    split = 1024 if vocabulary < 1 << 16 else 2048
    while -(-vocabulary // split) > 128:
        split *= 2
    split = min(split, max(2 * _GROUP.value, _power(vocabulary)))
    return split, -(-vocabulary // split)


class _Call:
    """The kernels' arguments and intermediate results. ``state``: fp32 [3, R] peak, mass and bound."""

    def __init__(self, logits: Tensor, rows: SampleRows, mask: Tensor | None, candidates: int) -> None:
        self.count, self.vocabulary = logits.shape
        assert logits.stride(1) == 1 and logits.dtype == torch.float32 and self.vocabulary <= MAX_VOCABULARY
        self.logits, self.rows, self.candidates = logits, rows, candidates
        self.masked, words = mask is not None, logits if mask is None else mask
        self.row = (logits, logits.stride(0), words, words.stride(0), self.vocabulary)
        self.filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        self.split, self.splits = split_of(self.vocabulary)
        self.block = min(self.split, 1024)
        self.groups = self.splits * self.split // _GROUP.value
        self.parts = self._empty(self.count, self.splits, 5)
        self.state = self._empty(3, self.count)
        self.taken = self._empty(self.count, dtype=torch.int32)
        answer = self._empty(3, self.count, dtype=torch.int32)
        self.chosen = Chosen(answer[0], answer[1], answer[2].view(torch.float32))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def scan(self, own: Tensor, filtered: bool, logprobs: bool) -> None:
        """Every row's token as if it had no filters."""
        marks = self._empty(self.count, self.splits, 2, dtype=torch.int32)
        self.maxima = self._empty(self.count, self.groups) if filtered else self.parts
        scan_kernel[(self.count, self.splits)](
            *self.row, self.rows.key, *self.filters, own, own.stride(0), self.parts, marks, self.maxima, self.groups,
            MASKED=self.masked, FILTERED=filtered, LOGPROBS=logprobs, SPLIT=self.split, BLOCK=self.block, num_warps=8,
        )  # fmt: skip
        finish_kernel[(self.count,)](
            self.parts, marks, self.rows.temperature, self.state,
            self.chosen.token, self.chosen.status, self.chosen.logprob, self.splits, self.count,
            FILTERED=filtered, SPLITS=_power(self.splits), num_warps=1,
        )  # fmt: skip

    def filter(self) -> None:
        """The tokens of rows with filters are drawn again, from what the filters keep."""
        keys = self._empty(self.count, self.candidates, dtype=torch.int64)
        chosen, draw = self.chosen, (self.state, self.taken)
        bound_kernel[(self.count,)](
            *self.filters, self.vocabulary, self.maxima, self.groups, *draw, chosen.status, self.count,
            CANDIDATES=self.candidates, GROUPS=_power(self.groups), num_warps=8,
        )  # fmt: skip
        gather_kernel[(self.count, self.splits)](
            *self.row, *draw, keys, self.count,
            MASKED=self.masked, SPLIT=self.split, BLOCK=self.block, CANDIDATES=self.candidates, num_warps=4,
        )  # fmt: skip
        narrow_kernel[(self.count,)](
            self.rows.key, *self.filters, self.vocabulary, *draw, keys, chosen.token, self.count,
            CANDIDATES=self.candidates, num_warps=4,
        )  # fmt: skip
        whole_kernel[(self.count,)](
            *self.row, self.rows.key, *self.filters, *draw, chosen.token, self.count,
            MASKED=self.masked, BLOCK=min(4096, _power(self.vocabulary)), num_warps=8,
        )  # fmt: skip

    def measure(self, own: Tensor) -> None:
        """The chosen tokens' logprobs."""
        logprob_kernel[(self.count,)](
            own, own.stride(0), self.parts, self.chosen.token, self.chosen.logprob, self.splits,
            SPLITS=_power(self.splits), num_warps=1,
        )  # fmt: skip


def _edit(logits: Tensor, edits: Edits) -> None:
    count = edits.where.shape[1]
    edit_kernel[(-(-count // 256),)](
        logits, logits.stride(0), edits.where, edits.how, count, edits.where.stride(0), edits.how.stride(0), BLOCK=256
    )


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))
