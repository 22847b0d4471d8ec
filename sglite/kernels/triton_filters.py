"""What top-k, top-p and min-p keep of a row, and the draw from it.

``bound_kernel`` picks a value that a few hundred of the group maxima pass, ``gather_kernel`` collects the tokens that
pass it, ``narrow_kernel`` sorts those and cuts. Where they do not hold everything the filters keep (a flat distribution
under top-p, a top-k beyond a thousand, many equal logits), ``whole_kernel`` finds the exact cut by bisection.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from sglite.kernels.triton_logits import (
    COLDEST,
    ID_BITS,
    ID_MASK,
    key_of,
    log_exponential,
    logit_of,
    masked,
    order_of,
    raced,
    token_in,
    winner_of,
)
from sglite.kernels.triton_scan import OK

_LEAST_ORDER: tl.constexpr = tl.constexpr(-2139095040)
"""Of the least finite float."""
_ANY: tl.constexpr = tl.constexpr(0x7FFFFFFF)

# See triton_scan.py: what differs from step to step selects no other compilation.
_ROWS = ["words", "seeds", "temperatures", "top_ks", "top_ps", "min_ps"]
_ANSWER = ["tokens", "statuses"]


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_ROWS[2:], "statuses"])
def bound_kernel(
    temperatures: tensor, top_ks: tensor, top_ps: tensor, min_ps: tensor, vocabulary: int, maxima: tensor, groups: int,
    state: tensor, taken: tensor, statuses: tensor, rows: int,
    CANDIDATES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A logit that the wanted number of group maxima reach: -inf for few tokens, inf where the row has no filter."""
    row = tl.program_id(0)
    k = tl.load(top_ks + row)
    drawn = (tl.load(temperatures + row) >= COLDEST) & (k > 1) & (tl.load(statuses + row) == OK)
    cut = (k < vocabulary) | (tl.load(top_ps + row) < 1.0) | (tl.load(min_ps + row) > 0.0)
    tl.store(taken + row, 0)
    tl.store(state + 2 * rows + row, float("inf"))
    if drawn & cut:
        group = tl.arange(0, GROUPS)
        x = tl.load(maxima + row.to(tl.int64) * groups + group, mask=group < groups, other=-float("inf"))
        wanted = tl.minimum(tl.minimum(k, CANDIDATES // 2), groups // 2)
        bound = _reached_by(order_of(x), wanted)
        tl.store(state + 2 * rows + row, tl.where(vocabulary <= CANDIDATES, -float("inf"), logit_of(bound)))


@triton.jit
def _reached_by(order: tensor, wanted: tensor):
    """The largest number that ``wanted`` of these reach."""
    low, high = tl.min(order, 0), tl.max(order, 0)
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.sum((order >= middle).to(tl.int32), 0) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["words"])
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
            x = masked(logits, words, token, vocabulary, MASKED)
            passes = (x >= bound) & (x > -float("inf"))
            count = tl.sum(passes.to(tl.int32), 0)
            if count > 0:
                place = tl.atomic_add(taken + row, count) + tl.cumsum(passes.to(tl.int32), 0) - 1
                at = keys + row.to(tl.int64) * CANDIDATES + place
                tl.store(at, key_of(x, token), mask=passes & (place < CANDIDATES))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_ROWS[1:], "tokens"])
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
        x, token = logit_of(key >> ID_BITS), token_in(key)
        real = rank < tl.minimum(count, k)
        weight = tl.where(real, tl.exp((x - peak) * cold), 0.0)
        found = tl.sum(weight, 0)
        whole = tl.where(k < vocabulary, found, mass)
        last = tl.min(tl.where(real, weight, 1.0), 0)
        enough = _decides(count, k, vocabulary, found, whole, last, top_p, min_p)
        decided = (count <= CANDIDATES) & ((bound == -float("inf")) | enough)
        room = tl.where(top_p < 1.0, top_p * whole, float("inf"))
        kept = real & (weight >= min_p) & (tl.cumsum(weight, 0) - weight < room)
        score = tl.where(kept, x * cold - log_exponential(tl.load(seeds + row), token), -float("inf"))
        _, best = winner_of(score, token)
        if decided:
            tl.store(tokens + row, best)
        tl.store(taken + row, tl.where(decided, 0, -1))


@triton.jit
def _decides(
    count: tensor, k: tensor, vocabulary: int, found: tensor, whole: tensor, last: tensor, top_p: tensor, min_p: tensor
):  # fmt: skip
    """Whether the ``count`` likeliest tokens hold all that the filters keep: enough for top-k, or enough weight for
    top-p (``found`` of the ``whole``), or the ``last`` too light for min-p."""
    limited, free = k < vocabulary, k >= vocabulary
    reaches = (limited & (count >= k)) | (free & (top_p < 1.0) & (found >= top_p * whole))
    return reaches | ((min_p > 0.0) & (last < min_p) & ((top_p >= 1.0) | free))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=[*_ROWS, "tokens"])
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
        low = tl.full([], _LEAST_ORDER, tl.int64) << ID_BITS
        if k < vocabulary:
            low = _lowest_key(logits, words, vocabulary, low, k, float("inf"), peak, cold, MASKED, BLOCK)
            _, mass = _before(logits, words, vocabulary, low - 1, peak, cold, MASKED, BLOCK)
        if top_p < 1.0:
            low = _lowest_key(logits, words, vocabulary, low, _ANY, top_p * mass, peak, cold, MASKED, BLOCK)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        winner = tl.arange(0, BLOCK)
        seed = tl.load(seeds + row)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = masked(logits, words, token, vocabulary, MASKED)
            kept = (key_of(x, token) >= low) & (x > -float("inf")) & (tl.exp((x - peak) * cold) >= min_p)
            score = tl.where(kept, x * cold - log_exponential(seed, token), -float("inf"))
            best, winner = raced(best, winner, score, token)
        _, token = winner_of(best, winner)
        tl.store(tokens + row, token)


@triton.jit
def _lowest_key(
    logits: tensor, words: tensor, vocabulary: int, low: tensor, most: tensor, room: tensor, peak: tensor, cold: tensor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest key, from ``low`` on, that fewer than ``most`` tokens come before, of less weight than ``room``."""
    high = (order_of(peak) << ID_BITS) | ID_MASK
    while low < high:
        middle = low + (high - low) // 2
        count, mass = _before(logits, words, vocabulary, middle, peak, cold, MASKED, BLOCK)
        fits = (count < most) & (mass < room)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return low


@triton.jit
def _before(
    logits: tensor, words: tensor, vocabulary: int, key: tensor, peak: tensor, cold: tensor,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens of a row come before ``key``, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = masked(logits, words, token, vocabulary, MASKED)
        before = (key_of(x, token) > key) & (x > -float("inf"))
        count += before.to(tl.int32)
        mass += tl.where(before, tl.exp((x - peak) * cold), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)
