"""Attention over pages against fp64: prompts, chunks behind a prefix, decoding, shared prefixes, padded buckets.

Keys and values that no row may see are NaN, and so is the output before it is written.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from gpu.batches import Shape, batch_of, pool_for
from gpu.common import LIMITS, Context, Item, Record, compared, poisoned
from sglite.kernels.cascade import find_shared, pack_shared, shared_views
from sglite.kernels.triton_ops import TritonOps

TINY = {
    "one token": Shape(((0, 1),), heads=4, head_dim=16),
    "decode": Shape(((0, 1), (15, 1), (16, 1), (40, 1)), heads=4, head_dim=16),
    "mixed": Shape(((0, 9), (12, 1), (31, 20)), heads=4, head_dim=16, page_size=4),
}
DECODE = ((0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (255, 1), (1000, 1), (5000, 1))
MIXED = ((0, 9), (12, 1), (500, 70), (2047, 1), (0, 1), (31, 333), (3000, 129))
FULL = {
    "one token": Shape(((0, 1),)),
    "a prompt": Shape(((0, 1000),)),
    "a prompt of a page": Shape(((0, 16),)),
    "a chunk behind a prefix": Shape(((4000, 513),), heads=32, kv_heads=8),
    "decode": Shape(DECODE, heads=32, kv_heads=8),
    "decode, one long row": Shape(((70_000, 1),), heads=32, kv_heads=8),
    "decode, 129 rows": Shape(tuple((37 * n % 900, 1) for n in range(129)), heads=32, kv_heads=8),
    "decode, page size 1": Shape(DECODE, page_size=1),
    "mixed": Shape(MIXED, heads=32, kv_heads=8),
    "mixed, page size 1": Shape(MIXED, page_size=1),
    "every head its own keys": Shape(MIXED, heads=6, kv_heads=6, head_dim=64),
    "three heads a key": Shape(MIXED, heads=9, kv_heads=3, head_dim=64),
    "sixteen heads a key": Shape(MIXED, heads=16, kv_heads=1),
    "head size 80": Shape(MIXED, head_dim=80),
    "head size 96": Shape(MIXED, head_dim=96),
    "head size 256": Shape(MIXED, head_dim=256),
    "window 128": Shape(MIXED, window=128),
    "window 1": Shape(MIXED, window=1),
    "window 1024": Shape(MIXED, window=1024, heads=32, kv_heads=8),
    "softcap": Shape(MIXED, softcap=30.0),
}
QUICK = ("a prompt", "decode", "mixed", "window 128", "head size 256")
"""Also what is checked in float16 as well: every shape in both types would be compiled twice."""


def items(context: Context) -> list[Item]:
    shapes = TINY if context.tiny else {n: s for n, s in FULL.items() if not context.quick or n in QUICK}
    dtypes = [context.half] if context.tiny or context.quick else [torch.bfloat16, torch.float16]
    found: list[Item] = []
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for name, shape in shapes.items():
            if dtype != context.half and name not in QUICK:
                continue
            found.append((f"{name}, {kind}", lambda s=shape, d=dtype: _attend(context, s, d)))
    shared = Shape(((38, 1),) * 3 + ((5, 1),), heads=4, head_dim=16, page_size=4) if context.tiny else SHARED
    prefix = 32 if context.tiny else 1024
    found.append(("a shared prefix", lambda: _cascade(context, shared, prefix)))
    found.append(("a padded bucket", lambda: _padded(context, shared)))
    if not context.tiny:
        found.append(("a captured step while lengths grow", lambda: _captured(context)))
    return found


SHARED = Shape((*((1024 + 13 * n, 1) for n in range(70)), (9, 1), (600, 1)), heads=32, kv_heads=8)


def exact(q, kv, batch, spec):
    """The definition, row by row in fp64: [T, H, D]."""
    keys, values = kv.layer(0)
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    repeat = spec.heads // spec.kv_heads
    for row, (start, stop) in enumerate(pairwise(batch.indptr_host)):
        length = int(batch.kv_lengths[row])
        if length == 0:
            continue
        positions = torch.arange(length, device=q.device)
        slots = batch.page_table[row, positions // batch.page_size].long() * batch.page_size
        slots += positions % batch.page_size
        k, v = (part[slots].double().repeat_interleave(repeat, 1) for part in (keys, values))
        new = stop - start
        scores = torch.einsum("nhd,lhd->hnl", q[start:stop].double(), k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = positions[length - new :, None] - positions
        seen = (distance >= 0) & (distance < (spec.window or length + 1))
        scores = scores.masked_fill(~seen, -torch.inf)
        out[start:stop] = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)
    return out


def _attend(context: Context, shape: Shape, dtype) -> Record:
    ops = TritonOps(context.device, dtype)
    batch, pages = batch_of(context, shape)
    kv = pool_for(context, ops, shape, batch, pages, dtype)
    q = context.randn(len(batch.ids), shape.heads, shape.head_dim, dtype=dtype, scale=2.0)
    with poisoned():
        found = ops.attend(q, kv, 0, batch, shape.spec, ops.plan(batch, shape.spec))
    return compared(found, exact(q, kv, batch, shape.spec), LIMITS[dtype])


def with_shared(ops, batch, spec, least):
    tile = ops.prefix_tokens(spec)
    groups = find_shared(batch.page_table.cpu().numpy(), batch.kv_lengths.cpu().numpy(), batch.page_size, least=least)
    packed = torch.from_numpy(pack_shared(groups, batch.rows, tile)).to(batch.ids.device)
    return replace(batch, shared=shared_views(packed, batch.rows, tile)), groups


def _cascade(context: Context, shape: Shape, prefix: int) -> Record:
    ops = TritonOps(context.device, context.half)
    batch, pages = batch_of(context, replace(shape, rows=tuple(r for r in shape.rows if r[0] >= prefix)), prefix)
    kv = pool_for(context, ops, shape, batch, pages, context.half)
    q = context.randn(batch.rows, shape.heads, shape.head_dim)
    batch, groups = with_shared(ops, batch, shape.spec, prefix // 2)
    if not groups:
        return {"ok": False, "error": "find_shared found nothing"}
    with poisoned():
        found = ops.attend(q, kv, 0, batch, shape.spec, ops.plan(batch, shape.spec))
    return compared(found, exact(q, kv, batch, shape.spec), LIMITS[context.half])


def _padded(context: Context, shape: Shape) -> Record:
    """Rows of length 0 behind the real ones give zeros."""
    ops = TritonOps(context.device, context.half)
    batch, pages = batch_of(context, shape)
    kv = pool_for(context, ops, shape, batch, pages, context.half)
    batch.kv_lengths[-2:] = 0
    q = context.randn(batch.rows, shape.heads, shape.head_dim)
    with poisoned():
        found = ops.attend(q, kv, 0, batch, shape.spec, ops.plan(batch, shape.spec))
    return compared(found, exact(q, kv, batch, shape.spec), LIMITS[context.half])


def _captured(context: Context) -> Record:
    """One graph, three sets of lengths: nothing of the first may be frozen into it."""
    shape = Shape(((4095, 1),) * 24, heads=32, kv_heads=8)
    ops = TritonOps(context.device, context.half)
    batch, pages = batch_of(context, shape)
    kv = pool_for(context, ops, shape, batch, pages, context.half)
    q = context.randn(batch.rows, shape.heads, shape.head_dim)

    def step():
        return ops.attend(q, kv, 0, batch, shape.spec, ops.plan(batch, shape.spec))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1] * 24, [4096] * 24, [(n * 797) % 4096 for n in range(24)]):
        batch.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        record = compared(out, exact(q, kv, batch, shape.spec), LIMITS[context.half])
        if not record["ok"]:
            return {**record, "lengths": str(lengths[:4])}
    return record
