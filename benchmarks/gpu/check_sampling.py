"""The sampling kernels against their plain form, at the vocabularies of real models."""

from __future__ import annotations

import math

import torch

from gpu.common import Context, Item, Record, poisoned
from sglite.kernels import sampling, triton_sampling
from sglite.kernels.sampling import Edits, SampleRows

SCALES = {"flat": 0.3, "as of a model": 3.0, "peaked": 30.0}


def items(context: Context) -> list[Item]:
    sizes = [(4, 300)] if context.tiny else [(64, 128_256), (7, 151_936), (1, 49_152), (33, 1000)]
    found: list[Item] = []
    for rows, width in sizes:
        for name, scale in SCALES.items():
            what = f"{rows} x {width}, {name}"
            found.append((what, lambda r=rows, w=width, s=scale: _equal(context, r, w, s, True)))
        found.append((f"{rows} x {width}, no filters", lambda r=rows, w=width: _equal(context, r, w, 3.0, False)))
    found.append(("many equal logits", lambda: _equal(context, *sizes[0], 3.0, True, step=1.0)))
    found.append(("bad rows", lambda: _bad(context, *sizes[0])))
    found.append(("alone and in company", lambda: _alone(context, *sizes[0])))
    if not context.tiny:
        found.append(("draws follow the distribution", lambda: _statistics(context)))
    return found


def choose(context: Context, *asked, **how):
    """The kernels; in the interpreter with a sort that it can do in a second."""
    few = {"candidates": 32} if context.tiny else {}
    return triton_sampling.choose(*asked, **how, **few)


def parameters(context: Context, rows: int, width: int, filtered: bool) -> SampleRows:
    def cycle(values, dtype=torch.float32):
        return torch.tensor((values * rows)[:rows], dtype=dtype, device=context.device)

    key = torch.randint(-(2**62), 2**62, (rows,), device=context.device)
    if not filtered:
        return SampleRows(key, cycle([0.0, 1.0, 0.7]), cycle([width], torch.int32), cycle([1.0]), cycle([0.0]))
    top_k = cycle([width, 50, width, 3, 1, width, 700, 2000], torch.int32).clamp(max=width)
    return SampleRows(
        key, cycle([1.0, 0.7, 2.0, 0.0]), top_k, cycle([0.9, 1.0, 0.95, 0.5, 0.999]), cycle([0.0, 0.05, 0.0])
    )


def inputs(context: Context, rows: int, width: int, scale: float, step: float = 0.0):
    logits = torch.randn(rows, width, device=context.device) * scale
    if step:
        logits = (logits / step).round() * step
    words = torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), device=context.device).to(torch.int32)
    words[0] = 0
    words[0, 3] = 0b1011  # a row of three tokens
    count = 5 * rows
    where = torch.stack([torch.arange(count) % rows, torch.arange(count) // rows * 31 + 7]).to(torch.int32)
    how = torch.stack([torch.rand(count) + 0.8, torch.randn(count)])
    how[1, ::7] = -math.inf
    return logits, words, Edits(where.to(context.device), how.to(context.device))


def _equal(context: Context, rows: int, width: int, scale: float, filtered: bool, step: float = 0.0) -> Record:
    logits, words, edits = inputs(context, rows, width, scale, step)
    asked = parameters(context, rows, width, filtered)
    plain = sampling.choose(logits.clone(), asked, words, edits, filtered=filtered, logprobs=True)
    with poisoned():
        fast = choose(context, logits.clone(), asked, words, edits, filtered=filtered, logprobs=True)
    wrong = (plain.token != fast.token).nonzero().flatten().tolist()
    near = [row for row in wrong if _nearly(logits, words, edits, asked, row, plain, fast)]
    record = {"ok": wrong == near and torch.equal(plain.status, fast.status), "ties_by_rounding": len(near)}
    if not record["ok"]:
        rows_wrong = [row for row in wrong if row not in near][:5]
        record["error"] = (
            f"WRONG: rows {rows_wrong}: {fast.token[rows_wrong].tolist()}, not {plain.token[rows_wrong].tolist()}"
        )
        return record
    same = plain.token == fast.token
    apart = float((plain.logprob - fast.logprob)[same].abs().max())
    return record if apart < 1e-3 else {**record, "ok": False, "error": f"WRONG: a logprob is off by {apart:g}"}


def _nearly(logits, words, edits, asked, row, plain, fast) -> bool:
    """Both tokens' scores, or both their places at a cut, are equal up to fp32's rounding of long sums."""
    if int(plain.status[row]) != int(fast.status[row]):
        return False
    changed = logits.clone()
    sampling.apply_edits(changed, edits)
    x = changed[row].masked_fill(~sampling.unpacked(words[row : row + 1], len(changed[row]))[0], -math.inf).double()
    weights = ((x - x.max()) / max(float(asked.temperature[row]), 1e-5)).exp()
    order = weights.sort(descending=True, stable=True)
    before = order.values.cumsum(0) - order.values
    whole = order.values[: int(asked.top_k[row])].sum()
    edge = float(asked.top_p[row]) * whole
    for token in (int(plain.token[row]), int(fast.token[row])):
        place = int((order.indices == token).nonzero())
        if abs(float(before[place] - edge)) < 1e-4 * float(whole):
            return True
    ids = torch.tensor([int(plain.token[row]), int(fast.token[row])], device=logits.device)
    scores = x[ids] / float(asked.temperature[row]) - sampling.exponential(asked.key[row], ids).double().log()
    return abs(float(scores[0] - scores[1])) < 1e-3


def _bad(context: Context, rows: int, width: int) -> Record:
    logits, words, _ = inputs(context, rows, width, 3.0)
    words[:] = -1
    logits[0, width - 1] = torch.nan
    words[1] = 0
    logits[2] = -math.inf
    with poisoned():
        found = choose(context, logits, parameters(context, rows, width, True), words, None).status.tolist()
    expected = [sampling.NOT_FINITE, sampling.NOTHING_ALLOWED, sampling.NOTHING_ALLOWED] + [sampling.OK] * (rows - 3)
    return {"ok": found == expected, **({} if found == expected else {"error": f"WRONG: {found[:8]}"})}


def _alone(context: Context, rows: int, width: int) -> Record:
    logits, words, _ = inputs(context, rows, width, 3.0)
    asked = parameters(context, rows, width, True)
    together = choose(context, logits.clone(), asked, words, None).token
    for row in range(0, rows, 9):
        part = slice(row, row + 1)
        one = SampleRows(*(getattr(asked, name)[part] for name in ("key", "temperature", "top_k", "top_p", "min_p")))
        alone = choose(context, logits[part].clone(), one, words[part].contiguous(), None).token
        if int(alone) != int(together[row]):
            return {
                "ok": False,
                "error": f"WRONG: row {row} draws {int(alone)} alone and {int(together[row])} in company",
            }
    return {"ok": True}


def _statistics(context: Context) -> Record:
    """Chi-squared of 200,000 draws over 12 tokens; beyond 45 once in a million times (11 degrees of freedom)."""
    logits, n = torch.randn(12, device=context.device), 200_000
    wide = torch.full((1, 1024), -math.inf, device=context.device)
    wide[0, :12] = logits
    key = torch.arange(n, device=context.device) * 0x1E3779B97F4A7C15
    ones, zeros = torch.ones(n, device=context.device), torch.zeros(n, device=context.device)
    free = torch.full((n,), 1024, dtype=torch.int32, device=context.device)
    token = choose(context, wide.repeat(n, 1), SampleRows(key, ones, free, ones, zeros), None, None).token
    expected = logits.softmax(0).double() * n
    statistic = float(((token.long().bincount(minlength=12)[:12] - expected) ** 2 / expected).sum())
    return {"ok": statistic < 45 and int(token.max()) < 12, "chi_squared": statistic}
