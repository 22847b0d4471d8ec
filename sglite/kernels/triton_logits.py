"""A row's logits as the sampling kernels see them: masked, in one total order, raced against each other.

Every cut is made on (logit, id) as one integer, so ties are cut by id and nothing depends on the order of threads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from sglite.kernels import sampling

ID_BITS: tl.constexpr = tl.constexpr(20)
"""Of a key; vocabularies are no larger."""
ID_MASK: tl.constexpr = tl.constexpr((1 << 20) - 1)
GROUP: tl.constexpr = tl.constexpr(32)
"""Tokens of which ``scan_kernel`` keeps the largest logit."""
COLDEST: tl.constexpr = tl.constexpr(sampling.COLDEST)


@triton.jit
def _finalise(h: tensor):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def log_exponential(key: tensor, token: tensor):
    """log of ``sampling.exponential``."""
    word = _finalise(token.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32))
    word = _finalise(word ^ (key >> 32).to(tl.uint32))
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.log(tl.where(v < 0.00390625, v * (1 + v * (0.5 + v * 0.3333333333)), -tl.log(1 - v)))


@triton.jit
def masked(logits: tensor, words: tensor, token: tensor, vocabulary: int, MASKED: tl.constexpr):
    """One row's logits at some tokens; -inf where the mask or the vocabulary's end forbids them."""
    inside = token < vocabulary
    x = tl.load(logits + token, mask=inside, other=-float("inf"))
    if MASKED:
        word = tl.load(words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, -float("inf"))
    return x


@triton.jit
def order_of(x: tensor):
    """The float as an integer of the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def logit_of(order: tensor):
    order = order.to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x: tensor, token: tensor):
    """(logit descending, id ascending) as one integer: larger is earlier."""
    return (order_of(x) << ID_BITS) | (token ^ ID_MASK).to(tl.int64)


@triton.jit
def token_in(key: tensor):
    return ((key & ID_MASK) ^ ID_MASK).to(tl.int32)


@triton.jit
def raced(best: tensor, winner: tensor, score: tensor, token: tensor):
    """The better of each lane's best so far and its next token."""
    better = score > best
    return tl.where(better, score, best), tl.where(better, token, winner)


@triton.jit
def winner_of(score: tensor, token: tensor):
    """The best score, and the first token that has it."""
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0)


@triton.jit
def over(peak: tensor):
    """What to subtract before exp: the peak, or 0 where there is nothing but -inf."""
    return tl.where(peak == -float("inf"), 0.0, peak)
