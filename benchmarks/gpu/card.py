"""The roofs: what this card copies and multiplies in a second, measured, since data sheets promise more."""

from __future__ import annotations

import torch

from gpu.common import Context, Item, Record, seconds_of


def items(context: Context) -> list[Item]:
    return [
        ("card", lambda: _card(context)),
        ("copy bandwidth", lambda: _copy(context)),
        ("matmul rate", lambda: _matmul(context)),
    ]


def _card(context: Context) -> Record:
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if context.tiny:
        return {"ok": True, "name": "Triton's interpreter", **versions}
    found = torch.cuda.get_device_properties(context.device)
    free, total = torch.cuda.mem_get_info(context.device)
    return {
        "ok": True,
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_gib": total / 2**30,
        "free_gib": free / 2**30,
        **versions,
    }


def _copy(context: Context) -> Record:
    """The faster of the driver's copy and of a kernel that reads and writes."""
    count = 1 << (12 if context.tiny else 29)
    source = torch.ones(count, dtype=torch.bfloat16, device=context.device)
    target = torch.empty_like(source)
    ways = lambda i: target.copy_(source), lambda i: torch.neg(source, out=target)
    copied, negated = (2 * source.nbytes / seconds_of(context, way, 10) for way in ways)
    return {"ok": True, "roof": {"copy": max(copied, negated)}, "copy_gb_s": copied / 1e9, "kernel_gb_s": negated / 1e9}


def _matmul(context: Context) -> Record:
    size = 64 if context.tiny else 8192
    a, b = context.randn(size, size), context.randn(size, size)
    seconds = seconds_of(context, lambda i: a @ b, 10)
    rate = 2 * size**3 / seconds
    return {"ok": True, "roof": {"matmul": rate}, "tflops": rate / 1e12}
