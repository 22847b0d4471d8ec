"""Products with dense and quantised weights against fp64 of the weight that went in."""

from __future__ import annotations

from itertools import accumulate

import torch

from gpu.common import LIMITS, Context, Item, Record, compared, poisoned
from sglite.kernels import triton_lora
from sglite.kernels.ops import Adapters
from sglite.kernels.triton_ops import TritonOps

FORMATS = {"dense": 1e-2, "int8": 2e-2, "int4": 1.3e-1, "fp8": 4e-2}
"""How far a product with normal random weights may be from the exact one, relative to its norm: mostly the format's
own rounding. A kernel that mixes up a group, a nibble or a row is far beyond."""


def items(context: Context) -> list[Item]:
    shapes = [(1, 4096, 4096), (17, 6144, 4096), (64, 4096, 14336), (333, 1024, 3072)]
    shapes = [(3, 64, 128)] if context.tiny else shapes
    found: list[Item] = []
    for name in FORMATS:
        for shape in shapes[: 2 if context.quick else None]:
            size = " x ".join(map(str, shape))
            found.append((f"{name} {size}", lambda n=name, s=shape: _product(context, n, s, False)))
        found.append((f"{name}, stacked, with a bias", lambda n=name: _product(context, n, shapes[0], True)))
    found.append(("LoRA, four adapters and none", lambda: _lora(context)))
    return found


def _lora(context: Context) -> Record:
    lengths, adapters = (5, 1, 1, 3, 9), (0, 2, -1, 1, 0)
    n, k, rank = (32, 64, 16) if context.tiny else (6144, 4096, 16)
    a, b = context.randn(3, rank, k, scale=k**-0.5), context.randn(3, n, rank, scale=rank**-0.5)
    indptr = [0, *accumulate(lengths)]
    x, y = context.randn(indptr[-1], k), context.randn(indptr[-1], n)
    exact = y.double()
    for start, stop, adapter in zip(indptr, indptr[1:], adapters, strict=False):
        if adapter >= 0:
            delta = x[start:stop].double() @ a[adapter].double().T @ b[adapter].double().T
            exact[start:stop] += delta
    with poisoned():
        triton_lora.add(y, x, Adapters(a, b), triton_lora.plan(indptr, adapters, context.device))
    return compared(y, exact, LIMITS[context.half])


def _product(context: Context, name: str, shape: tuple[int, int, int], stacked: bool) -> Record:
    rows, n, k = shape
    try:
        ops = TritonOps(context.device, context.half, name)
    except Exception as error:
        return {"ok": None, "error": f"not offered on this card: {error}"}
    weights = [context.randn(size, k, scale=k**-0.5) for size in ((n // 2, n - n // 2) if stacked else (n,))]
    bias = context.randn(n) if stacked else None
    x = context.randn(rows, k)
    packed = ops.pack_many(weights, bias)
    with poisoned():
        found = ops.linear(x, packed)
    exact = x.double() @ torch.cat(weights).double().T
    if bias is not None:
        exact += bias.double()
    error = float((found.double() - exact).norm() / exact.norm())
    record = {"ok": error <= FORMATS[name], "worst": error, "limit": FORMATS[name]}
    return record if record["ok"] else {**record, "error": f"WRONG: relative error {error:g}"}
