"""What the sections share: the context, poisoned memory, errors against an exact result, and time on the device."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Record = dict
Item = tuple[str, Callable[[], Record]]
"""A name, and what gives the record of one measurement or check; "ok" in it says whether it is right."""


@dataclass(frozen=True)
class Context:
    """``tiny``: shapes for Triton's interpreter; ``roof``: what the card section measured."""

    device: torch.device
    tiny: bool = False
    quick: bool = False
    roof: dict = field(default_factory=dict)

    @property
    def half(self):
        """The interpreter's products of bfloat16 are wrong (Triton 3.7-3.9), so there it is float16."""
        return torch.float16 if self.tiny else torch.bfloat16

    def randn(self, *shape, dtype=None, scale=1.0):
        return (torch.randn(*shape, device=self.device, dtype=torch.float32) * scale).to(dtype or self.half)

    def sync(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def turns(self, moved):
        """How many inputs of ``moved`` bytes have to take turns so that none is still in the card's cache."""
        if self.tiny:
            return 1
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return -(-4 * cache // moved)

    def share_of_copy(self, moved, seconds):
        return moved / seconds / self.roof["copy"] if self.roof.get("copy") and not self.tiny else None

    def share_of_matmul(self, flops, seconds):
        return flops / seconds / self.roof["matmul"] if self.roof.get("matmul") and not self.tiny else None


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors begin as NaN (integers as a large number): whoever reads before writing gives wrong results."""
    names = "empty", "empty_like"
    real = {name: getattr(torch, name) for name in names}

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and tensor.element_size() > 1:
                return tensor.fill_(torch.nan)
            return tensor.fill_(77) if tensor.dtype in (torch.int32, torch.int64) else tensor

        return made

    try:
        for name in names:
            setattr(torch, name, poison(real[name]))
        yield
    finally:
        for name in names:
            setattr(torch, name, real[name])


def compared(found, exact, limit) -> Record:
    """Largest error relative to the exact result's own size; wrong where it exceeds ``limit`` or is no number."""
    found, exact = found.double(), exact.double()
    if found.shape != exact.shape:
        return {"ok": False, "error": f"shape {tuple(found.shape)}, expected {tuple(exact.shape)}"}
    size = float(exact.abs().mean()) or 1.0
    difference = (found - exact).abs()
    worst = float((difference / (exact.abs() + size)).nan_to_num(nan=torch.inf).max()) if exact.numel() else 0.0
    record = {"ok": worst <= limit, "worst": worst, "limit": limit}
    if not record["ok"]:
        at = int(difference.nan_to_num(nan=torch.inf).argmax())
        wrong = int(((difference / (exact.abs() + size)).nan_to_num(nan=torch.inf) > limit).sum())
        record["error"] = (
            f"WRONG: {wrong} of {exact.numel()} numbers; at flat index {at} found {float(found.flatten()[at]):g}, "
            f"expected {float(exact.flatten()[at]):g}"
        )
    return record


LIMITS = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
"""Of one rounded operation; fp32 products may run in TF32."""


def seconds_of(context: Context, work: Callable[[int], object], rounds: int = 20) -> float:
    """Seconds of one ``work(i)`` on the device, the host's launches left out where the work can be captured.

    ``i`` counts up, so that the work can take other inputs each time than those still in the cache.
    """
    if context.tiny:
        began = time.perf_counter()
        work(0)
        return time.perf_counter() - began
    for i in range(3):
        work(i)
    context.sync()
    best = float("inf")
    run, count = _captured(context, work, rounds) or (lambda: [work(i) for i in range(rounds)], rounds)
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        context.sync()
        best = min(best, start.elapsed_time(stop) / 1e3 / count)
    return best


def _captured(context, work, rounds):
    stream = torch.cuda.Stream(context.device)
    graph = torch.cuda.CUDAGraph()
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(0)
        context.sync()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(rounds):
                work(i)
    except Exception:
        traceback.print_exc()  # into the log: what follows includes the host's launches
        context.sync()
        return None
    graph.replay()
    context.sync()
    return graph.replay, rounds


def launch_seconds(context: Context, work: Callable[[], object], rounds: int = 50) -> float:
    """What one call costs the host: its launches, while the device is busy with something else."""
    work()
    context.sync()
    began = time.perf_counter()
    for _ in range(1 if context.tiny else rounds):
        work()
    seconds = time.perf_counter() - began
    context.sync()
    return seconds if context.tiny else seconds / rounds


def timed(seconds, *, share=None, goal=None, of="", **more) -> Record:
    """A line of the table of times. Missing a goal is told, and is not a wrong result."""
    record = {"us": seconds * 1e6, **more}
    if share is not None:
        record |= {"share": share, "of": of}
        if goal is not None:
            record |= {"goal": goal, "met": share >= goal}
    return record
