"""One pass over the logits: edits before it, then for every row the winner of its race, the peak, the mass.

``scan_kernel`` is split over the vocabulary; ``finish_kernel`` and ``logprob_kernel`` merge a row's splits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from sglite.kernels import sampling
from sglite.kernels.triton_logits import COLDEST, GROUP, log_exponential, masked, over, raced, winner_of

OK: tl.constexpr = tl.constexpr(sampling.OK)
NOT_FINITE: tl.constexpr = tl.constexpr(sampling.NOT_FINITE)
NOTHING: tl.constexpr = tl.constexpr(sampling.NOTHING_ALLOWED)

# What differs from step to step must not select another compilation: the number of rows, and where each of a step's
# parameters lies in the one array that holds them, or an answer in its own.
_ROWS = ["words", "keys", "temperatures", "top_ks", "top_ps", "min_ps"]
_ANSWER = ["tokens", "statuses", "logprobs"]


@triton.jit(do_not_specialize=["count", "where_stride", "how_stride"], do_not_specialize_on_alignment=["where", "how"])
def edit_kernel(
    logits: tensor, stride: int, where: tensor, how: tensor, count: int, where_stride: int, how_stride: int,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    at = logits + tl.load(where + i, mask=live, other=0).to(tl.int64) * stride
    at += tl.load(where + where_stride + i, mask=live, other=0)
    factor = tl.load(how + i, mask=live, other=1.0)
    x = tl.load(at, mask=live, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor) + tl.load(how + how_stride + i, mask=live, other=0.0)
    tl.store(at, x, mask=live)


@triton.jit
def _weighed(peak: tensor, mass: tensor, x: tensor, cold: tensor):
    """The largest logit so far and the weight of all, relative to it, with more of them."""
    higher = tl.maximum(peak, x)
    base = over(higher)
    return higher, mass * tl.exp((peak - base) * cold) + tl.exp((x - base) * cold)


@triton.jit
def _whole(peak: tensor, mass: tensor, cold: tensor):
    """The same of all lanes together."""
    top = tl.max(peak, 0)
    return top, tl.sum(mass * tl.exp((peak - over(top)) * cold), 0)


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def scan_kernel(
    logits: tensor, stride: int, words: tensor, words_stride: int, vocabulary: int,
    keys: tensor, temperatures: tensor, top_ks: tensor, top_ps: tensor, min_ps: tensor,
    own: tensor, own_stride: int, parts: tensor, marks: tensor, maxima: tensor, groups: int,
    MASKED: tl.constexpr, FILTERED: tl.constexpr, LOGPROBS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One split of one row: best score, peak and mass, and the maxima of its groups."""
    row, first = tl.program_id(0), tl.program_id(1) * SPLIT
    logits += row.to(tl.int64) * stride
    words += row.to(tl.int64) * words_stride
    own += row.to(tl.int64) * own_stride
    maxima += row.to(tl.int64) * groups + first // GROUP
    key, temperature = tl.load(keys + row), tl.load(temperatures + row)
    greedy = (temperature < COLDEST) | (tl.load(top_ks + row) == 1)
    cold = tl.where(greedy, 1.0, 1.0 / tl.maximum(temperature, COLDEST))
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    winner = first + tl.arange(0, BLOCK)
    peak, own_peak = best, best
    mass = tl.zeros([BLOCK], tl.float32)
    own_mass, broken = mass, tl.zeros([BLOCK], tl.int32)
    for start in range(0, SPLIT, BLOCK):
        token = first + start + tl.arange(0, BLOCK)
        x = masked(logits, words, token, vocabulary, MASKED)
        broken |= (x != x).to(tl.int32)
        x = tl.where(x != x, -float("inf"), x)
        score = x * cold
        if not greedy:
            score -= log_exponential(key, token)
        best, winner = raced(best, winner, score, token)
        if FILTERED:
            peak, mass = _weighed(peak, mass, x, cold)
            group = tl.max(tl.reshape(x, [GROUP, BLOCK // GROUP]), 0)
            tl.store(maxima + start // GROUP + tl.arange(0, BLOCK // GROUP), group)
        else:
            peak = tl.maximum(peak, x)
        if LOGPROBS:
            y = tl.load(own + token, mask=token < vocabulary, other=-float("inf"))
            own_peak, own_mass = _weighed(own_peak, own_mass, y, 1.0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    score, token = winner_of(best, winner)
    top, whole = _whole(peak, mass, cold)
    tl.store(marks + at * 2, token)
    tl.store(marks + at * 2 + 1, tl.max(broken, 0))
    tl.store(parts + at * 5, score)
    tl.store(parts + at * 5 + 1, top)
    if FILTERED:
        tl.store(parts + at * 5 + 2, whole)
    if LOGPROBS:
        top, whole = _whole(own_peak, own_mass, 1.0)
        tl.store(parts + at * 5 + 3, top)
        tl.store(parts + at * 5 + 4, whole)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["temperatures", *_ANSWER])
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
    _, best = winner_of(score, token)
    peak = tl.max(peaks, 0)
    fine = (peak > -float("inf")) & (peak < float("inf"))
    status = tl.where(broken, NOT_FINITE, tl.where(fine, OK, NOTHING))
    tl.store(tokens + row, tl.where(status == OK, best, 0))
    tl.store(statuses + row, status)
    tl.store(logprobs + row, 0.0)
    if FILTERED:
        cold = 1.0 / tl.maximum(tl.load(temperatures + row), COLDEST)
        mass = tl.load(parts + at * 5 + 2, mask=live, other=0.0)
        mass = tl.where(peaks > -float("inf"), mass * tl.exp((peaks - peak) * cold), 0.0)
        tl.store(state + row, peak)
        tl.store(state + rows + row, tl.sum(mass, 0))


@triton.jit(do_not_specialize_on_alignment=_ANSWER)
def logprob_kernel(
    own: tensor, own_stride: int, parts: tensor, tokens: tensor, logprobs: tensor, splits: int, SPLITS: tl.constexpr
):  # fmt: skip
    """The logprob of a row's chosen token."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    live, at = split < splits, row * splits + split
    peaks = tl.load(parts + at * 5 + 3, mask=live, other=-float("inf"))
    masses = tl.load(parts + at * 5 + 4, mask=live, other=0.0)
    peak, mass = _whole(peaks, masses, 1.0)
    x = tl.load(own + row.to(tl.int64) * own_stride + tl.load(tokens + row))
    tl.store(logprobs + row, x - peak - tl.log(mass))
