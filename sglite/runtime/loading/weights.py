"""The one view of a model's weights that models are built from: Hugging Face's names, whatever the file format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sglite.errors import ModelLoadError
from sglite.kernels.weights import BlockQuantized, WeightSource


class Weights(Protocol):
    """Tensors by name (``model.layers.0.self_attn.q_proj.weight``, ...), read when asked for."""

    def names(self) -> tuple[str, ...]: ...

    def get(self, name: str) -> WeightSource:
        """Matrices are [out, in]. Raises ModelLoadError naming file and tensor if it is missing or damaged."""
        ...


def finite(weight: WeightSource, name: str, path: Path) -> WeightSource:
    """The same weight; ModelLoadError if a number in it is NaN or infinite."""
    parts = [weight.scale, weight.offset] if isinstance(weight, BlockQuantized) else [weight]
    if all(part is None or _finite(part) for part in parts):
        return weight
    raise ModelLoadError(f"{path}: tensor {name} holds NaN or infinite numbers; the file is damaged, fetch it again")


def _finite(part: Tensor) -> bool:
    """A sum is NaN or infinite if a term is, and much cheaper than looking at each; a large sum may still be sound."""
    return bool(torch.isfinite(part.sum(dtype=torch.float32))) or bool(torch.isfinite(part).all())
