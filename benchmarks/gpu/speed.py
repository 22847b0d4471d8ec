"""Time of every kernel at the sizes of Llama-3.1-8B, and its share of the roof it stands under.

Bytes are what must be moved at least (keys and values once, inputs and outputs once), FLOPs what the mathematics needs;
the roofs are this card's own copy bandwidth and matmul rate, from the card section. Inputs take turns, so that none is
read from the card's cache; kernels are compiled and warm, and launched from a CUDA graph.
"""

from __future__ import annotations

import torch

from gpu.batches import Shape, batch_of
from gpu.check_attention import with_shared
from gpu.check_sampling import choose, parameters
from gpu.common import Context, Item, Record, launch_seconds, seconds_of, timed
from sglite.kernels import triton_elementwise as elementwise
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
        (f"qkv_to_pages (norm, RoPE, write) {tokens}", lambda: _qkv(context, tokens)),
    ]
    width = 512 if context.tiny else 128_256
    for kind in ("greedy", "no filters", "top-p 0.9", "top-k 50, top-p 0.9", "top-p 0.9, flat"):
        found.append((f"mask + sample {rows} x {width}, {kind}", lambda k=kind: _sample(context, rows, width, k)))
    for name in ("dense", "int8", "int4", "fp8"):
        for count in [1] if context.tiny else (1, 16, 64):
            found.append((f"linear {name} {count} tokens", lambda n=name, c=count: _linear(context, n, c)))
    return found


def _pool(context: Context, shape: Shape, pages: int, layers: int = 1):
    """A pool with something in it: half of zeros would be kind to the card's power."""
    ops = TritonOps(context.device, context.half)
    size = layers, pages, shape.page_size, shape.kv_heads, shape.head_dim
    kv = ops.allocate_kv(KVShape(*size, ops.dtype, context.device))
    for layer in range(layers):
        for half in kv.layer(layer):
            half.normal_()
    return ops, kv


def _shape(context: Context, rows: tuple[tuple[int, int], ...]) -> Shape:
    if context.tiny:
        return Shape(rows, heads=4, kv_heads=2, head_dim=16)
    return Shape(rows, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def _attention_time(context: Context, ops, kv, batch, spec, rounds=10) -> float:
    q = context.randn(len(batch.ids), spec.heads, spec.head_dim)
    plan = ops.plan(batch, spec)
    layers = kv.shape.layers
    return seconds_of(context, lambda i: ops.attend(q, kv, i % layers, batch, spec, plan), max(rounds, layers))


def _kv_bytes(shape: Shape, positions: int) -> int:
    return positions * 2 * shape.kv_heads * shape.head_dim * 2


def _decode(context: Context, rows: int, length: int) -> Record:
    shape = _shape(context, ((length - 1, 1),) * rows)
    batch, pages = batch_of(context, shape)
    moved = _kv_bytes(shape, rows * length)
    ops, kv = _pool(context, shape, pages, context.turns(moved))
    seconds = _attention_time(context, ops, kv, batch, shape.spec)
    plan = seconds_of(context, lambda i: ops.plan(batch, shape.spec), 5)
    share = context.share_of_copy(moved, seconds)
    goal = 0.85 if moved >= 64 * 2**20 else None
    return timed(seconds, share=share, goal=goal, of="copy", mib=moved / 2**20, plan_us=plan * 1e6)


def _cascade(context: Context, rows: int, shared: int, own: int) -> Record:
    """Against the same step without names for what is shared, and against rows that share nothing.

    Without names the same pages are read for every row and stay in the cache: that is the plain form's good luck.
    """
    shape = _shape(context, ((shared + own - 1, 1),) * rows)
    batch, pages = batch_of(context, shape, shared)
    ops, kv = _pool(context, shape, pages, context.turns(_kv_bytes(shape, shared + rows * own)))
    named, groups = with_shared(ops, batch, shape.spec, shared // 2)
    assert len(groups) == 1
    apart, more = batch_of(context, shape)
    _, wide = _pool(context, shape, more)
    fast = _attention_time(context, ops, kv, named, shape.spec)
    plain = _attention_time(context, ops, kv, batch, shape.spec)
    unshared = _attention_time(context, ops, wide, apart, shape.spec)
    times = {"times_plain": plain / fast, "times_unshared": unshared / fast}
    return timed(fast, plain_us=plain * 1e6, unshared_us=unshared * 1e6, **times, goal_times=3.0, met=plain / fast >= 3)


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
    ops, kv = _pool(context, shape, pages, 4)
    pairs = [tuple(context.randn(tokens, shape.kv_heads, shape.head_dim) for _ in range(2)) for _ in range(4)]
    return _streamed(context, lambda i: ops.write_kv(kv, i % 4, *pairs[i % 4], batch), 4 * pairs[0][0].nbytes)


def _qkv(context: Context, tokens: int) -> Record:
    """What the engine runs between the product and attention, for a model with norms of q and k."""
    shape = _shape(context, ((0, tokens),))
    batch, pages = batch_of(context, shape)
    _, kv = _pool(context, shape, pages, 3)
    heads, size = shape.heads + 2 * shape.kv_heads, shape.head_dim
    inputs = [context.randn(tokens, heads * size) for _ in range(3)]
    angles = torch.rand(tokens, size // 2, device=context.device)
    tables, norms = (angles.cos(), angles.sin()), (context.randn(size), context.randn(size))
    places = batch.positions, batch.write_slots

    def work(i: int) -> object:
        return elementwise.qkv_to_pages(inputs[i % 3], shape.heads, *places, tables, norms, 1e-5, *kv.layer(i % 3))

    return _streamed(context, work, 2 * inputs[0].nbytes + 2 * tables[0].nbytes)


def _sample(context: Context, rows: int, width: int, kind: str) -> Record:
    """Logits fall off as a model's do (but for "flat"); the mask allows half of the vocabulary."""
    spread = 0.5 if kind.endswith("flat") else 4.0
    logits = [torch.randn(rows, width, device=context.device) * spread for _ in range(6)]
    words = torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), device=context.device).to(torch.int32)
    asked = parameters(context, rows, width, False)
    warm = torch.full((rows,), 0.0 if kind == "greedy" else 1.0, device=context.device)
    top_k = torch.full_like(asked.top_k, 50) if "top-k" in kind else asked.top_k
    top_p = torch.full_like(warm, 0.9) if "top-p" in kind else asked.top_p
    asked = SampleRows(asked.key, warm, top_k, top_p, asked.min_p)

    def work(i: int) -> object:
        return choose(context, logits[i % 6], asked, words, None, filtered="top" in kind, logprobs=True)

    seconds, launched = seconds_of(context, work, 18), launch_seconds(context, lambda: work(0))
    moved = logits[0].nbytes + words.nbytes
    record = timed(seconds, share=context.share_of_copy(moved, seconds), of="copy", host_us=launched * 1e6)
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
