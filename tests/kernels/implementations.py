"""Which Ops the shared tests run on. Another one is one more entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglite.kernels import get_ops
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

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Error allowed by the activation dtype alone."""
