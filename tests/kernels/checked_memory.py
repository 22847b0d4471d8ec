"""Triton's interpreter with a guard: every address that a kernel reads or writes lies inside one of its arguments."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Memory:
    """The address ranges of the running kernel's tensor arguments."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def admit(self, arguments: list[object]) -> None:
        self.ranges = [_extent(a) for a in arguments if isinstance(a, torch.Tensor) and a.numel()]

    def check(self, addresses: np.ndarray, mask: np.ndarray | None, size: int, verb: str) -> None:
        used = addresses.reshape(-1).astype(np.int64)
        if mask is not None:
            used = used[np.broadcast_to(mask, addresses.shape).reshape(-1).astype(bool)]
        inside = np.zeros(used.shape, dtype=bool)
        for start, stop in self.ranges:
            inside |= (used >= start) & (used + size <= stop)
        assert inside.all(), f"{(~inside).sum()} of {used.size} addresses {verb} lie outside every argument"


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def guard(patch: pytest.MonkeyPatch) -> Memory:
    """Check every access of every kernel until ``patch`` is undone."""
    from triton.runtime import interpreter

    memory = Memory()
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    originals = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    start = executor._init_args_hst

    def init(self, args, kwargs):
        hosts = start(self, args, kwargs)
        memory.admit([*hosts[0], *hosts[1].values()])
        return hosts

    def load(pointers, mask, *rest):
        memory.check(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8, "read")
        return originals["create_masked_load"](pointers, mask, *rest)

    def store(pointers, value, mask, *rest):
        memory.check(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8, "written")
        return originals["create_masked_store"](pointers, value, mask, *rest)

    patch.setattr(executor, "_init_args_hst", init)
    patch.setattr(builder, "create_masked_load", load)
    patch.setattr(builder, "create_masked_store", store)
    return memory


def poison(patch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` returns NaN, or a senseless integer: whatever a kernel leaves out or reads too early shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(float("nan") if made.dtype.is_floating_point else 0x3B)

    patch.setattr(torch, "empty", poisoned)
