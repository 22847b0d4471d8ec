"""Attention over paged keys and values: one kernel for prompts, decoding and shared prefixes.

A *unit* is a few query tokens and the keys they see together: a tile of a prompt's tokens, one decoding row, or the
tokens of many rows over the prefix that they share. The G query heads of a key head are further queries of the same
tile (row m of a tile is token m // ratio, head m % ratio), so keys and values are read once for all of them and a
decoding row fills a matrix instruction. ``split_kernel`` cuts units into *pieces* of keys so that every program has a
similar share, ``attend_kernel`` computes a piece with online softmax (Milakov and Gimelshein, arXiv:1805.02867; tiled
as in FlashAttention-2, arXiv:2307.08691), ``merge_kernel`` joins a unit's pieces by their log-sum-exp, always in the
same order.
Logarithms are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIECE = 256
"""Fewest keys worth a program of their own: below, the merge costs more than the keys."""
ALIGN = 64
"""Pieces begin at multiples of this many keys from their unit's first."""
SCAN, FILL = 1024, 64
"""Units and pieces that ``split_kernel`` looks at together."""
MERGED = 16
"""Pieces that ``merge_kernel`` joins at a time."""

# Arguments that change from step to step must not select another compilation of a kernel: none of these is
# specialised on its value or its alignment. They are small lists read one number at a time.
_UNITS = ["start", "stop", "low", "high", "row", "order", "first", "count"]
_PIECES = ["piece_unit", "piece_low", "piece_high"]
_PREFIX = ["prefix_unit", "prefix_place", "prefix_first", "prefix_count"]


@triton.jit(
    do_not_specialize=["units", "budget", "pieces"], do_not_specialize_on_alignment=_UNITS[:4] + _UNITS[6:] + _PIECES
)
def split_kernel(
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    piece_unit: tl.tensor,
    piece_low: tl.tensor,
    piece_high: tl.tensor,
    units: int,
    budget: int,
    pieces: int,
    WINDOW: tl.constexpr,
    LOW: tl.constexpr,
    LEAST: tl.constexpr,
    UNIT: tl.constexpr,
    SCAN: tl.constexpr,
    FILL: tl.constexpr,
):
    """Cut all units' keys into at most ``budget + units`` pieces; program u writes those of unit u.

    ``first`` and ``count`` [U] say where a unit's pieces lie. Pieces that nobody needs get unit -1.
    """
    unit = tl.program_id(0)
    total = 0
    for base in range(0, units, SCAN):
        index = base + tl.arange(0, SCAN)
        _, keys = _span(start, stop, low, high, index, index < units, WINDOW, LOW)
        total += tl.sum(keys)
    size = tl.maximum(LEAST, tl.cdiv(tl.cdiv(total, budget), UNIT) * UNIT)
    before, everyone = 0, 0
    for base in range(0, units, SCAN):
        index = base + tl.arange(0, SCAN)
        _, keys = _span(start, stop, low, high, index, index < units, WINDOW, LOW)
        needed = tl.where(index < units, tl.maximum(tl.cdiv(keys, size), 1), 0)
        everyone += tl.sum(needed)
        before += tl.sum(tl.where(index < unit, needed, 0))

    begin, keys = _span(start, stop, low, high, unit, unit < units, WINDOW, LOW)
    mine = tl.maximum(tl.cdiv(keys, size), 1)
    share = tl.cdiv(tl.cdiv(keys, mine), UNIT) * UNIT
    tl.store(first + unit, before)
    tl.store(count + unit, mine)
    for base in range(0, mine, FILL):
        index = base + tl.arange(0, FILL)
        inside = index < mine
        tl.store(piece_unit + before + index, tl.zeros_like(index) + unit, mask=inside)
        tl.store(piece_low + before + index, begin + tl.minimum(index * share, keys), mask=inside)
        tl.store(piece_high + before + index, begin + tl.minimum((index + 1) * share, keys), mask=inside)
    if unit == units - 1:
        for base in range(everyone, pieces, FILL):
            index = base + tl.arange(0, FILL)
            tl.store(piece_unit + index, tl.zeros_like(index) - 1, mask=index < pieces)


@triton.jit
def _span(
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    index: tl.tensor,
    inside: tl.tensor,
    WINDOW: tl.constexpr,
    LOW: tl.constexpr,
):
    """First key that a unit's tokens see and how many follow, itself included."""
    end = tl.load(high + index, mask=inside, other=0)
    begin = tl.zeros_like(end)
    if LOW:
        begin = tl.load(low + index, mask=inside, other=0)
    if WINDOW > 0:
        tokens = tl.load(stop + index, mask=inside, other=0) - tl.load(start + index, mask=inside, other=0)
        begin = tl.maximum(begin, end - tokens - WINDOW + 1)
    return begin, tl.maximum(end - begin, 0)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table", "positions", *_UNITS[:2], *_UNITS[4:6], "count", *_PIECES],
)
def attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    order: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    row: tl.tensor,
    count: tl.tensor,
    piece_unit: tl.tensor,
    piece_low: tl.tensor,
    piece_high: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    q_stride: int,
    table_stride: int,
    scale: float,
    softcap: float,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ORDERED: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One piece and one key head. A unit's only piece is its result, unless PARTIAL says that more is to come.

    q [T, H, D] with dense heads; keys, values [slots, G, D]; out [T, H, D]; partial fp32 [pieces, G, BLOCK_M, D] and
    lse fp32 [pieces, G, BLOCK_M]. ``order`` lists the tokens that ``start`` and ``stop`` count, where ORDERED.
    """
    kv_head = tl.program_id(0) % G
    piece = tl.program_id(0) // G
    unit = tl.load(piece_unit + piece)
    if unit >= 0:
        RATIO: tl.constexpr = H // G
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        valid, token, position = _queries(start, stop, order, positions, unit, m // RATIO, ORDERED)
        head = (kv_head * RATIO + m % RATIO) * D
        inside = valid[:, None] & (d < D)[None, :]
        query = token.to(tl.int64) * q_stride + head
        tile = tl.load(q + query[:, None] + d[None, :], mask=inside, other=0.0)

        low, high = tl.load(piece_low + piece), tl.load(piece_high + piece)
        plain, bare = _unmasked(position, low, high, WINDOW, BLOCK_N)
        k, v = keys + kv_head * D, values + kv_head * D
        pages = table + tl.load(row + unit).to(tl.int64) * table_stride
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if WINDOW > 0:
            acc, highest, mass = _blocks(
                acc, highest, mass, tile, position, k, v, pages, low, tl.minimum(plain, high), high, scale, softcap,
                G * D, D, PAGE, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        acc, highest, mass = _blocks(
            acc, highest, mass, tile, position, k, v, pages, plain, bare, high, scale, softcap,
            G * D, D, PAGE, WINDOW, SOFTCAP, False, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        acc, highest, mass = _blocks(
            acc, highest, mass, tile, position, k, v, pages, bare, high, high, scale, softcap,
            G * D, D, PAGE, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        mass = tl.where(mass > 0, mass, 1.0)
        acc = acc / mass[:, None]
        if PARTIAL or tl.load(count + unit) > 1:
            place = tl.program_id(0).to(tl.int64) * BLOCK_M + m
            tl.store(partial + place[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(lse + place, highest + tl.log2(mass), mask=valid)
        else:
            result = token.to(tl.int64) * (H * D) + head
            tl.store(out + result[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _queries(
    start: tl.tensor, stop: tl.tensor, order: tl.tensor, positions: tl.tensor, unit: tl.tensor, place: tl.tensor,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """The tokens at these places of a unit: whether there is one, its index, its position (the last one's if not)."""
    index = tl.load(start + unit) + place
    valid = index < tl.load(stop + unit)
    token = tl.where(valid, index, 0)
    if ORDERED:
        token = tl.load(order + token, mask=valid, other=0)
    position = tl.load(positions + token, mask=valid, other=0).to(tl.int32)
    return valid, token, tl.where(valid, position, tl.max(position))


@triton.jit
def _unmasked(position: tl.tensor, low: tl.tensor, high: tl.tensor, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys [plain, bare) of [low, high), in whole blocks, that every query of the tile sees."""
    blocks = tl.maximum(tl.minimum(high, tl.min(position) + 1) - low, 0) // BLOCK_N
    plain, bare = low, low + blocks * BLOCK_N
    if WINDOW > 0:
        plain = low + tl.cdiv(tl.maximum(tl.max(position) - WINDOW + 1 - low, 0), BLOCK_N) * BLOCK_N
        bare = tl.maximum(bare, plain)
    return plain, bare


@triton.jit
def _blocks(
    acc: tl.tensor, highest: tl.tensor, mass: tl.tensor, tile: tl.tensor, position: tl.tensor,
    k: tl.tensor, v: tl.tensor, pages: tl.tensor, begin: tl.tensor, end: tl.tensor, high: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor,
    STRIDE: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, end) in steps of BLOCK_N; only a MASKED step may reach beyond ``high``."""
    for base in range(begin, end, BLOCK_N):
        key = base + tl.arange(0, BLOCK_N)
        if MASKED:
            page = tl.load(pages + key // PAGE, mask=key < high, other=0)
        else:
            page = tl.load(pages + key // PAGE)
        slot = (page.to(tl.int64) * PAGE + key % PAGE) * STRIDE
        keys = _rows_at(k, slot, key < high, MASKED, D, BLOCK_D).to(tile.dtype)
        values = _rows_at(v, slot, key < high, MASKED, D, BLOCK_D).to(tile.dtype)
        score = tl.dot(tile, tl.trans(keys), input_precision=PRECISION)
        factor = scale  # the product with it is part of what exp2 is given: one instruction less for each score
        if SOFTCAP:
            score = (2 * tl.sigmoid(score * (scale * 2 / softcap)) - 1) * (softcap * 1.4426950408889634)
            factor = 1.0
        if MASKED:
            distance = position[:, None] - key[None, :]
            shown = (distance >= 0) & (key < high)[None, :]
            if WINDOW > 0:
                shown = shown & (distance < WINDOW)
            score = tl.where(shown, score, float("-inf"))
        top = tl.maximum(highest, tl.max(score, axis=1) * factor)
        base_line = top
        if MASKED:  # a query may see nothing yet
            base_line = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(score * factor - base_line[:, None])
        keep = tl.exp2(highest - base_line)
        mass = mass * keep + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(tile.dtype), values, acc * keep[:, None], input_precision=PRECISION)
        highest = top
    return acc, highest, mass


@triton.jit
def _rows_at(
    base: tl.tensor, slot: tl.tensor, seen: tl.tensor, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows of D numbers at these slots, zeros to their right: [BLOCK_N, BLOCK_D]. MASKED: zeros unless ``seen``."""
    d = tl.arange(0, BLOCK_D)
    at = base + slot[:, None] + d[None, :]
    if MASKED:
        found = tl.load(at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    elif BLOCK_D != D:
        found = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        found = tl.load(at)
    return found


@triton.jit(do_not_specialize_on_alignment=[*_UNITS[:2], *_UNITS[6:], *_PREFIX])
def merge_kernel(
    out: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    prefix_unit: tl.tensor,
    prefix_place: tl.tensor,
    prefix_first: tl.tensor,
    prefix_count: tl.tensor,
    prefix_partial: tl.tensor,
    prefix_lse: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PREFIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PREFIX_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Join the pieces of one query: program (unit, token of the unit, head). A unit of one piece is done already.

    Where PREFIXED, ``prefix_unit`` [T] is the token's unit over a shared prefix (-1: none), whose pieces come first.
    """
    unit, head = tl.program_id(0), tl.program_id(2)
    index = tl.load(start + unit) + tl.program_id(1)
    pieces = tl.load(count + unit)
    if (index < tl.load(stop + unit)) and (PREFIXED or pieces > 1):
        RATIO: tl.constexpr = H // G
        d = tl.arange(0, BLOCK_D)
        highest, mass, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
        if PREFIXED:
            shared = tl.load(prefix_unit + index)
            known = shared >= 0
            begin = tl.load(prefix_first + shared, mask=known, other=0)
            number = tl.load(prefix_count + shared, mask=known, other=0)
            m = tl.load(prefix_place + index, mask=known, other=0) * RATIO + head % RATIO
            highest, mass, acc = _join(
                highest, mass, acc, prefix_partial, prefix_lse, begin, number, head // RATIO, m,
                G, D, PREFIX_M, d, PIECES,
            )  # fmt: skip
        m = tl.program_id(1) * RATIO + head % RATIO
        begin = tl.load(first + unit)
        highest, mass, acc = _join(
            highest, mass, acc, partial, lse, begin, pieces, head // RATIO, m, G, D, BLOCK_M, d, PIECES
        )
        acc = acc / tl.where(mass > 0, mass, 1.0)
        result = out + (index.to(tl.int64) * H + head) * D + d
        tl.store(result, acc.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _join(
    highest: tl.tensor, mass: tl.tensor, acc: tl.tensor, partial: tl.tensor, lse: tl.tensor,
    begin: tl.tensor, number: tl.tensor, kv_head: tl.tensor, m: tl.tensor,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, d: tl.tensor, PIECES: tl.constexpr,
):  # fmt: skip
    """The softmax so far, joined with ``number`` pieces of the query in row m of its tile."""
    for base in range(0, number, PIECES):
        piece = base + tl.arange(0, PIECES)
        inside = piece < number
        place = ((begin + piece).to(tl.int64) * G + kv_head) * BLOCK_M + m
        height = tl.load(lse + place, mask=inside, other=float("-inf"))
        part = tl.load(partial + place[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        top = tl.maximum(highest, tl.max(height, axis=0))
        base_line = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(height - base_line)
        keep = tl.exp2(highest - base_line)
        mass = mass * keep + tl.sum(weight, axis=0)
        acc = acc * keep + tl.sum(part * weight[:, None], axis=0)
        highest = top
    return highest, mass, acc
