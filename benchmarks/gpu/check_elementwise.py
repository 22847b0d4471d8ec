"""Norms, RoPE, SiLU, gathers and the write into pages against fp64."""

from __future__ import annotations

import torch

from gpu.batches import Shape, batch_of
from gpu.common import LIMITS, Context, Item, Record, compared, poisoned
from sglite.kernels import triton_elementwise as elementwise
from sglite.kernels.ops import KVShape
from sglite.kernels.triton_ops import TritonOps

EPS = 1e-5


def items(context: Context) -> list[Item]:
    widths = [(3, 33), (5, 64)] if context.tiny else [(1, 1024), (513, 4096), (33, 14336), (5, 577), (64, 128)]
    ropes = [(3, 4, 2, 16)] if context.tiny else [(1, 32, 8, 128), (77, 16, 8, 64), (9, 5, 1, 80), (9, 4, 4, 256)]
    dtypes = [context.half] if context.tiny or context.quick else [torch.bfloat16, torch.float16, torch.float32]
    found: list[Item] = []
    for dtype in dtypes:
        ops = TritonOps(context.device, dtype)
        kind = str(dtype).removeprefix("torch.")
        for shape in widths:
            name = f"{shape[0]} x {shape[1]} {kind}"
            found += [
                (f"rms_norm {name}", lambda o=ops, s=shape: _norm(context, o, s)),
                (f"add_rms_norm {name}", lambda o=ops, s=shape: _add_norm(context, o, s)),
                (f"silu_mul {name}", lambda o=ops, s=shape: _silu(context, o, s)),
                (f"embed {name}", lambda o=ops, s=shape: _embed(context, o, s)),
            ]
        for shape in ropes:
            name = " x ".join(map(str, shape))
            found.append((f"rope {name} {kind}", lambda o=ops, s=shape: _rope(context, o, s)))
            found.append((f"write_kv {name} {kind}", lambda o=ops, s=shape: _write(context, o, s)))
            for normed in (False, True):
                what = f"qkv_to_pages {name}{', normed' if normed else ''} {kind}"
                found.append((what, lambda o=ops, s=shape, n=normed: _qkv(context, o, s, n)))
    return found


def _norm64(x, weight):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def _norm(context: Context, ops, shape) -> Record:
    x, weight = context.randn(*shape, dtype=ops.dtype, scale=3.0), context.randn(shape[1], dtype=ops.dtype)
    with poisoned():
        found = ops.rms_norm(x, weight, EPS)
    return compared(found, _norm64(x, weight), LIMITS[ops.dtype])


def _add_norm(context: Context, ops, shape) -> Record:
    x, residual = (context.randn(*shape, dtype=ops.dtype) for _ in range(2))
    weight = context.randn(shape[1], dtype=ops.dtype)
    with poisoned():
        found, total = ops.add_rms_norm(x, residual.clone(), weight, EPS)
    exact = x.double() + residual.double()
    first = compared(total, exact, LIMITS[ops.dtype])
    return first if not first["ok"] else compared(found, _norm64(exact, weight), LIMITS[ops.dtype])


def _silu(context: Context, ops, shape) -> Record:
    x = context.randn(shape[0], 2 * shape[1], dtype=ops.dtype, scale=3.0)
    with poisoned():
        found = ops.silu_mul(x)
    gate, up = x.double().chunk(2, -1)
    return compared(found, torch.nn.functional.silu(gate) * up, LIMITS[ops.dtype])


def _embed(context: Context, ops, shape) -> Record:
    table = context.randn(1000, shape[1], dtype=ops.dtype)
    ids = torch.randint(0, 1000, (shape[0],), device=context.device)
    with poisoned():
        found = ops.embed(ids, table)
    return {"ok": torch.equal(found, table[ids])}


def _rope(context: Context, ops, shape) -> Record:
    tokens, heads, kv_heads, dim = shape
    packed = context.randn(tokens, heads + 2 * kv_heads, dim, dtype=ops.dtype)  # q and k are views of a product
    q, k = packed[:, :heads], packed[:, heads : heads + kv_heads]
    angles = torch.rand(tokens, dim // 2, device=context.device) * 100
    both = torch.cat([q, k], 1).double()
    with poisoned():
        found = torch.cat(ops.rope(q, k, angles.cos(), angles.sin()), 1)
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    return compared(found, _turned(both, cos, sin), LIMITS[ops.dtype])


def _turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _write(context: Context, ops, shape) -> Record:
    tokens, _, kv_heads, dim = shape
    form = Shape(((3, tokens),), kv_heads=kv_heads, head_dim=dim)
    batch, pages = batch_of(context, form)
    batch.write_slots[0] = -1  # padding: written nowhere
    kv = ops.allocate_kv(KVShape(2, pages, form.page_size, kv_heads, dim, ops.dtype, context.device))
    k, v = (context.randn(tokens, kv_heads, dim, dtype=ops.dtype) for _ in range(2))
    for layer in range(2):
        for half in kv.layer(layer):
            half.fill_(7.0)
    ops.write_kv(kv, 1, k, v, batch)
    for half, new in zip(kv.layer(1), (k, v), strict=True):
        exact = torch.full_like(half, 7.0)
        exact[batch.write_slots[1:]] = new[1:]
        if not torch.equal(half, exact):
            return {"ok": False, "error": f"WRONG: {int((half != exact).sum())} numbers of the pool"}
    untouched = all(bool((half == 7.0).all()) for half in kv.layer(0))
    return {"ok": untouched, **({} if untouched else {"error": "WRONG: another layer was written"})}


def _qkv(context: Context, ops, shape, normed: bool) -> Record:
    """Norm, RoPE and the write into pages in one launch; the first token is padding."""
    tokens, heads, kv_heads, dim = shape
    form = Shape(((3, tokens),), kv_heads=kv_heads, head_dim=dim)
    batch, pages = batch_of(context, form)
    batch.write_slots[0] = -1
    keys, values = (context.randn(pages * form.page_size, kv_heads, dim, dtype=ops.dtype) for _ in range(2))
    before = keys.clone(), values.clone()
    qkv = context.randn(tokens, heads + 2 * kv_heads, dim, dtype=ops.dtype)
    angles = torch.rand(3 + tokens, dim // 2, device=context.device) * 100
    tables = angles.cos(), angles.sin()
    norms = tuple(context.randn(dim, dtype=ops.dtype) for _ in range(2)) if normed else None
    places = batch.positions, batch.write_slots
    with poisoned():
        q = elementwise.qkv_to_pages(qkv.flatten(1), heads, *places, tables, norms, EPS, keys, values)
    exact_q, exact_k, new = (
        qkv[:, :heads].double(),
        qkv[:, heads : heads + kv_heads].double(),
        qkv[:, heads + kv_heads :],
    )
    if norms is not None:
        exact_q, exact_k = (_norm64(x, w) for x, w in zip((exact_q, exact_k), norms, strict=True))
    at = [table[batch.positions].double()[:, None] for table in tables]
    exact_keys, exact_values = before
    exact_keys = exact_keys.double()
    exact_keys[batch.write_slots[1:]] = _turned(exact_k, *at)[1:]
    exact_values[batch.write_slots[1:]] = new[1:]
    if not torch.equal(values, exact_values):
        return {"ok": False, "error": f"WRONG: {int((values != exact_values).sum())} numbers of the values' pool"}
    first = compared(q, _turned(exact_q, *at), LIMITS[ops.dtype])
    return first if not first["ok"] else compared(keys, exact_keys, LIMITS[ops.dtype])
