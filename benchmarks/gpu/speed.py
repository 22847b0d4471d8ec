"""Time of every kernel at the sizes of Llama-3.1-8B, and its share of the roof it stands under.

Bytes are what must be moved at least (keys and values once, inputs and outputs once), FLOPs what the mathematics needs;
the roofs are this card's own copy bandwidth and matmul rate, from the card section.
"""

from __future__ import annotations

import torch

from gpu.batches import Shape, batch_of
from gpu.check_attention import with_shared
from gpu.check_sampling import choose, parameters
from gpu.common import Context, Item, Record, seconds_of, timed
from sglite.kernels.ops import KVShape
from sglite.kernels.sampling import SampleRows
from sglite.kernels.triton_ops import TritonOps

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 32, 8, 128, 4096, 14_336
KIB, GIB = 1024, 2**30
MOST_KV = 24 * GIB


def items(context: Context) -> list[Item]:
    if context.tiny:
        decode, prefill = [(2, 64)], [(0, 24)]
    elif context.quick:
        decode, prefill = [(1, 8 * KIB), (64, 4 * KIB), (256, 4 * KIB)], [(0, 4 * KIB)]
    else:
        lengths = [KIB, 8 * KIB, 32 * KIB, 128 * KIB]
        pairs = [(batch, length) for batch in (1, 8, 32, 64, 128, 256) for length in lengths]
        decode = [(b, n) for b, n in pairs if b * n * 2 * KV_HEADS * HEAD_DIM * 2 <= MOST_KV]
        prefill = [(0, KIB), (0, 4 * KIB), (4 * KIB, 2 * KIB), (0, 16 * KIB)]
    rows, shared, own = (4, 64, 8) if context.tiny else (64, 4 * KIB, 128)
    found: list[Item] = [(f"decode attention {b} x {n}", lambda b=b, n=n: _decode(context, b, n)) for b, n in decode]
    found.append((f"cascade {rows} x ({shared} shared + {own})", lambda: _cascade(context, rows, shared, own)))
    found += [(f"prefill {new} behind {old}", lambda o=old, n=new: _prefill(context, o, n)) for old, new in prefill]
    tokens = 8 if context.tiny else 8192
    found += [
        (f"add_rms_norm {tokens}", lambda: _norm(context, tokens)),
        (f"rope {tokens}", lambda: _rope(context, tokens)),
        (f"silu_mul {tokens}", lambda: _silu(context, tokens)),
        (f"write_kv {tokens}", lambda: _write(context, tokens)),
    ]
    width = 512 if context.tiny else 128_256
    for kind in ("greedy", "no filters", "top-p 0.9", "top-k 50, top-p 0.9", "top-p 0.9, flat"):
        found.append((f"mask + sample {rows} x {width}, {kind}", lambda k=kind: _sample(context, rows, width, k)))
    for name in ("dense", "int8", "int4", "fp8"):
        for count in [1] if context.tiny else (1, 16, 64):
            found.append((f"linear {name} {count} tokens", lambda n=name, c=count: _linear(context, n, c)))
    return found


def _pool(context: Context, shape: Shape, pages: int):
    """A pool with something in it: half of zeros would be kind to the card's power."""
    ops = TritonOps(context.device, context.half)
    kv = ops.allocate_kv(KVShape(1, pages, shape.page_size, shape.kv_heads, shape.head_dim, ops.dtype, context.device))
    for half in kv.layer(0):
        half.normal_()
    return ops, kv


def _shape(context: Context, rows: tuple[tuple[int, int], ...]) -> Shape:
    if context.tiny:
        return Shape(rows, heads=4, kv_heads=2, head_dim=16)
    return Shape(rows, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def _attention_time(context: Context, ops, kv, batch, spec, rounds=10) -> float:
    q = context.randn(len(batch.ids), spec.heads, spec.head_dim)
    plan = ops.plan(batch, spec)
    return seconds_of(context, lambda i: ops.attend(q, kv, 0, batch, spec, plan), rounds)


def _kv_bytes(shape: Shape, positions: int) -> int:
    return positions * 2 * shape.kv_heads * shape.head_dim * 2


def _decode(context: Context, rows: int, length: int) -> Record:
    shape = _shape(context, ((length - 1, 1),) * rows)
    batch, pages = batch_of(context, shape)
    ops, kv = _pool(context, shape, pages)
    seconds = _attention_time(context, ops, kv, batch, shape.spec)
    moved = _kv_bytes(shape, rows * length)
    plan = seconds_of(context, lambda i: ops.plan(batch, shape.spec), 5)
    share = context.share_of_copy(moved, seconds)
    goal = 0.85 if moved >= 64 * 2**20 else None
    return timed(seconds, share=share, goal=goal, of="copy", mib=moved / 2**20, plan_us=plan * 1e6)


def _cascade(context: Context, rows: int, shared: int, own: int) -> Record:
    shape = _shape(context, ((shared + own - 1, 1),) * rows)
    batch, pages = batch_of(context, shape, shared)
    ops, kv = _pool(context, shape, pages)
    named, groups = with_shared(ops, batch, shape.spec, shared // 2)
    assert len(groups) == 1
    # without names the same pages are read for every row; they stay in the cache, so the fair plain form has its own
    apart, more = batch_of(context, shape)
    _, wide = _pool(context, shape, more)
    fast = _attention_time(context, ops, kv, named, shape.spec)
    plain = _attention_time(context, ops, kv, batch, shape.spec)
    unshared = _attention_time(context, ops, wide, apart, shape.spec)
    return timed(fast, plain_us=plain * 1e6, unshared_us=unshared * 1e6, times_plain=plain / fast, goal_times=3.0)


def _prefill(context: Context, old: int, new: int) -> Record:
    shape = _shape(context, ((old, new),))
    batch, pages = batch_of(context, shape)
    ops, kv = _pool(context, shape, pages)
    seconds = _attention_time(context, ops, kv, batch, shape.spec, 5)
    pairs = new * old + new * (new + 1) // 2
    flops = 4 * shape.heads * shape.head_dim * pairs
    goal = 0.55 if new >= 4 * KIB else None
    return timed(seconds, share=context.share_of_matmul(flops, seconds), goal=goal, of="matmul")


def _streamed(context: Context, work, moved: int) -> Record:
    seconds = seconds_of(context, work)
    return timed(seconds, share=context.share_of_copy(moved, seconds), goal=0.8, of="copy")


def _norm(context: Context, tokens: int) -> Record:
    ops = TritonOps(context.device, context.half)
    pairs = [(context.randn(tokens, HIDDEN), context.randn(tokens, HIDDEN)) for _ in range(3)]
    weight = context.randn(HIDDEN)
    return _streamed(context, lambda i: ops.add_rms_norm(*pairs[i % 3], weight, 1e-5), 4 * pairs[0][0].nbytes)


def _rope(context: Context, tokens: int) -> Record:
    ops = TritonOps(context.device, context.half)
    angles = torch.rand(tokens, HEAD_DIM // 2, device=context.device)
    cos, sin = angles.cos(), angles.sin()
    packed = [context.randn(tokens, HEADS + KV_HEADS, HEAD_DIM) for _ in range(3)]
    moved = 2 * packed[0].nbytes + cos.nbytes + sin.nbytes
    return _streamed(context, lambda i: ops.rope(packed[i % 3][:, :HEADS], packed[i % 3][:, HEADS:], cos, sin), moved)


def _silu(context: Context, tokens: int) -> Record:
    ops = TritonOps(context.device, context.half)
    inputs = [context.randn(tokens, 2 * INNER) for _ in range(2)]
    return _streamed(context, lambda i: ops.silu_mul(inputs[i % 2]), inputs[0].nbytes * 3 // 2)


def _write(context: Context, tokens: int) -> Record:
    shape = _shape(context, ((0, tokens),))
    batch, pages = batch_of(context, shape)
    ops, kv = _pool(context, shape, pages)
    k, v = (context.randn(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
    return _streamed(context, lambda i: ops.write_kv(kv, 0, k, v, batch), 4 * k.nbytes)


def _sample(context: Context, rows: int, width: int, kind: str) -> Record:
    """Logits fall off as a model's do (but for "flat"); the mask allows half of the vocabulary."""
    logits = torch.randn(rows, width, device=context.device) * (0.5 if kind.endswith("flat") else 4.0)
    words = torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), device=context.device).to(torch.int32)
    asked = parameters(context, rows, width, False)
    warm = torch.full((rows,), 0.0 if kind == "greedy" else 1.0, device=context.device)
    top_k = torch.full_like(asked.top_k, 50) if "top-k" in kind else asked.top_k
    top_p = torch.full_like(warm, 0.9) if "top-p" in kind else asked.top_p
    asked = SampleRows(asked.key, warm, top_k, top_p, asked.min_p)
    filtered = "top" in kind
    seconds = seconds_of(
        context, lambda i: choose(context, logits, asked, words, None, filtered=filtered, logprobs=True)
    )
    moved = logits.nbytes + words.nbytes
    record = timed(seconds, share=context.share_of_copy(moved, seconds), of="copy")
    return record if kind.endswith("flat") else record | {"goal_us": 60, "met": seconds <= 60e-6}


def _linear(context: Context, name: str, tokens: int) -> Record:
    """The gate and up product, its weights read once; three of them in turn, so that none waits in the cache."""
    try:
        ops = TritonOps(context.device, context.half, name)
    except Exception as error:
        return {"ok": None, "error": f"not offered on this card: {error}"}
    n, k = (64, 128) if context.tiny else (2 * INNER, HIDDEN)
    packed = [ops.pack(context.randn(n, k, scale=k**-0.5)) for _ in range(3)]
    x = context.randn(tokens, k)
    seconds = seconds_of(context, lambda i: ops.linear(x, packed[i % 3]))
    bits = {"dense": 16, "int8": 8, "int4": 4, "fp8": 8}[name]
    return timed(seconds, share=context.share_of_copy(n * k * bits // 8, seconds), of="copy")
