"""Which Ops the shared tests run on. Another one is one more entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from checked_memory import INTERPRETED

from sglite.kernels import get_ops
from sglite.kernels.native import NativeOps, available
from sglite.kernels.ops import Ops

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Implementation:
    """``weight_error``: how far a product with random weights may be from the exact one, relative to its norm."""

    make: Callable[[torch.dtype], Ops]
    weight_error: float = 0.0
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


IMPLEMENTATIONS = {
    "reference": Implementation(lambda dtype: get_ops("reference", CPU, dtype, "dense")),
    "cpu": Implementation(lambda dtype: get_ops("cpu", CPU, dtype, "dense")),
    "cpu int8": Implementation(lambda dtype: get_ops("cpu", CPU, dtype, "int8"), weight_error=0.02),
}


def _native(weights: Literal["dense", "int8", "int4"], weight_error: float, *, amx: bool) -> Implementation:
    def make(dtype: torch.dtype) -> Ops:
        return NativeOps(CPU, dtype, weights, 2, amx=amx)

    return Implementation(make, weight_error, (torch.bfloat16,))


if available() is None:
    for amx in (True, False):  # without tile instructions the two are the same
        name = "native" if amx else "native, vectors"
        IMPLEMENTATIONS[name] = _native("dense", 0.0, amx=amx)
        IMPLEMENTATIONS[f"{name} int8"] = _native("int8", 0.02, amx=amx)
        IMPLEMENTATIONS[f"{name} int4"] = _native("int4", 0.1, amx=amx)


def _triton(
    weights: Literal["dense", "int8", "int4", "fp8"], weight_error: float, device: str, *dtypes: torch.dtype
) -> Implementation:
    return Implementation(lambda dtype: get_ops("triton", torch.device(device), dtype, weights), weight_error, dtypes)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Error allowed by the activation dtype alone."""

if INTERPRETED or torch.cuda.is_available():  # test_triton.py starts a process with the interpreter
    # in the interpreter products of bfloat16 are wrong
    where = ("cpu", torch.float32, torch.float16) if INTERPRETED else ("cuda", *ROUNDING)
    IMPLEMENTATIONS["triton"] = _triton("dense", 0.0, *where)
    IMPLEMENTATIONS["triton int8"] = _triton("int8", 0.02, *where)
    IMPLEMENTATIONS["triton int4"] = _triton("int4", 0.1, *where)
    IMPLEMENTATIONS["triton fp8"] = _triton("fp8", 0.05, *where)
